// SPDX-License-Identifier: Apache-2.0
// The reference proves itself: its gradients are those of its losses by central differences, and its losses
// agree with values worked out by hand.
#include "kernels/reference/reference.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::reference_test {
namespace {

// The scalar whose gradient Compute returns: each row's loss, lse and entropy times what is upstream of it.
double Objective(const reference::Head& head, const LossOptions& options, const reference::Rows& rows) {
  const reference::Result result = reference::Compute(head, options, rows, nullptr);
  double total = 0.0;
  for (size_t n = 0; n < rows.targets.size(); ++n) {
    total += rows.grad_scale * (rows.grad_loss.empty() ? 1.0 : rows.grad_loss[n]) * result.loss[n];
    if (!rows.grad_lse.empty()) total += rows.grad_lse[n] * result.lse[n];
    if (!rows.grad_entropy.empty()) total += rows.grad_entropy[n] * result.entropy[n];
  }
  return total;
}

// Compares `gradient` with central differences of fourth order of the objective in every element of `values`,
// which must be part of `head` or `rows`.
void ExpectFiniteDifferences(const char* what, std::vector<double>& values,
                             const reference::Gradient& gradient, const reference::Head& head,
                             const LossOptions& options, const reference::Rows& rows) {
  constexpr double kStep = 1e-5;
  ASSERT_EQ(values.size(), gradient.value.size()) << what;
  for (size_t i = 0; i < values.size(); ++i) {
    const double kept = values[i];
    const auto difference = [&](double step) {
      values[i] = kept + step;
      const double above = Objective(head, options, rows);
      values[i] = kept - step;
      const double below = Objective(head, options, rows);
      values[i] = kept;
      return above - below;
    };
    const double slope = (8.0 * difference(kStep) - difference(2 * kStep)) / (12 * kStep);
    EXPECT_NEAR(slope, gradient.value[i], 1e-7 * (1.0 + gradient.magnitude[i])) << what << " element " << i;
  }
}

void CheckGradients(const ProblemSpec& spec, Rng& rng) {
  const Problem problem = MakeProblem(spec, rng);
  SCOPED_TRACE(Describe(problem));
  reference::Head head = ReferenceHead(problem);
  reference::Rows rows = ReferenceRows(problem.slices.front());
  reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
  const reference::Result result = reference::Compute(head, problem.options, rows, &gradients);
  ExpectFiniteDifferences("hidden", rows.hidden, result.grad_hidden, head, problem.options, rows);
  ExpectFiniteDifferences("weight", head.weight, gradients.weight, head, problem.options, rows);
  ExpectFiniteDifferences("bias", head.bias, gradients.bias, head, problem.options, rows);
  ExpectFiniteDifferences("gain", head.norm_gain, gradients.norm_gain, head, problem.options, rows);
  ExpectFiniteDifferences("shift", head.norm_shift, gradients.norm_shift, head, problem.options, rows);
}

TEST(ReferenceTest, GradientsAreDerivativesForEachOptionAlone) {
  Rng rng = FreshRng();
  ProblemSpec plain;
  plain.config.hidden_size = 5;
  plain.config.vocab_size = 7;
  plain.slice_rows = {4};
  for (const ProblemSpec& spec : EachOptionAlone(plain)) CheckGradients(spec, rng);
}

TEST(ReferenceTest, GradientsAreDerivativesForRandomCombinations) {
  Rng rng = FreshRng();
  for (int i = 0; i < 40; ++i) {
    const int64_t hidden_size = UniformInt(rng, 1, 6);
    const int64_t vocab_size = UniformInt(rng, 1, 9);
    ProblemSpec spec = RandomSpec(4, hidden_size, vocab_size, DType::kFloat32, DType::kFloat32, rng);
    spec.slice_rows = {4};
    spec.accumulate_mask = false;
    spec.options.gradients = Gradients::kExact;  // what is filtered is no derivative
    CheckGradients(spec, rng);
  }
}

// Two classes with logits 0 and log 3: p = 1/4, 3/4.
TEST(ReferenceTest, KnownValues) {
  reference::Head head;
  head.config.hidden_size = 1;
  head.config.vocab_size = 2;
  head.weight = {0.0, std::log(3.0)};
  reference::Rows rows;
  rows.hidden = {1.0, 1.0, 1.0};
  rows.targets = {0, 1, kIgnoredTarget};
  LossOptions options;
  options.z_loss = 0.5f;
  const reference::Result result = reference::Compute(head, options, rows, nullptr);
  const double lse = std::log(4.0);
  EXPECT_NEAR(result.lse[0], lse, 1e-15);
  EXPECT_NEAR(result.loss[0], std::log(4.0) + 0.5 * lse * lse, 1e-14);
  EXPECT_NEAR(result.loss[1], std::log(4.0 / 3.0) + 0.5 * lse * lse, 1e-14);
  EXPECT_NEAR(result.z_loss_sum, lse * lse, 1e-14);
  EXPECT_NEAR(result.entropy[0], 0.25 * std::log(4.0) + 0.75 * std::log(4.0 / 3.0), 1e-15);
  EXPECT_EQ(result.argmax, (std::vector<int32_t>{1, 1, -1}));
  EXPECT_EQ(result.valid_rows, 2);
  EXPECT_EQ(result.correct_rows, 1);
  EXPECT_EQ(result.loss[2], 0.0);
  EXPECT_EQ(result.grad_hidden.value[2], 0.0);
}

TEST(ReferenceTest, SmoothingAndClassWeightsAsTorchDefinesThem) {
  reference::Head head;
  head.config.hidden_size = 1;
  head.config.vocab_size = 2;
  head.config.has_class_weights = true;
  head.weight = {0.0, std::log(3.0)};
  head.class_weights = {2.0, 0.5};
  reference::Rows rows;
  rows.hidden = {1.0};
  rows.targets = {1};
  LossOptions options;
  options.label_smoothing = 0.25f;
  options.use_class_weights = true;
  const double nll[] = {std::log(4.0), std::log(4.0 / 3.0)};
  const double want = 0.75 * 0.5 * nll[1] + 0.125 * (2.0 * nll[0] + 0.5 * nll[1]);
  EXPECT_NEAR(reference::Compute(head, options, rows, nullptr).loss[0], want, 1e-14);
}

TEST(ReferenceTest, MaskedRowsStayOutOfTheParameterGradients) {
  Rng rng = FreshRng();
  ProblemSpec spec;
  spec.config.hidden_size = 3;
  spec.config.vocab_size = 5;
  spec.slice_rows = {6};
  spec.ignored = 0.0;
  const Problem problem = MakeProblem(spec, rng);
  const reference::Head head = ReferenceHead(problem);
  reference::Rows rows = ReferenceRows(problem.slices.front());
  rows.accumulate = {1, 0, 0, 1, 0, 0};
  reference::ParamGradients masked = reference::ZeroGradients(spec.config);
  const reference::Result all = reference::Compute(head, spec.options, rows, &masked);
  rows.targets = {rows.targets[0], -1, -1, rows.targets[3], -1, -1};
  reference::ParamGradients few = reference::ZeroGradients(spec.config);
  reference::Compute(head, spec.options, rows, &few);
  EXPECT_EQ(masked.weight.value, few.weight.value);
  EXPECT_EQ(all.valid_rows, 6);
}

}  // namespace
}  // namespace lossd::kernels::testing::reference_test
