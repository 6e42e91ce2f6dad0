// SPDX-License-Identifier: Apache-2.0
// The tiles that every product of this folder is computed in, and their panels: a panel is the rows of one
// tile of a cluster, over all columns. Pure constants.
//
// | choice | why not another |
// | 128 x 256 a block, two consumer warpgroups | the widest product instruction reads least shared memory |
// | two blocks in a cluster, the same columns | a quarter less L2 traffic than alone; power is the limit |
//
// The file is shorter than 60 lines because it is a table of constants, which kernels and plans without CUDA
// share.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_TILES_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_TILES_H_

#include <cstdint>

#include "kernels/cuda/device/device_memory.h"

namespace lossd::kernels::cuda::hopper {

inline constexpr int kRowTile = 128;                          // rows a block
inline constexpr int kColumnTile = 256;                       // columns a block
inline constexpr int kInnerTile = 64;                         // of the inner dimension, a stage of the ring
inline constexpr int kClusterBlocks = 2;                      // side by side in rows
inline constexpr int kPanelRows = kRowTile * kClusterBlocks;  // rows a cluster works on at a time

constexpr int64_t Panels(int64_t rows) { return CeilDiv(rows, kPanelRows); }

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_TILES_H_
