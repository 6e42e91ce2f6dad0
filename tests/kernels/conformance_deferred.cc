// SPDX-License-Identifier: Apache-2.0
// Deferred rows: kept by one chunk, computed again by a later one from what was kept, whatever comes in
// between and whatever rows share a chunk with them.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

constexpr int64_t kHidden = 24;
constexpr int64_t kPlaces = 6;  // for slices in retained memory
constexpr int64_t kMostRows = 40;

// One head and retained memory with a few places, as an engine uses them: a slice that is released, or
// expires, makes room for another one.
class DeferredRows {
 public:
  DeferredRows(Backend& backend, ProblemSpec spec, Rng& rng)
      : spec_(std::move(spec)), rng_(&rng), problem_(MakeProblem(spec_, rng)) {
    problem_.slices.clear();
    place_bytes_ = kMostRows * kHidden * static_cast<int64_t>(SizeOf(problem_.hidden_dtype));
    auto retained = backend.AllocateRetained(kPlaces * place_bytes_);
    EXPECT_TRUE(retained.ok()) << retained.status();
    retained_ = *std::move(retained);
    head_ = MakeHead(backend, problem_);
    gradients_ = reference::ZeroGradients(problem_.config);
  }

  // Losses of one to three slices, those that there are places for, which are kept.
  void Forward() {
    Problem chunk = problem_;
    chunk.accumulate_gradients = false;
    std::vector<RetainedPlace> places;
    for (int64_t i = 0; i < kPlaces && places.size() < 3; ++i) {
      std::optional<SliceData>& kept = kept_[static_cast<size_t>(i)];
      if (kept.has_value() || Chance(*rng_, 0.3)) continue;
      kept = NewSlice();
      SliceData forward = *kept;
      forward.want_grad_hidden = false;
      chunk.slices.push_back(std::move(forward));
      places.push_back({.offset = i * place_bytes_});
    }
    // A slice that is not kept is computed beside them.
    if (Chance(*rng_, 0.5)) AddDirect(chunk, places, /*want_grad_hidden=*/false);
    Compute(chunk, places);
  }

  // Gradients of some slices that are kept, in another order than they came, and of others that come
  // directly.
  void Backward() {
    Problem chunk = problem_;
    std::vector<RetainedPlace> places;
    std::vector<int64_t> order(kPlaces);
    for (int64_t i = 0; i < kPlaces; ++i) order[static_cast<size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), *rng_);
    for (const int64_t i : order) {
      std::optional<SliceData>& kept = kept_[static_cast<size_t>(i)];
      if (!kept.has_value() || Chance(*rng_, 0.4)) continue;
      SliceData slice = *kept;
      const auto rows = static_cast<size_t>(slice.rows());
      slice.grad_loss.resize(rows);
      for (float& gradient : slice.grad_loss) gradient = Uniform(*rng_, -2.0f, 2.0f);
      slice.want_grad_hidden = Chance(*rng_, 0.8);
      chunk.slices.push_back(std::move(slice));
      places.push_back({.offset = i * place_bytes_, .take = true});
      if (Chance(*rng_, 0.3)) AddDirect(chunk, places, Chance(*rng_, 0.8));
    }
    Compute(chunk, places);
  }

  // Of places whose hidden states nobody needs any more, so that others lie there next.
  void Release() {
    for (std::optional<SliceData>& kept : kept_) {
      if (Chance(*rng_, 0.5)) kept.reset();
    }
  }

  void ZeroGradients() {
    ASSERT_TRUE(head_->ZeroGradients().ok());
    gradients_ = reference::ZeroGradients(problem_.config);
  }

  void ExpectGradients() { ExpectGradientsMatch(*head_, gradients_, max_abs_logit_); }

 private:
  SliceData NewSlice() { return MakeSlice(spec_, UniformInt(*rng_, 1, kMostRows), *rng_); }

  void AddDirect(Problem& chunk, std::vector<RetainedPlace>& places, bool want_grad_hidden) {
    SliceData slice = NewSlice();
    slice.want_grad_hidden = want_grad_hidden;
    chunk.slices.push_back(std::move(slice));
    places.push_back({});
  }

  void Compute(const Problem& chunk, const std::vector<RetainedPlace>& places) {
    if (chunk.slices.empty()) return;
    SCOPED_TRACE(Describe(chunk));
    const ChunkRun got =
        RunChunk(*head_, chunk,
                 {.grad_hidden_in_place = Chance(*rng_, 0.5), .retained = retained_.get(), .places = places});
    ASSERT_TRUE(got.done.ok()) << got.done;
    const auto want = ComputeReference(chunk, &gradients_);
    for (size_t i = 0; i < want.size(); ++i) {
      SCOPED_TRACE(i);
      ExpectSliceMatches(head_->compute_dtype(), chunk, chunk.slices[i], want[i], got.slices[i]);
    }
    max_abs_logit_ = std::max(max_abs_logit_, MaxAbsLogit(want));
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
};

}  // namespace

TEST_P(BackendConformance, DeferredAndDirectRowsInAnyOrder) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    ProblemSpec spec = Plain({1}, kHidden, 101);
    spec.config.norm = norm;
    spec.config.has_bias = true;
    DeferredRows rows(backend(), spec, rng());
    for (int repeat = 0; repeat < 12; ++repeat) {
      rows.Forward();
      if (Chance(rng(), 0.7)) rows.Backward();
      if (Chance(rng(), 0.4)) rows.Release();
      if (Chance(rng(), 0.1)) rows.ZeroGradients();
    }
    rows.Backward();
    rows.ExpectGradients();
  }
}

}  // namespace lossd::kernels::testing
