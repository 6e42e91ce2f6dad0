// SPDX-License-Identifier: Apache-2.0
// Times of the norm kernels, fp16, with nothing left in L2 from one launch to the next.
#ifndef LOSSD_BENCH_NORM_TIMES_H_
#define LOSSD_BENCH_NORM_TIMES_H_

#include <cstdint>

#include "bench/gpu_timer.h"

namespace lossd::bench {

inline constexpr int64_t kNormRows = 4096;

struct NormTimes {
  Times forward, backward;                         // of one launch
  double forward_gbps = 0.0, backward_gbps = 0.0;  // rows read and written
};

// `centred`: LayerNorm, else RMSNorm.
NormTimes TimeNorm(int64_t cols, bool centred, Timer& timer);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_NORM_TIMES_H_
