// SPDX-License-Identifier: Apache-2.0
// Which chunks try a list of elements of ds, and which path computes a chunk.
#include "kernels/cuda/paths/path_steps.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/paths/filtered_path.h"
#include "kernels/cuda/paths/head_paths.h"
#include "kernels/cuda/paths/recomputed_path.h"
#include "kernels/cuda/paths/sampled_path.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda::path_steps_test {
namespace {

constexpr Decision kExact = Decision::kTooMuchError;
constexpr int kLag = 2;  // chunks in flight

// Which of `chunks` chunks try, if decide(i) is what chunk i turns out to be, known kLag chunks later.
std::vector<bool> Replay(FilterBackoff& trials, int chunks, const std::function<Decision(int)>& decide,
                         const LossOptions& options = {}) {
  std::vector<bool> tried;
  for (int i = 0; i < chunks; ++i) {
    if (i >= kLag && tried[static_cast<size_t>(i - kLag)]) trials.Note(options, decide(i - kLag));
    tried.push_back(trials.Next(options));
  }
  return tried;
}

int64_t Trials(const std::vector<bool>& tried) { return std::count(tried.begin(), tried.end(), true); }

TEST(FilterBackoff, ChunksThatAreFilteredAllTry) {
  FilterBackoff trials;
  EXPECT_EQ(Trials(Replay(trials, 1000, [](int) { return Decision::kAsPlanned; })), 1000);
}

TEST(FilterBackoff, AfterMuchInVainOneInSixteenTries) {
  for (const Decision decision : {Decision::kTooMuchError, Decision::kTooManyCandidates}) {
    FilterBackoff trials;
    const std::vector<bool> tried = Replay(trials, 1000, [&](int) { return decision; });
    const auto first_rest = std::find(tried.begin(), tried.end(), false) - tried.begin();
    EXPECT_EQ(first_rest, kFilterPatience + kLag - 1);
    for (auto i = static_cast<size_t>(first_rest); i + kFilterPatience <= tried.size(); ++i) {
      EXPECT_EQ(std::count(tried.begin() + static_cast<int64_t>(i),
                           tried.begin() + static_cast<int64_t>(i) + kFilterPatience, true),
                1);
    }
  }
}

TEST(FilterBackoff, OneThatIsFilteredEndsTheRest) {
  FilterBackoff trials;
  constexpr int kTurn = 500;
  const std::vector<bool> tried =
      Replay(trials, 1000, [](int i) { return i < kTurn ? kExact : Decision::kAsPlanned; });
  const auto again = std::find(tried.begin() + kTurn, tried.end(), true) - tried.begin();
  EXPECT_LT(again, kTurn + kFilterPatience);
  EXPECT_EQ(Trials({tried.begin() + again + kLag, tried.end()}), 1000 - again - kLag);
}

TEST(FilterBackoff, MixedDataTries) {
  std::mt19937_64 rng(std::random_device{}());
  std::vector<bool> exact(10'000);
  for (size_t i = 0; i < exact.size(); ++i) exact[i] = std::bernoulli_distribution(0.5)(rng);
  FilterBackoff trials;
  const std::vector<bool> tried = Replay(
      trials, 10'000, [&](int i) { return exact[static_cast<size_t>(i)] ? kExact : Decision::kAsPlanned; });
  EXPECT_GT(Trials(tried), 9'800);  // sixteen in a row: every 131,072nd chunk begins that
}

TEST(FilterBackoff, OtherOptionsBeginAnew) {
  FilterBackoff trials;
  const auto always_exact = [](int) { return kExact; };
  Replay(trials, 100, always_exact);
  LossOptions other;
  other.filter_epsilon = 0.25f;
  EXPECT_EQ(Trials(Replay(trials, kFilterPatience, always_exact, other)), kFilterPatience);
  trials.Note(LossOptions(), Decision::kAsPlanned);  // late, of the options before
  Replay(trials, 2 * kLag, always_exact, other);
  EXPECT_FALSE(trials.Next(other));
}

// ---- paths ----

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
}  // namespace lossd::kernels::cuda::path_steps_test
