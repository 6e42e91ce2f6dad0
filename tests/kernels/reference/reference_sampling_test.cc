// SPDX-License-Identifier: Apache-2.0
// Sampled gradients of the reference: their mean over many seeds is the exact gradient, with the spread that
// is predicted. One row and a bias show dL/d(dot product) class by class.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference.h"
#include "kernels/sampling.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::reference_sampling_test {
namespace {

constexpr int kSeeds = 4000;

ProblemSpec Spec() {
  ProblemSpec spec;
  spec.config.hidden_size = 4;
  spec.config.vocab_size = 31;
  spec.config.has_bias = true;
  spec.slice_rows = {5};
  spec.ignored = 0.0;
  spec.logit_deviation = 2.0f;
  spec.options.gradients = Gradients::kSampled;
  spec.options.sample_threshold = 0.1f;
  return spec;
}

LossOptions Exact(LossOptions options) {
  options.gradients = Gradients::kExact;
  return options;
}

// Mean and mean squared deviation from the exact gradient over many seeds.
struct Moments {
  explicit Moments(const reference::Gradient& gradient)
      : exact(gradient.value), mean(exact.size()), square(exact.size()) {}

  void Add(const reference::Gradient& gradient) {
    for (size_t i = 0; i < exact.size(); ++i) {
      const double difference = gradient.value[i] - exact[i];
      mean[i] += difference / kSeeds;
      square[i] += difference * difference / kSeeds;
    }
  }
  // `event`: what one class that is taken may add to an element. Those with few such events are far from
  // normally distributed.
  void ExpectUnbiased(const char* what, double event) const {
    for (size_t i = 0; i < exact.size(); ++i) {
      const double error = std::sqrt(square[i] / kSeeds);
      EXPECT_NEAR(mean[i], 0.0, 6.5 * error + 6.0 * event / kSeeds + 1e-12) << what << " element " << i;
    }
  }
  // As the reference predicts it, for elements to which one class of each row adds.
  void ExpectVariance(const char* what, const std::vector<double>& variance, double event) const {
    double total = 0.0, predicted = 0.0;
    for (size_t i = 0; i < exact.size(); ++i) {
      total += square[i];
      predicted += variance[i];
      // Of n events the number is off by sqrt(n).
      const double tolerance = 0.3 * variance[i] + 8.0 * event * std::sqrt(variance[i] / kSeeds);
      EXPECT_NEAR(square[i], variance[i], tolerance + 30.0 * event * event / kSeeds + 1e-20)
          << what << " element " << i;
    }
    EXPECT_NEAR(total, predicted, 0.1 * predicted + 1e-20) << what;
  }

  std::vector<double> exact, mean, square;
};

void ExpectUnbiased(const ProblemSpec& spec, Rng& rng, bool sample_uniform = false) {
  const Problem problem = MakeProblem(spec, rng);
  SCOPED_TRACE(Describe(problem));
  const reference::Head head = ReferenceHead(problem);
  reference::Rows rows = ReferenceRows(problem.slices.front());
  rows.sample_uniform = sample_uniform;
  reference::ParamGradients exact = reference::ZeroGradients(problem.config);
  const auto result = reference::Compute(head, Exact(problem.options), rows, &exact);
  Moments hidden(result.grad_hidden), weight(exact.weight), bias(exact.bias), gain(exact.norm_gain);
  reference::ParamGradients last;
  reference::Result sampled;
  for (int i = 0; i < kSeeds; ++i) {
    rows.sample_seed = rng();
    last = reference::ZeroGradients(problem.config);
    sampled = reference::Compute(head, problem.options, rows, &last);
    hidden.Add(sampled.grad_hidden);
    weight.Add(last.weight);
    bias.Add(last.bias);
    gain.Add(last.norm_gain);
  }
  EXPECT_EQ(sampled.loss, result.loss);
  EXPECT_EQ(sampled.lse, result.lse);
  EXPECT_EQ(sampled.entropy, result.entropy);
  double event = 0.0;
  for (double kappa : sampled.sample_scale) event = std::max(event, kappa);
  event *= double{problem.options.sample_threshold} * std::fabs(double{problem.options.logit_scale}) * 4.0;
  hidden.ExpectUnbiased("hidden", event);
  weight.ExpectUnbiased("weight", event);
  bias.ExpectUnbiased("bias", event);
  gain.ExpectUnbiased("gain", event);
  weight.ExpectVariance("weight", last.weight.variance, event);
  bias.ExpectVariance("bias", last.bias.variance, event);
  // The predicted error is that of the bias's gradient, row by row.
  double variance = 0.0, of_bias = 0.0;
  for (double v : sampled.sampling_variance) variance += v;
  for (double v : last.bias.variance) of_bias += v;
  const double scale = double{problem.options.logit_scale};
  EXPECT_NEAR(of_bias, scale * scale * variance, 1e-12 + 1e-9 * of_bias);
}

TEST(ReferenceSampling, IsUnbiasedForEachOptionAlone) {
  Rng rng = FreshRng();
  for (const ProblemSpec& spec : EachOptionAlone(Spec())) ExpectUnbiased(spec, rng);
}

TEST(ReferenceSampling, IsUnbiasedForCombinations) {
  Rng rng = FreshRng();
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm, Norm::kLayerNorm}) {
    ProblemSpec spec = Spec();
    spec.config.norm = norm;
    spec.options.softcap = 4.0f;
    spec.options.label_smoothing = 0.2f;
    spec.options.logit_scale = -1.5f;
    spec.grad_lse = spec.grad_entropy = spec.row_weights = true;
    ExpectUnbiased(spec, rng);
  }
}

// One row's gradient of the bias.
std::vector<double> ClassGradients(const Problem& problem, float threshold, Gradients gradients,
                                   reference::Result* result = nullptr) {
  LossOptions options = problem.options;
  options.sample_threshold = threshold;
  options.gradients = gradients;
  reference::ParamGradients sums = reference::ZeroGradients(problem.config);
  const auto computed =
      reference::Compute(ReferenceHead(problem), options, ReferenceRows(problem.slices.front()), &sums);
  if (result != nullptr) *result = computed;
  return sums.bias.value;
}

// Classes of a row depend on each other. Where that makes what they add up to less certain in one problem, it
// makes it more certain in another: over many problems the gradient of the hidden states has about the
// variance of independent draws.
TEST(ReferenceSampling, HiddenGradientsHaveAboutThePredictedVariance) {
  Rng rng = FreshRng();
  double total = 0.0, predicted = 0.0;
  for (int problem_number = 0; problem_number < 40; ++problem_number) {
    ProblemSpec spec = Spec();
    spec.config.vocab_size = 200;
    const Problem problem = MakeProblem(spec, rng);
    const reference::Head head = ReferenceHead(problem);
    reference::Rows rows = ReferenceRows(problem.slices.front());
    const auto exact = reference::Compute(head, Exact(problem.options), rows, nullptr);
    for (int i = 0; i < 50; ++i) {
      rows.sample_seed = rng();
      const auto sampled = reference::Compute(head, problem.options, rows, nullptr);
      for (size_t k = 0; k < exact.grad_hidden.value.size(); ++k) {
        total += std::pow(sampled.grad_hidden.value[k] - exact.grad_hidden.value[k], 2);
        predicted += sampled.grad_hidden.variance[k];
      }
    }
  }
  EXPECT_LT(total, 1.3 * predicted);
  EXPECT_GT(total, 0.5 * predicted);
  std::cout << "variance over the predicted one: " << total / predicted << std::endl;
}

// In other words: a class is taken if a point lies between its ends.
TEST(ReferenceSampling, FollowsTheRuleClassByClass) {
  Rng rng = FreshRng();
  ProblemSpec spec = Spec();
  spec.config.vocab_size = 997;
  spec.slice_rows = {1};
  spec.grad_scale = -3.0f;
  const Problem problem = MakeProblem(spec, rng);
  const SliceData& slice = problem.slices.front();
  const double omega = double{SampleOf(slice.sample_seed, static_cast<uint64_t>(slice.first_row))};
  const std::vector<double> exact = ClassGradients(problem, 1.0f, Gradients::kExact);
  for (float tau = 0x1p-16f; tau <= 1.0f; tau *= 2.0f) {
    reference::Result result;
    const std::vector<double> sampled = ClassGradients(problem, tau, Gradients::kSampled, &result);
    EXPECT_EQ(ClassGradients(problem, tau, Gradients::kAuto), sampled);
    double variance = 0.0, square = 0.0, end = 0.0;
    for (size_t v = 0; v < exact.size(); ++v) {
      const double p = exact[v] / -3.0;
      square += exact[v] * exact[v];
      double want = exact[v];
      if (static_cast<int32_t>(v) != slice.targets[0]) {
        const double begin = end;
        end += std::min(1.0, p / double{tau});
        const bool taken = std::floor(end - omega) > std::floor(begin - omega);
        if (p < double{tau}) {
          want = taken ? -3.0 * double{tau} : 0.0;
          variance += 9.0 * p * (double{tau} - p);
        }
      }
      EXPECT_NEAR(sampled[v], want, 1e-12) << v << " at " << tau;
    }
    EXPECT_NEAR(result.sampling_variance[0], variance, 1e-9);
    EXPECT_NEAR(result.squared_gradient[0], square, 1e-9);
    EXPECT_NEAR(result.sample_scale[0], 3.0, 1e-12);
  }
}

// With the uniform part of label smoothing among what is sampled, too.
TEST(ReferenceSampling, IsUnbiasedWithTheUniformPart) {
  Rng rng = FreshRng();
  ProblemSpec spec = Spec();
  spec.options.label_smoothing = 0.3f;
  ExpectUnbiased(spec, rng, /*sample_uniform=*/true);
}

TEST(ReferenceSampling, NumbersAreThoseOfTheRowsPlaceInItsMicrobatch) {
  Rng rng = FreshRng();
  const Problem problem = MakeProblem(Spec(), rng);
  const reference::Head head = ReferenceHead(problem);
  const reference::Rows all = ReferenceRows(problem.slices.front());
  const auto whole = reference::Compute(head, problem.options, all, nullptr);
  reference::Rows last = all;
  const size_t d = 4;
  last.hidden.erase(last.hidden.begin(), last.hidden.end() - static_cast<std::ptrdiff_t>(d));
  last.targets.erase(last.targets.begin(), last.targets.end() - 1);
  last.first_row += 4;
  const auto one = reference::Compute(head, problem.options, last, nullptr);
  for (size_t i = 0; i < d; ++i) EXPECT_EQ(one.grad_hidden.value[i], whole.grad_hidden.value[4 * d + i]);
}

}  // namespace
}  // namespace lossd::kernels::testing::reference_sampling_test
