// SPDX-License-Identifier: Apache-2.0
// A head whose rows come directly and deferred, in random mixtures, compared with the reference. Hidden
// states are retained in a few places, as an engine has them: of a microbatch that is released, or expires,
// the place is another one's next. What goes wrong fails the running test. Not thread-safe.
#ifndef LOSSD_TESTS_KERNELS_DEFERRED_ROWS_H_
#define LOSSD_TESTS_KERNELS_DEFERRED_ROWS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/backend.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {

class DeferredRows {
 public:
  static constexpr int64_t kMostRows = 40;  // of a slice

  // The backend and `rng` outlive it.
  DeferredRows(Backend& backend, const ProblemSpec& spec, Rng& rng);

  // Chunks are expected to be computed; or else to fail, and then they leave nothing behind but what the
  // backend says of the gradients, which are then set to zero.
  void ExpectFailures(bool expect) { expect_failures_ = expect; }
  int failures() const { return failures_; }

  // Losses of a few slices, as many as there are places for, which are kept, and perhaps of one that is not.
  void Forward();
  // Gradients of some slices that are kept, in any order, and of others that come directly. Kept slices stay.
  void Backward();
  // Of some places.
  void Release();
  void ZeroGradients();
  // What all chunks since then have added up.
  void ExpectGradients();

 private:
  static constexpr size_t kPlaces = 6;

  SliceData NewSlice();
  void AddDirect(Problem& chunk, std::vector<RetainedPlace>& places, bool want_grad_hidden);
  // False if the chunk failed.
  bool Compute(const Problem& chunk, const std::vector<RetainedPlace>& places);
  void OnFailure(const Problem& chunk, const ChunkRun& run);
  RetainedPlace PlaceOf(size_t place, bool take) const {
    return {.offset = static_cast<int64_t>(place) * place_bytes_, .take = take};
  }

  const ProblemSpec spec_;
  Rng* const rng_;
  Problem problem_;  // without slices
  int64_t place_bytes_ = 0;
  std::unique_ptr<RetainedMemory> retained_;
  std::unique_ptr<HeadKernels> head_;
  std::optional<SliceData> kept_[kPlaces];
  reference::ParamGradients gradients_;
  double max_abs_logit_ = 0.0;
  bool expect_failures_ = false;
  int failures_ = 0;
};

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_DEFERRED_ROWS_H_
