// Tiles of the logit pass and the order in which a persistent grid takes them. Pure functions.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_LOGIT_TILES_H_
#define LOSSD_KERNELS_CUDA_HOPPER_LOGIT_TILES_H_

#include <cstdint>

namespace lossd::kernels::cuda::hopper {

inline constexpr int kRowTile = 128;      // rows a block
inline constexpr int kVocabTile = 256;    // classes a block
inline constexpr int kInnerTile = 64;     // of the hidden size, a stage of the ring
inline constexpr int kClusterBlocks = 2;  // side by side in rows, sharing the classes
inline constexpr int kClusterRows = kRowTile * kClusterBlocks;

constexpr int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Vocabulary tiles that partials are kept for.
constexpr int64_t VocabTiles(int64_t vocab) { return CeilDiv(vocab, kVocabTile); }

struct TileOrder {
  int clusters = 1;  // of the grid, all running at once
  int group = 8;     // row panels whose hidden states are meant to stay in L2
  int skew = 0;      // cycles
  int flags = 0;
};

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_LOGIT_TILES_H_
