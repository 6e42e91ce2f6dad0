// SPDX-License-Identifier: Apache-2.0
// The order in which a persistent grid takes the tiles of the logit pass. Pure functions.
//
// | choice | why not another |
// | groups of panels of about 20 MB | hidden states stay in L2, weights are read once a group |
//
// The file is shorter than 60 lines because it is a table of one choice, which kernels and plans without CUDA
// share.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_LOGIT_TILES_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_LOGIT_TILES_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/kernels/hopper/tiles.h"

namespace lossd::kernels::cuda::hopper {

inline constexpr int kVocabTile = kColumnTile;  // classes a block

// Without classes there is a tile of padding, so that sums and exponentials are written.
constexpr int64_t VocabTiles(int64_t vocab) { return std::max<int64_t>(CeilDiv(vocab, kVocabTile), 1); }

// How many panels are worked on together: as many as stay in L2, in groups of about the same size.
constexpr int64_t PanelsPerGroup(int64_t panels, int64_t inner) {
  constexpr int64_t kGroupBytes = 20 << 20;
  const int64_t most = std::max<int64_t>(kGroupBytes / (kPanelRows * inner * 2), 1);
  return CeilDiv(panels, CeilDiv(panels, most));
}

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_LOGIT_TILES_H_
