// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/deferred_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {

DeferredRows::DeferredRows(Backend& backend, const ProblemSpec& spec, Rng& rng)
    : spec_(spec), rng_(&rng), problem_(MakeProblem(spec, rng)) {
  problem_.slices.clear();
  place_bytes_ = kMostRows * spec.config.hidden_size * static_cast<int64_t>(SizeOf(problem_.hidden_dtype));
  auto retained = backend.AllocateRetained(static_cast<int64_t>(kPlaces) * place_bytes_);
  EXPECT_TRUE(retained.ok()) << retained.status();
  retained_ = *std::move(retained);
  head_ = MakeHead(backend, problem_);
  gradients_ = reference::ZeroGradients(problem_.config);
}

SliceData DeferredRows::NewSlice() { return MakeSlice(spec_, UniformInt(*rng_, 1, kMostRows), *rng_); }

void DeferredRows::AddDirect(Problem& chunk, std::vector<RetainedPlace>& places, bool want_grad_hidden) {
  SliceData slice = NewSlice();
  slice.want_grad_hidden = want_grad_hidden;
  chunk.slices.push_back(std::move(slice));
  places.push_back({});
}

void DeferredRows::Forward() {
  Problem chunk = problem_;
  chunk.accumulate_gradients = false;
  std::vector<RetainedPlace> places;
  std::vector<size_t> taken;
  for (size_t i = 0; i < kPlaces && taken.size() < 3; ++i) {
    if (kept_[i].has_value() || Chance(*rng_, 0.3)) continue;
    SliceData slice = NewSlice();
    kept_[i] = slice;
    taken.push_back(i);
    slice.want_grad_hidden = false;
    chunk.slices.push_back(std::move(slice));
    places.push_back(PlaceOf(i, /*take=*/false));
  }
  if (Chance(*rng_, 0.5)) AddDirect(chunk, places, /*want_grad_hidden=*/false);
  if (Compute(chunk, places)) return;
  for (const size_t i : taken) kept_[i].reset();
}

void DeferredRows::Backward() {
  Problem chunk = problem_;
  std::vector<RetainedPlace> places;
  std::vector<size_t> order(kPlaces);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), *rng_);
  for (const size_t i : order) {
    if (!kept_[i].has_value() || Chance(*rng_, 0.4)) continue;
    SliceData slice = *kept_[i];
    slice.grad_loss.resize(static_cast<size_t>(slice.rows()));
    for (float& gradient : slice.grad_loss) gradient = Uniform(*rng_, -2.0f, 2.0f);
    slice.want_grad_hidden = Chance(*rng_, 0.8);
    chunk.slices.push_back(std::move(slice));
    places.push_back(PlaceOf(i, /*take=*/true));
    if (Chance(*rng_, 0.3)) AddDirect(chunk, places, Chance(*rng_, 0.8));
  }
  Compute(chunk, places);
}

void DeferredRows::Release() {
  for (std::optional<SliceData>& kept : kept_) {
    if (Chance(*rng_, 0.5)) kept.reset();
  }
}

void DeferredRows::ZeroGradients() {
  const absl::Status status = head_->ZeroGradients();
  EXPECT_TRUE(status.ok()) << status;
  gradients_ = reference::ZeroGradients(problem_.config);
}

void DeferredRows::ExpectGradients() { ExpectGradientsMatch(*head_, gradients_, max_abs_logit_); }

bool DeferredRows::Compute(const Problem& chunk, const std::vector<RetainedPlace>& places) {
  if (chunk.slices.empty()) return true;
  SCOPED_TRACE(Describe(chunk));
  const ChunkRun got =
      RunChunk(*head_, chunk,
               {.grad_hidden_in_place = Chance(*rng_, 0.5), .retained = retained_.get(), .places = places});
  if (!got.done.ok()) {
    OnFailure(chunk, got);
    return false;
  }
  const auto want = ComputeReference(chunk, &gradients_);
  for (size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSliceMatches(head_->compute_dtype(), chunk, chunk.slices[i], want[i], got.slices[i]);
  }
  max_abs_logit_ = std::max(max_abs_logit_, MaxAbsLogit(want));
  return true;
}

void DeferredRows::OnFailure(const Problem& chunk, const ChunkRun& run) {
  EXPECT_TRUE(expect_failures_) << run.done;
  EXPECT_FALSE(run.results.ok());
  ++failures_;
  if (!absl::IsDataLoss(run.done)) return;
  EXPECT_TRUE(chunk.accumulate_gradients) << run.done;
  ZeroGradients();
}

}  // namespace lossd::kernels::testing
