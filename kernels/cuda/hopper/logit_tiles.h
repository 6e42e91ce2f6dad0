// Tiles of the logit pass and the order in which a persistent grid takes them. Pure functions.
//
// | choice | why not another |
// | 128 x 256 a block, two consumer warpgroups | the widest product instruction reads least shared memory |
// | two blocks in a cluster, the same classes | a quarter less L2 traffic than alone; power is the limit |
// | groups of panels of about 20 MB | hidden states stay in L2, weights are read once a group |
#ifndef LOSSD_KERNELS_CUDA_HOPPER_LOGIT_TILES_H_
#define LOSSD_KERNELS_CUDA_HOPPER_LOGIT_TILES_H_

#include <algorithm>
#include <cstdint>

namespace lossd::kernels::cuda::hopper {

inline constexpr int kRowTile = 128;                          // rows a block
inline constexpr int kVocabTile = 256;                        // classes a block
inline constexpr int kInnerTile = 64;                         // of the hidden size, a stage of the ring
inline constexpr int kClusterBlocks = 2;                      // side by side in rows
inline constexpr int kPanelRows = kRowTile * kClusterBlocks;  // rows a cluster works on at a time

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t VocabTiles(int64_t vocab) { return CeilDiv(vocab, kVocabTile); }
constexpr int64_t Panels(int64_t rows) { return CeilDiv(rows, kPanelRows); }

// How many panels are worked on together: as many as stay in L2, in groups of about the same size.
constexpr int64_t PanelsPerGroup(int64_t panels, int64_t inner) {
  constexpr int64_t kGroupBytes = 20 << 20;
  const int64_t most = std::max<int64_t>(kGroupBytes / (kPanelRows * inner * 2), 1);
  return CeilDiv(panels, CeilDiv(panels, most));
}

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_LOGIT_TILES_H_
