// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/head_paths.h"

#include "gtest/gtest.h"
#include "kernels/cuda/paths/filtered_path.h"
#include "kernels/cuda/paths/recomputed_path.h"
#include "kernels/cuda/paths/sampled_path.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda::head_paths_test {
namespace {

ChunkPlan PlanOf(Gradients gradients, bool fused) {
  ChunkPlan plan;
  plan.gradients = gradients;
  plan.why_not_fused = fused ? "" : "few rows";
  return plan;
}

// So the order in which the planner asks makes no difference.
TEST(HeadPaths, EveryPlanIsTakenByOnePath) {
  for (const Gradients gradients :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    for (const bool fused : {false, true}) {
      const ChunkPlan plan = PlanOf(gradients, fused);
      EXPECT_EQ(StoredPath::Takes(plan) + FusedStoredPath::Takes(plan) + FilteredStoredPath::Takes(plan) +
                    SampledStoredPath::Takes(plan),
                1);
      EXPECT_EQ(RecomputedPath::Takes(plan) + FilteredRecomputedPath::Takes(plan) +
                    SampledRecomputedPath::Takes(plan),
                1);
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::cuda::head_paths_test
