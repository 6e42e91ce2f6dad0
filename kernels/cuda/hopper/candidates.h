// Lists of the classes of a row whose probability may reach an epsilon, filled by the logit pass while it
// goes by (docs/kernels/cut.md).
#ifndef LOSSD_KERNELS_CUDA_HOPPER_CANDIDATES_H_
#define LOSSD_KERNELS_CUDA_HOPPER_CANDIDATES_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/hopper/logit_tiles.h"

namespace lossd::kernels::cuda::hopper {

// Room for the candidates of a row; 1 / epsilon of the default is four times the least.
inline constexpr int64_t kLeastListed = 1024;
inline constexpr int64_t kMostListed = 2048;

struct Candidate {
  int32_t column;
  float z;
};

// With z, f, d and the reference as in TilePartials: a class is listed if 2^d reaches epsilon times what was
// known of the row's sum when its tile was done, so all that reach it in the end are there, and some that do
// not.
struct CandidateLists {
  Candidate* entries = nullptr;  // [rows, capacity], in any order, the target left out
  int32_t capacity = 0;          // of a row
  int32_t* counts = nullptr;     // [rows]; above capacity: the list is incomplete
  float* known = nullptr;  // [rows], of the sum of 2^d over all classes, the target included: at most that
  float log2_epsilon = 0.0f;

  // For `rows` rows with room for `listed` candidates each, at most kMostListed; without log2_epsilon.
  static CandidateLists Carve(Carver& carver, int64_t rows, int64_t vocab, int64_t listed) {
    CandidateLists lists;
    lists.capacity = static_cast<int32_t>(std::min(vocab, listed));
    lists.entries = carver.Take<Candidate>(rows * lists.capacity);
    lists.counts = carver.Take<int32_t>(rows);
    lists.known = carver.Take<float>(rows);
    return lists;
  }
};

// The first tile whose candidates are listed as the pass goes by. Before it too little is known of the sums;
// the tiles before are done again when all is.
constexpr int64_t FirstListedTile(int64_t vocab_tiles) { return CeilDiv(vocab_tiles, 16); }

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_CANDIDATES_H_
