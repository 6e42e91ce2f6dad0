// SPDX-License-Identifier: Apache-2.0
// Which chunks that may be filtered or sampled try it. Once kFilterPatience of them in a row have turned out
// exact, for their candidates or for the predicted error, trying pauses: only one chunk in kFilterPatience
// tries. The others are exact from the start, which spares them the selection and, where filtered ones store
// their logits, lets their loss be fused.
// The arithmetic is in docs/lab/2026-11-21-filter-trials.md.
//
// What it says depends on nothing but the order of the calls. Thread-compatible.
#ifndef LOSSD_KERNELS_CUDA_PATHS_FILTER_BACKOFF_H_
#define LOSSD_KERNELS_CUDA_PATHS_FILTER_BACKOFF_H_

#include "kernels/decision.h"
#include "kernels/loss_options.h"

namespace lossd::kernels::cuda {

inline constexpr int kFilterPatience = 16;

class FilterBackoff {
 public:
  // Whether the next chunk, with these options, is to try. Other options than the last chunk's begin anew.
  bool Next(const LossOptions& options);
  // What became of a chunk that tried with these options, some chunks ago.
  void Note(const LossOptions& options, Decision decision);

 private:
  bool Paused() const { return exact_in_a_row_ >= kFilterPatience; }

  LossOptions options_;
  int exact_in_a_row_ = 0;
  int without_trial_ = 0;  // chunks since the last one that tried
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_FILTER_BACKOFF_H_
