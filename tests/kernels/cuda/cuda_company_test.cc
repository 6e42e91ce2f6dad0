// SPDX-License-Identifier: Apache-2.0
// The results of a row alone, among 8, 300 and 4096 rows, which take different products and kernels, against
// double precision: within the bound of docs/kernels/cuda-exact.md. The bits may differ, because the library
// chooses its kernels by the size of the product.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::cuda_company_test {
namespace {

constexpr int64_t kRows = 4096;
constexpr int64_t kSizes[] = {1, 8, 300, kRows};
constexpr int kChecked = 6;  // rows, compared with double precision

struct CompanyCase {
  DType compute;
  Logits logits;
  LossOptions options;
  int64_t hidden = 512;
  int64_t vocab = 20'001;
};

void PrintTo(const CompanyCase& c, std::ostream* out) {
  *out << Name(c.compute) << " logits " << Name(c.logits) << " gradients " << Name(c.options.gradients)
       << " smoothing " << c.options.label_smoothing << " softcap " << c.options.softcap << " D " << c.hidden;
}

struct RowTruth {
  double lse, logprob, entropy, largest;
};

// Without label smoothing; z after the softcap.
RowTruth Truth(const Problem& problem, int64_t row) {
  const int64_t d = problem.config.hidden_size, vocab = problem.config.vocab_size;
  const SliceData& slice = problem.slices.front();
  const float* const x = &slice.hidden[static_cast<size_t>(row * d)];
  std::vector<double> z(static_cast<size_t>(vocab));
  for (int64_t v = 0; v < vocab; ++v) {
    const float* const w = &problem.weight[static_cast<size_t>(v * d)];
    double sum = 0.0;
    for (int64_t i = 0; i < d; ++i) sum += double{x[i]} * double{w[i]};
    const double cap = double{problem.options.softcap};
    z[static_cast<size_t>(v)] = cap > 0.0 ? cap * std::tanh(sum / cap) : sum;
  }
  const double top = *std::max_element(z.begin(), z.end());
  double sum = 0.0, moment = 0.0, largest = 0.0;
  for (const double logit : z) {
    sum += std::exp(logit - top);
    moment += std::exp(logit - top) * (logit - top);
    largest = std::max(largest, std::fabs(logit));
  }
  const double lse = top + std::log(sum);
  const auto target = static_cast<size_t>(slice.targets[static_cast<size_t>(row)]);
  return {lse, z[target] - lse, std::log(sum) - moment / sum, largest};
}

class CudaCompany : public ::testing::TestWithParam<CompanyCase> {
 protected:
  void SetUp() override { LOSSD_SKIP_WITHOUT_GPU(); }
};

TEST_P(CudaCompany, ARowsResultsAreWithinTheBoundInEveryChunk) {
  Rng rng = FreshRng();
  const CompanyCase& c = GetParam();
  ProblemSpec spec;
  spec.config = {.hidden_size = c.hidden,
                 .vocab_size = c.vocab,
                 .compute_dtype = c.compute,
                 .optimizer_state = OptimizerState::kNone,
                 .logits = c.logits};
  spec.options = c.options;
  spec.hidden_dtype = c.compute;
  spec.slice_rows = {kRows};
  spec.ignored = 0.0;
  spec.logit_deviation = 20.0f;
  const Problem whole = MakeProblem(spec, rng);
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{1} << 30});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto head = MakeHead(**backend, whole);
  ASSERT_NE(head, nullptr);
  ASSERT_GE(head->chunk_rows(), kRows);

  const int64_t first = UniformInt(rng, 0, kRows - 300);
  std::vector<RowTruth> truths;
  for (int64_t row = first; row < first + kChecked; ++row) truths.push_back(Truth(whole, row));
  double errors[3] = {}, largest = 0.0;
  int same = 0, compared = 0;
  std::vector<float> lse_alone;
  for (const int64_t size : kSizes) {
    Problem part = whole;
    SliceData& slice = part.slices.front();
    const int64_t begin = size == kRows ? 0 : first;
    const auto from = static_cast<int64_t>(begin * c.hidden), to = from + size * c.hidden;
    slice.hidden.assign(whole.slices.front().hidden.begin() + from, whole.slices.front().hidden.begin() + to);
    slice.targets.assign(whole.slices.front().targets.begin() + begin,
                         whole.slices.front().targets.begin() + begin + size);
    const ChunkRun run = RunChunk(*head, part);
    ASSERT_TRUE(run.done.ok()) << run.done;
    const SliceOutputs& got = run.slices.front();
    for (int64_t i = 0; i < std::min<int64_t>(size, kChecked); ++i) {
      const auto at = static_cast<size_t>(first - begin + i), truth = static_cast<size_t>(i);
      const RowTruth& want = truths[truth];
      const double allowed = RowTolerance(c.hidden, want.largest);
      EXPECT_NEAR(got.lse[at], want.lse, allowed) << "among " << size << ", largest " << want.largest;
      EXPECT_NEAR(got.target_logprob[at], want.logprob, allowed) << "among " << size;
      EXPECT_NEAR(got.entropy[at], want.entropy, allowed) << "among " << size;
      errors[0] = std::max(errors[0], std::fabs(double{got.lse[at]} - want.lse));
      errors[1] = std::max(errors[1], std::fabs(double{got.target_logprob[at]} - want.logprob));
      errors[2] = std::max(errors[2], std::fabs(double{got.entropy[at]} - want.entropy));
      largest = std::max(largest, want.largest);
      if (size == 8) lse_alone.push_back(got.lse[at]);
      if (size > 8) {
        ++compared;
        same += got.lse[at] == lse_alone[truth] ? 1 : 0;
      }
    }
  }
  std::cout << "largest logit " << largest << "; off by at most: lse " << errors[0] << ", logprob "
            << errors[1] << ", entropy " << errors[2] << "; lse with the bits of 8 rows: " << same << " of "
            << compared << std::endl;
}

std::vector<CompanyCase> Cases() {
  std::vector<CompanyCase> cases;
  for (const DType compute : {DType::kBFloat16, DType::kFloat16}) {
    for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
      cases.push_back({compute, logits, {}});
      cases.push_back({compute, logits, {.label_smoothing = 0.1f}});
      cases.push_back({compute, logits, {.softcap = 300.0f}});
      cases.push_back({compute, logits, {.gradients = Gradients::kFiltered}});
      cases.push_back({compute, logits, {.gradients = Gradients::kSampled}});
    }
  }
  for (const int64_t hidden : {1024, 2048, 4096, 8192}) {
    cases.push_back({DType::kBFloat16, Logits::kStored, {}, hidden, 4001});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Ways, CudaCompany, ::testing::ValuesIn(Cases()));

}  // namespace
}  // namespace lossd::kernels::testing::cuda_company_test
