// SPDX-License-Identifier: Apache-2.0
// Tests of reference.h, which the tests of all backends rest on: exact gradients, sampled gradients, and one
// sampled row.
#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/decision.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/problem.h"

// ---- Exact gradients ----
// The reference proves itself: its gradients are those of its losses by central differences, and its losses
// agree with values worked out by hand.

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

void CheckGradients(const Problem& problem) {
  SCOPED_TRACE(Describe(problem));
  reference::Head head = ReferenceHead(problem);
  reference::Rows rows = ReferenceRows(problem.slices.front());
  reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
  const reference::Result result = reference::Compute(head, problem.options, rows, &gradients);
  rows.stopped_logprobs = result.target_logprob;  // what has no gradient stays while elements are moved
  ExpectFiniteDifferences("hidden", rows.hidden, result.grad_hidden, head, problem.options, rows);
  ExpectFiniteDifferences("weight", head.weight, gradients.weight, head, problem.options, rows);
  ExpectFiniteDifferences("bias", head.bias, gradients.bias, head, problem.options, rows);
  ExpectFiniteDifferences("gain", head.norm_gain, gradients.norm_gain, head, problem.options, rows);
  ExpectFiniteDifferences("shift", head.norm_shift, gradients.norm_shift, head, problem.options, rows);
}

void CheckGradients(const ProblemSpec& spec, Rng& rng) { CheckGradients(MakeProblem(spec, rng)); }

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

// A random objective with random numbers, none of them at the edge of a clip.
TEST(ReferenceTest, GradientsOfObjectivesAreDerivatives) {
  Rng rng = FreshRng();
  for (int i = 0; i < 60; ++i) {
    ProblemSpec spec =
        RandomSpec(4, UniformInt(rng, 1, 6), UniformInt(rng, 2, 9), DType::kFloat32, DType::kFloat32, rng);
    spec.slice_rows = {4};
    spec.accumulate_mask = false;
    spec.options.gradients = Gradients::kExact;
    kernels::Objective objective{.kind =
                                     static_cast<ObjectiveKind>(1 + i % static_cast<int>(kLastObjective))};
    const ClipRange clip = DefaultClip(objective.kind);
    objective.clip_low = clip.low;
    objective.clip_high = clip.high;
    if (objective.kind == ObjectiveKind::kPpo && Chance(rng, 0.5)) objective.dual_clip = 2.0f;
    if (Chance(rng, 0.5)) objective.kl_coef = 0.3f;
    objective.kl = static_cast<KlEstimator>(UniformInt(rng, 0, 2));
    if (Chance(rng, 0.5)) objective.entropy_bonus = 0.2f;
    CheckGradients(WithObjective(MakeProblem(spec, rng), objective, rng));
  }
}

// By hand: p = 1/4 and 3/4, and so log p.
TEST(ReferenceTest, KnownValuesOfObjectives) {
  const double l = std::log(0.25);
  const auto loss = [&](const kernels::Objective& objective, double advantage, double ratio) {
    return reference::ComputeObjective(objective, l, l, advantage, l - std::log(ratio), l + std::log(3.0))
        .loss;
  };
  const kernels::Objective ppo{
      .kind = ObjectiveKind::kPpo, .clip_low = 0.2f, .clip_high = 0.4f, .dual_clip = 3.0f};
  EXPECT_NEAR(loss(ppo, 2.0, 1.1), -2.2, 1e-12);
  EXPECT_NEAR(loss(ppo, 2.0, 2.0), -2.8, 1e-6);
  EXPECT_NEAR(loss(ppo, 2.0, 0.5), -1.0, 1e-12);
  EXPECT_NEAR(loss(ppo, -2.0, 0.5), 1.6, 1e-6);
  EXPECT_NEAR(loss(ppo, -2.0, 2.0), 4.0, 1e-12);
  EXPECT_NEAR(loss(ppo, -2.0, 5.0), 6.0, 1e-12);
  EXPECT_NEAR(loss({.kind = ObjectiveKind::kReinforce}, -2.0, 5.0), 2.0 * l, 1e-12);
  EXPECT_NEAR(loss({.kind = ObjectiveKind::kImportanceSampling}, 2.0, 5.0), -10.0, 1e-12);
  EXPECT_NEAR(loss({.kind = ObjectiveKind::kCispo, .clip_low = 1.0f, .clip_high = 4.0f}, 2.0, 9.0), -10.0 * l,
              1e-12);
  EXPECT_NEAR(loss({.kind = ObjectiveKind::kDft}, 0.0, 1.0), -0.25 * l, 1e-12);
  kernels::Objective kl{.kind = ObjectiveKind::kReinforce, .kl = KlEstimator::kK3, .kl_coef = 0.5f};
  EXPECT_NEAR(loss(kl, 0.0, 1.0), 0.5 * (2.0 - std::log(3.0)), 1e-12);
  kl.kl = KlEstimator::kK1;
  EXPECT_NEAR(loss(kl, 0.0, 1.0), -0.5 * std::log(3.0), 1e-12);
  kl.kl = KlEstimator::kK2;
  EXPECT_NEAR(loss(kl, 0.0, 1.0), 0.25 * std::pow(std::log(3.0), 2), 1e-12);
}

TEST(ReferenceTest, GradientsOfSoftTargetsAreDerivatives) {
  Rng rng = FreshRng();
  for (int i = 0; i < 60; ++i) {
    const int64_t vocab = UniformInt(rng, 3, 9);
    ProblemSpec spec = RandomSpec(4, UniformInt(rng, 1, 6), vocab, DType::kFloat32, DType::kFloat32, rng);
    spec.slice_rows = {4};
    spec.accumulate_mask = false;
    spec.options.gradients = Gradients::kExact;
    spec.options.label_smoothing = 0.0f;
    spec.options.use_class_weights = false;
    spec.options.rest = static_cast<Rest>(1 + i % static_cast<int>(kLastRest));
    spec.target_count = static_cast<int32_t>(UniformInt(rng, 1, vocab - 1));
    CheckGradients(spec, rng);
  }
}

// By hand: p = 1/2, 1/4 and 1/4, of which the row names the first twice.
TEST(ReferenceTest, KnownValuesOfSoftTargets) {
  reference::Softmax soft;
  soft.z = soft.log_p = {std::log(0.5), std::log(0.25), std::log(0.25)};
  reference::Rows rows;
  rows.target_count = 3;
  rows.target_classes = {0, -1, 0};
  rows.target_weights = {0.5, 0.0, 0.25};
  const auto targets = [&](Rest rest) { return reference::SoftTargetsOf({.rest = rest}, soft, rows, 0); };
  const double log2 = std::log(2.0);
  EXPECT_NEAR(targets(Rest::kNone).Loss(soft), 0.75 * log2, 1e-12);
  EXPECT_NEAR(targets(Rest::kNone).Slope(soft, 0), 0.75 * 0.5 - 0.75, 1e-12);
  EXPECT_NEAR(targets(Rest::kNone).Slope(soft, 2), 0.75 * 0.25, 1e-12);
  EXPECT_NEAR(targets(Rest::kRenormalized).Loss(soft), log2, 1e-12);
  EXPECT_NEAR(targets(Rest::kRenormalized).Slope(soft, 0), -0.5, 1e-12);
  EXPECT_NEAR(targets(Rest::kOneClass).Loss(soft), log2, 1e-12);  // the rest has p = 1/2 too
  EXPECT_NEAR(targets(Rest::kOneClass).Slope(soft, 0), 0.5 - 0.75, 1e-12);
  EXPECT_NEAR(targets(Rest::kOneClass).Slope(soft, 1), (1.0 - 0.25 / 0.5) * 0.25, 1e-12);
}

TEST(ReferenceTest, GradientsAreDerivativesForEachDivergence) {
  Rng rng = FreshRng();
  for (const Divergence divergence : {Divergence::kForwardKl, Divergence::kReverseKl,
                                      Divergence::kJensenShannon, Divergence::kTotalVariation}) {
    for (const float target_weight : {0.0f, 0.5f}) {
      ProblemSpec spec = RandomSpec(4, 5, 7, DType::kFloat32, DType::kFloat32, rng);
      spec.slice_rows = {4};
      spec.accumulate_mask = spec.grad_lse = spec.grad_entropy = false;
      spec.options.gradients = Gradients::kExact;
      ProblemSpec teacher = RandomSpec(0, 3, 7, DType::kFloat32, DType::kFloat32, rng);
      spec.teacher.push_back(teacher);
      spec.options.distillation = {.divergence = divergence,
                                   .beta = 0.3f,
                                   .temperature = 1.7f,
                                   .weight = 0.8f,
                                   .target_weight = target_weight,
                                   .teacher_logit_scale = 0.6f,
                                   .teacher_softcap = 4.0f};
      CheckGradients(spec, rng);
    }
  }
}

// A student with logits 0 and log 3, q = 1/4, 3/4, and a teacher with p = 1/2, 1/2.
TEST(ReferenceTest, KnownDivergences) {
  reference::Head head;
  head.config.hidden_size = 1;
  head.config.vocab_size = 2;
  head.weight = {0.0, std::log(3.0)};
  head.teacher = {head};
  head.teacher.front().weight = {2.0, 2.0};
  reference::Rows rows;
  rows.hidden = rows.teacher_hidden = {1.0, 1.0};
  rows.targets = {1, kIgnoredTarget};
  const auto loss = [&](const Distillation& distillation) {
    const reference::Result result = reference::Compute(head, {.distillation = distillation}, rows, nullptr);
    EXPECT_EQ(result.loss[1], 0.0);
    return result.loss[0];
  };
  const double forward = 0.5 * std::log(2.0) + 0.5 * std::log(2.0 / 3.0);
  EXPECT_NEAR(loss({.divergence = Divergence::kForwardKl}), forward, 1e-15);
  EXPECT_NEAR(loss({.divergence = Divergence::kReverseKl}), 0.25 * std::log(0.5) + 0.75 * std::log(1.5),
              1e-15);
  EXPECT_NEAR(loss({.divergence = Divergence::kTotalVariation}), 0.25, 1e-15);
  // m = 0.25 p + 0.75 q = 5/16, 11/16.
  EXPECT_NEAR(loss({.divergence = Divergence::kJensenShannon, .beta = 0.25f}),
              0.25 * (0.5 * std::log(1.6) + 0.5 * std::log(8.0 / 11)) +
                  0.75 * (0.25 * std::log(0.8) + 0.75 * std::log(12.0 / 11)),
              1e-15);
  EXPECT_NEAR(loss({.divergence = Divergence::kForwardKl, .weight = 2.0f, .target_weight = 3.0f}),
              2.0 * forward + 3.0 * std::log(4.0 / 3.0), 1e-14);
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
  EXPECT_NEAR(result.sums.z_loss, lse * lse, 1e-14);
  EXPECT_NEAR(result.entropy[0], 0.25 * std::log(4.0) + 0.75 * std::log(4.0 / 3.0), 1e-15);
  EXPECT_EQ(result.argmax, (std::vector<int32_t>{1, 1, -1}));
  EXPECT_EQ(result.sums.valid_rows, 2);
  EXPECT_EQ(result.sums.correct_rows, 1);
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
  EXPECT_EQ(all.sums.valid_rows, 6);
}

}  // namespace
}  // namespace lossd::kernels::testing::reference_test

// ---- Sampled gradients ----
// Their mean over many seeds is the exact gradient, with the spread that
// is predicted. One row and a bias show dL/d(dot product) class by class.

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

// ---- One sampled row ----

namespace lossd::kernels::reference::sampled_row_test {
namespace {

using Values = std::vector<double>;

std::vector<uint8_t> Bits(std::initializer_list<int> bits) { return {bits.begin(), bits.end()}; }

TEST(SampledRow, TakesTheClassesThatAPointFallsOn) {
  const Values sizes = {0.25, 0.25, 0.0, 7.0, 0.5, 0.75};  // borders at 0.25, 0.5, 1.5, 2, 2.75
  EXPECT_EQ(TakenClasses(sizes, 0.125), Bits({1, 0, 0, 1, 0, 1}));
  EXPECT_EQ(TakenClasses(sizes, 0.375), Bits({0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(TakenClasses(sizes, 0.625), Bits({0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(TakenClasses(sizes, 0.875), Bits({0, 0, 0, 1, 1, 0}));
}

TEST(SampledRow, WithoutErrorsNothingIsUndecided) {
  const Values sizes = {0.25, 0.25, 0.0, 7.0, 0.5, 0.75};
  for (const double omega : {0.0, 0.25, 0.375, 0.75}) {
    EXPECT_EQ(UndecidedClasses(sizes, Values(6), omega), Values(6)) << omega;
  }
}

// 5 classes on 2 devices are 3 and 2. Each part begins anew, with a number of its own.
TEST(SampledRow, PartsAreSampledByThemselves) {
  const Values sizes = {0.5, 0.4, 0.3, 0.5, 0.6}, errors = {0.01, 0.01, 0.01, 0.02, 0.0};
  const std::vector<SampledPart> parts = SampledPartsOf(5, 2, /*shares=*/{}, /*seed=*/7, /*row=*/3);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].begin, 0u);
  EXPECT_EQ(parts[0].end, 3u);
  EXPECT_EQ(parts[1].begin, 3u);
  EXPECT_EQ(parts[1].end, 5u);
  EXPECT_EQ(parts[0].omega, double{SampleOf(7, 3)});
  EXPECT_EQ(parts[1].omega, double{SampleOf(7, 3, 3)});
  const std::vector<SampledPart> known = {{0, 3, 0.45}, {3, 5, 0.505}};
  EXPECT_EQ(TakenClasses(sizes, known), Bits({1, 0, 0, 0, 1}));
  EXPECT_EQ(UndecidedClasses(sizes, errors, known), Values({0, 0, 0, 1, 1}));
}

// The points 0.249 and 1.249 are closer to borders than the errors: to that of the first two classes, and to
// none.
TEST(SampledRow, ClassesAtABorderThatIsTooCloseAreUndecided) {
  const Values sizes = {0.25, 0.25, 0.0, 7.0, 0.5, 0.6};
  EXPECT_EQ(UndecidedClasses(sizes, Values(6, 0.01), 0.249), Values({1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(UndecidedClasses(sizes, Values(6, 0.01), 0.251), Values({1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(UndecidedClasses(sizes, Values(6, 0.01), 0.375), Values(6));
  // Errors add up: the point 1.97 is farther from the border at 2 than any class is off.
  const Values late = UndecidedClasses(sizes, Values(6, 0.01), 0.97);
  EXPECT_EQ(late[4], 1.0);
  EXPECT_EQ(late[5], 1.0);
}

// Classes of size 1 and more are always taken, the target and classes that are 0 never.
TEST(SampledRow, CertainClassesAreNotUndecided) {
  const Values sizes = {1.5, 0.0, 1.5, 0.0, 1.5};
  for (const double omega : {0.0, 0.001, 0.5, 0.999}) {
    EXPECT_EQ(UndecidedClasses(sizes, Values({0.4, 0.0, 0.4, 0.0, 0.4}), omega), Values(5));
  }
}

TEST(SampledRow, WhereErrorsAreLargeOnlyProbabilitiesAreKnown) {
  const Values sizes = {0.5, 0.01, 0.99, 2.0};
  const Values undecided = UndecidedClasses(sizes, Values({0.6, 0.01, 0.01, 0.01}), 0.1);
  EXPECT_EQ(undecided[0], 0.5);
  EXPECT_EQ(undecided[1], 0.25);
  EXPECT_EQ(undecided[2], 0.25);
  EXPECT_EQ(undecided[3], 0.0);
}

// Sizes that are off by no more than the errors change no decision that is certain, and the squares of all
// differences add up to no more than what is undecided.
TEST(SampledRow, AllowsForWhateverTheErrorsChange) {
  std::mt19937 rng(5);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  int changed = 0, certain = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    Values sizes(60), errors(60), off(60);
    const double error = trial % 3 == 0 ? 1e-2 : 1e-4;
    for (size_t v = 0; v < sizes.size(); ++v) {
      sizes[v] = v % 9 == 0 ? 0.0 : std::exp(-6.0 * uniform(rng)) * 1.2;
      errors[v] = error * sizes[v];
      off[v] = sizes[v] + errors[v] * (trial % 2 == 0 ? 1.0 : 2.0 * uniform(rng) - 1.0);
    }
    const double omega = uniform(rng);
    const auto taken = TakenClasses(sizes, omega), other = TakenClasses(off, omega);
    const Values undecided = UndecidedClasses(sizes, errors, omega);
    double allowed = 0.0, difference = 0.0;
    for (size_t v = 0; v < sizes.size(); ++v) {
      if (taken[v] != other[v]) {
        ASSERT_GT(undecided[v], 0.0) << "trial " << trial << " class " << v;
        ++changed;
      }
      allowed += undecided[v];
      difference += taken[v] != other[v] ? 1.0 : 0.0;
    }
    // A point at the end of the row has no second class.
    EXPECT_LE(difference, 9.0 * allowed) << "trial " << trial;
    certain += allowed == 0.0 ? 1 : 0;
  }
  EXPECT_GT(changed, 200);
  EXPECT_GT(certain, 500);
}

}  // namespace
}  // namespace lossd::kernels::reference::sampled_row_test
