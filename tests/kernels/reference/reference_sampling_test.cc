// Sampled gradients of the reference: their mean over many seeds is the exact gradient, with the spread that
// is predicted. One row and a bias show dL/d(dot product) class by class.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference.h"
#include "kernels/sampling.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {
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
  // `variance` as the reference predicts it, of each element if `is_marginal`: if a row gives it one class.
  // `event`: what one class that is taken may add to an element; those with few such events are far from
  // normally distributed.
  void ExpectUnbiased(const char* what, const std::vector<double>& variance, bool is_marginal,
                      double event) const {
    double total = 0.0, predicted = 0.0;
    for (size_t i = 0; i < exact.size(); ++i) {
      const double error = std::sqrt((is_marginal ? variance[i] : square[i]) / kSeeds);
      EXPECT_NEAR(mean[i], 0.0, 6.5 * error + 6.0 * event / kSeeds + 1e-12) << what << " element " << i;
      total += square[i];
      predicted += variance[i];
    }
    EXPECT_LT(total, (is_marginal ? 1.1 : 3.0) * predicted + 1e-20) << what;
    EXPECT_TRUE(!is_marginal || total >= 0.9 * predicted) << what;
  }

  std::vector<double> exact, mean, square;
};

void ExpectUnbiased(const ProblemSpec& spec, Rng& rng) {
  const Problem problem = MakeProblem(spec, rng);
  SCOPED_TRACE(Describe(problem));
  const reference::Head head = ReferenceHead(problem);
  reference::Rows rows = ReferenceRows(problem.slices.front());
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
  hidden.ExpectUnbiased("hidden", sampled.grad_hidden.variance, false, event);
  weight.ExpectUnbiased("weight", last.weight.variance, true, event);
  bias.ExpectUnbiased("bias", last.bias.variance, true, event);
  gain.ExpectUnbiased("gain", last.norm_gain.variance, false, event);
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

// Written down once more: the points omega, omega + 1, ... over intervals min(p / tau, 1) wide.
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
      bool near = false;
      if (static_cast<int32_t>(v) != slice.targets[0]) {
        const double begin = end;
        end += std::min(1.0, p / double{tau});
        // The first point at or behind the begin of the interval.
        const double point = omega + std::ceil(begin - omega);
        near = std::fabs(point - end) < 1e-9 || std::fabs(point - begin) < 1e-9 ||
               std::fabs(point - 1.0 - begin) < 1e-9;
        if (p < double{tau}) {
          want = point <= end ? -3.0 * double{tau} : 0.0;
          variance += 9.0 * p * (double{tau} - p);
        }
      }
      EXPECT_TRUE(near || std::fabs(sampled[v] - want) < 1e-12) << v << " at " << tau;
    }
    EXPECT_NEAR(result.sampling_variance[0], variance, 1e-9);
    EXPECT_NEAR(result.squared_gradient[0], square, 1e-9);
    EXPECT_NEAR(result.sample_scale[0], 3.0, 1e-12);
  }
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
}  // namespace lossd::kernels::testing
