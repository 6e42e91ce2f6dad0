// SPDX-License-Identifier: Apache-2.0
// Lists of the classes of a row whose probability may reach an epsilon, filled by the logit pass while it
// goes by (docs/kernels/recomputed.md).
//
// The file is shorter than 60 lines because plans without CUDA (paths/sample_plan.h) include it, and the
// logit pass does.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CANDIDATES_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CANDIDATES_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/hopper/logit_tiles.h"

namespace lossd::kernels::cuda::hopper {

// Room for the candidates of a row; 1 / epsilon of the default is four times the least.
inline constexpr int64_t kLeastListed = 1024;
inline constexpr int64_t kMostListed = 2048;

struct Candidate {
  int32_t column;
  float z;
};

// With z, f, d and the reference as in TilePartials: a class is listed if 2^d reaches epsilon times the lower
// bound that the row's sum had when its tile was done. So the list has all classes that reach epsilon times
// the sum, and some that do not.
struct CandidateLists {
  Candidate* entries = nullptr;  // [rows, capacity], in any order, the target left out
  int32_t capacity = 0;          // of a row
  int32_t* counts = nullptr;     // [rows]; above capacity: the list is incomplete
  float* sum_bound = nullptr;    // [rows], lower bound of the sum of 2^d over all classes with the target
  float log2_epsilon = 0.0f;

  // For `rows` rows with room for `listed` candidates each, at most kMostListed; without log2_epsilon.
  static CandidateLists Carve(Carver& carver, int64_t rows, int64_t vocab, int64_t listed) {
    CandidateLists lists;
    lists.capacity = static_cast<int32_t>(std::min(vocab, listed));
    lists.entries = carver.Take<Candidate>(rows * lists.capacity);
    lists.counts = carver.Take<int32_t>(rows);
    lists.sum_bound = carver.Take<float>(rows);
    return lists;
  }
};

// The first tile whose candidates are listed as the pass goes by. Before it the lower bounds are too low to
// be of use; a second pass lists the candidates of the tiles before it when the sums are complete.
constexpr int64_t FirstListedTile(int64_t vocab_tiles) { return CeilDiv(vocab_tiles, 16); }

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CANDIDATES_H_
