// SPDX-License-Identifier: Apache-2.0
// What deterministic servers rest on: results depend on the rows of a chunk and their order alone, to the
// bit; on how they are cut into slices they do not in independent chunks, which is what such servers send.
#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"

namespace lossd::kernels::testing {
namespace {

constexpr int64_t kShapes[][3] = {{75, 33, 129}, {200, 64, 257}, {7, 24, 40}};  // rows, D, V

// Rows [begin, end) of a slice.
SliceData RowsOf(const SliceData& slice, int64_t hidden_size, int64_t begin, int64_t end) {
  SliceData part;
  part.grad_scale = slice.grad_scale;
  part.want_grad_hidden = slice.want_grad_hidden;
  const auto copy = [begin, end](const auto& from, auto& to, int64_t width) {
    if (!from.empty()) to.assign(from.begin() + begin * width, from.begin() + end * width);
  };
  part.sample_seed = slice.sample_seed;
  part.first_row = slice.first_row + begin;
  copy(slice.hidden, part.hidden, hidden_size);
  copy(slice.targets, part.targets, 1);
  copy(slice.row_weights, part.row_weights, 1);
  copy(slice.accumulate, part.accumulate, 1);
  copy(slice.grad_loss, part.grad_loss, 1);
  copy(slice.grad_lse, part.grad_lse, 1);
  copy(slice.grad_entropy, part.grad_entropy, 1);
  return part;
}

// `got`, [rows, width], has the bits of `want` from row `row` on.
template <typename T>
void ExpectSameBits(const std::vector<T>& got, const std::vector<T>& want, int64_t row, int64_t rows,
                    int64_t width) {
  ASSERT_EQ(got.size(), static_cast<size_t>(rows * width));
  EXPECT_EQ(std::memcmp(got.data(), want.data() + row * width, got.size() * sizeof(T)), 0);
}

}  // namespace

TEST_P(BackendConformance, SameChunkSameBits) {
  const Problem problem = MakeProblem(Random(70, 45, 210), rng());
  std::vector<ChunkRun> runs;
  std::vector<std::vector<std::vector<float>>> gradients;
  for (int i = 0; i < 2; ++i) {
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    runs.push_back(RunChunk(*head, problem));
    gradients.push_back(AllGradients(*head));
  }
  EXPECT_EQ(gradients[0], gradients[1]);
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    EXPECT_EQ(runs[0].slices[i].loss, runs[1].slices[i].loss);
    EXPECT_EQ(runs[0].slices[i].grad_hidden, runs[1].slices[i].grad_hidden);
  }
}

TEST_P(BackendConformance, TheCutIntoSlicesLeavesNoTrace) {
  for (const auto& [rows, hidden, vocab] : kShapes) {
    ProblemSpec spec = Random(rows, hidden, vocab);
    spec.accumulate_mask = false;
    spec.slice_rows = {rows};
    const Problem whole = MakeProblem(spec, rng());
    const SliceData& all = whole.slices.front();
    const auto head = MakeHead(backend(), whole);
    ASSERT_NE(head, nullptr);
    const ChunkRun want = RunChunk(*head, whole, {.independent = true});
    ASSERT_TRUE(want.done.ok()) << want.done;
    const auto gradients = AllGradients(*head);
    for (int repeat = 0; repeat < 3; ++repeat) {
      ASSERT_TRUE(head->ZeroGradients().ok());
      Problem cut = whole;
      cut.slices.clear();
      std::vector<int64_t> begins;
      for (int64_t row = 0; row < all.rows();) {
        const int64_t end = UniformInt(rng(), row + 1, all.rows());
        const bool empty = std::all_of(all.targets.begin() + row, all.targets.begin() + end,
                                       [](int32_t t) { return t == kIgnoredTarget; });
        if (!empty) {  // rows without target may be missing
          cut.slices.push_back(RowsOf(all, hidden, row, end));
          begins.push_back(row);
        }
        row = end;
      }
      const ChunkRun got =
          RunChunk(*head, cut, {.grad_hidden_in_place = Chance(rng(), 0.5), .independent = true});
      ASSERT_TRUE(got.done.ok()) << got.done;
      EXPECT_EQ(AllGradients(*head), gradients);
      for (size_t i = 0; i < begins.size(); ++i) {
        const int64_t n = cut.slices[i].rows();
        ExpectSameBits(got.slices[i].loss, want.slices[0].loss, begins[i], n, 1);
        ExpectSameBits(got.slices[i].lse, want.slices[0].lse, begins[i], n, 1);
        ExpectSameBits(got.slices[i].argmax, want.slices[0].argmax, begins[i], n, 1);
        ExpectSameBits(got.slices[i].grad_hidden, want.slices[0].grad_hidden, begins[i], n, hidden);
      }
    }
  }
}

// What `auto` decides depends on all rows of a chunk, so here it has only one thing to decide.
TEST_P(BackendConformance, ARowsResultsDependOnItsPlaceButNotOnTheOtherRows) {
  for (const auto& [rows, hidden, vocab] : kShapes) {
    ProblemSpec spec = Random(rows, hidden, vocab);
    spec.options.max_gradient_error = 1e6f;
    spec.accumulate_mask = false;
    spec.slice_rows = {rows};
    const Problem whole = MakeProblem(spec, rng());
    const auto head = MakeHead(backend(), whole);
    ASSERT_NE(head, nullptr);
    const ChunkRun want = RunChunk(*head, whole);
    ASSERT_TRUE(want.done.ok()) << want.done;
    const auto gradients = AllGradients(*head);
    Problem repeat = whole;
    SliceData& slice = repeat.slices.front();
    slice.accumulate.assign(static_cast<size_t>(rows), 0);
    const int64_t begin = UniformInt(rng(), 0, rows - 1);
    const int64_t end = UniformInt(rng(), begin + 1, rows);
    std::fill(slice.hidden.begin(), slice.hidden.begin() + begin * hidden, 0.0f);
    std::fill(slice.hidden.begin() + end * hidden, slice.hidden.end(), 0.0f);
    const ChunkRun got = RunChunk(*head, repeat);
    ASSERT_TRUE(got.done.ok()) << got.done;
    EXPECT_EQ(AllGradients(*head), gradients);  // nothing was added
    for (int64_t row = begin; row < end; ++row) {
      const auto i = static_cast<size_t>(row);
      EXPECT_EQ(got.slices[0].loss[i], want.slices[0].loss[i]) << row;
      EXPECT_EQ(got.slices[0].lse[i], want.slices[0].lse[i]) << row;
    }
    // Rows that became flat may take so much room that all of the chunk is sampled with another threshold.
    if (got.sample_threshold != want.sample_threshold) continue;
    const size_t bytes = static_cast<size_t>((end - begin) * hidden) * sizeof(float);
    EXPECT_EQ(std::memcmp(got.slices[0].grad_hidden.data() + begin * hidden,
                          want.slices[0].grad_hidden.data() + begin * hidden, bytes),
              0);
  }
}

// A forward pass that keeps its hidden states, other work in between, and a backward pass from what was kept
// give the bits of a direct computation.
TEST_P(BackendConformance, RetainedRowsGiveTheSameBits) {
  const Problem problem = MakeProblem(Random(70, 45, 210), rng());
  const auto direct = MakeHead(backend(), problem);
  const auto deferred = MakeHead(backend(), problem);
  ASSERT_TRUE(direct != nullptr && deferred != nullptr);
  const ChunkRun want = RunChunk(*direct, problem, {.independent = true});
  auto retained = backend().AllocateRetained(RetainedBytes(problem));
  ASSERT_TRUE(retained.ok()) << retained.status();

  Problem forward = problem;
  forward.accumulate_gradients = false;
  for (SliceData& slice : forward.slices) slice.want_grad_hidden = false;
  ASSERT_TRUE(RunChunk(*deferred, forward, {.retained = retained->get()}).done.ok());
  Problem other = MakeProblem(Random(33, 45, 210), rng());
  other.config = problem.config;
  other.options = problem.options;
  other.accumulate_gradients = false;
  ASSERT_TRUE(RunChunk(*deferred, other).done.ok());

  const ChunkRun got =
      RunChunk(*deferred, problem, {.retained = retained->get(), .take_retained = true, .independent = true});
  ASSERT_TRUE(got.done.ok()) << got.done;
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    EXPECT_EQ(want.slices[i].loss, got.slices[i].loss);
    EXPECT_EQ(want.slices[i].grad_hidden, got.slices[i].grad_hidden);
  }
  EXPECT_EQ(AllGradients(*direct), AllGradients(*deferred));
}

}  // namespace lossd::kernels::testing
