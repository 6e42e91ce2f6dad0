// SPDX-License-Identifier: Apache-2.0
// How many layers each stage of a pipeline gets, and which part of a head that lies on the stages' own GPUs. The
// arithmetic of lossd.torch.balance(), step by step: the same times give the same layers and shares, which
// tests/client/python/test_torch_balance.py proves. Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_BALANCE_H_
#define LOSSD_CLIENT_PLAN_BALANCE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace lossd::plan {

// The sum of the shares, but for rounding and for the least share.
inline constexpr int64_t kWholeShare = 1000;

struct Balanced {
  std::vector<int64_t> layers;  // of each stage, in order; at least one
  std::vector<int64_t> shares;  // of the head's classes, in thousandths (HeadSpec.shares)
};

// Layers in order, so that the slowest stage is as fast as can be; the head fills what the other stages have
// left. 1 <= stage_seconds.size() <= layer_seconds.size(), one stage an entry; all seconds finite and >= 0;
// 0 <= least_share <= kWholeShare / stage_seconds.size().
//   layer_seconds: of each layer, forward and backward of a microbatch
//   head_seconds: of the whole head on one GPU
//   stage_seconds: what each stage does beside its layers
Balanced Balance(absl::Span<const double> layer_seconds, double head_seconds,
                 absl::Span<const double> stage_seconds, int64_t least_share);

// Layers alone, in order: the slowest stage is as fast as can be, and of such divisions the most even one. A
// stage has a layer at least, but the last one `least_on_last`, 0 or 1. As many layers as stages, or one fewer
// with least_on_last 0.
std::vector<int64_t> DivideLayers(absl::Span<const double> layer_seconds,
                                  absl::Span<const double> stage_seconds, int64_t least_on_last);

// Seconds of each stage with so many layers.
std::vector<double> StageSeconds(absl::Span<const double> layer_seconds,
                                 absl::Span<const double> stage_seconds, absl::Span<const int64_t> layers);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_BALANCE_H_
