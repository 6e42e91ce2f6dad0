// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/decision.h"
#include "kernels/reference/reference.h"

namespace lossd::kernels::testing {
namespace {

std::vector<double> ToDouble(const std::vector<float>& values) { return {values.begin(), values.end()}; }

double Norm2(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

// See comparison.h.
void ExpectGradientNear(const char* what, const std::vector<float>& got, const reference::Gradient& want,
                        const Tolerance& tolerance, DType output, double max_abs_logit) {
  ASSERT_EQ(got.size(), want.value.size()) << what;
  double error = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = static_cast<double>(got[i]) - want.value[i];
    error += difference * difference;
  }
  error = std::sqrt(error);
  const double norm = Norm2(want.value);
  const double limit = norm * (tolerance.Gradient(max_abs_logit) + UnitRoundoff(output)) +
                       Norm2(want.magnitude) * tolerance.Magnitude(max_abs_logit) + UndecidedError(want) +
                       UnderflowError(output) * std::sqrt(static_cast<double>(got.size()));
  EXPECT_LE(error, limit) << what << ": relative error " << error / norm << ", reference norm " << norm;
}

// Whether hidden states are rounded before they are multiplied.
bool RoundsHidden(DType compute, const Problem& problem) {
  for (const Problem& teacher : problem.teacher) {
    if (teacher.config.norm != Norm::kNone) return true;
  }
  return problem.config.norm != Norm::kNone || problem.hidden_dtype != compute;
}

double LogitTolerance(const Tolerance& tolerance, const reference::Result& want, size_t row) {
  return tolerance.logit * (1.0 + want.max_abs_logit[row]);
}

// |dloss| for a unit error of a logit: class weights, and 2 lambda lse with a z-loss.
double LossTolerance(const Tolerance& tolerance, const Problem& problem, const SliceData& slice,
                     const reference::Result& want, size_t row) {
  double largest_weight = std::max(1.0, want.loss_sensitivity[row]);
  if (problem.options.use_class_weights) {
    for (float u : problem.class_weights) largest_weight = std::max(largest_weight, std::fabs(double{u}));
  }
  const double log_v = std::log(static_cast<double>(problem.config.vocab_size));
  const double slope = 2.0 * double{problem.options.z_loss} * std::fabs(want.lse[row]) +
                       std::fabs(double{problem.options.objective.entropy_bonus}) * (1.0 + log_v);
  const double row_weight = slice.row_weights.empty() ? 1.0 : std::fabs(double{slice.row_weights[row]});
  double of_target = largest_weight + slope;
  if (const Distillation& distillation = problem.options.distillation; distillation.used()) {
    // A sum over classes whose terms are off by an ulp of their exponents, even where their slopes vanish.
    of_target = double{distillation.target_weight} * of_target +
                double{distillation.weight} * (1.0 + want.divergence_slope[row]);
  }
  return row_weight * of_target * LogitTolerance(tolerance, want, row) +
         UnitRoundoff(DType::kFloat32) * std::fabs(want.loss[row]);
}

void ExpectRowMatches(const Tolerance& tolerance, const Problem& problem, const SliceData& slice,
                      const reference::Result& want, const SliceOutputs& got, size_t row) {
  // Results are rounded to fp32, and an lse may be much larger than the logits.
  const double logit =
      LogitTolerance(tolerance, want, row) + UnitRoundoff(DType::kFloat32) * std::fabs(want.lse[row]);
  const double log_v = std::log(static_cast<double>(problem.config.vocab_size));
  EXPECT_NEAR(got.loss[row], want.loss[row], LossTolerance(tolerance, problem, slice, want, row))
      << "row " << row;
  EXPECT_NEAR(got.lse[row], want.lse[row], logit) << "row " << row;
  EXPECT_NEAR(got.target_logprob[row], want.target_logprob[row], 2 * logit) << "row " << row;
  EXPECT_NEAR(got.entropy[row], want.entropy[row], (1.0 + log_v) * logit) << "row " << row;
  if (want.top_gap[row] > 2 * logit) {
    EXPECT_EQ(got.argmax[row], want.argmax[row]) << "row " << row;
  }
}

// Of `count` values from `begin` on.
template <typename T>
absl::Span<const T> PartOf(const std::vector<T>& values, size_t row, int32_t count) {
  return absl::MakeConstSpan(values).subspan(row * static_cast<size_t>(count), static_cast<size_t>(count));
}

// Both may be -infinity.
void ExpectLogProbNear(float got, double want, double tolerance, size_t row) {
  if (std::isinf(want)) {
    EXPECT_EQ(static_cast<double>(got), want) << "row " << row;
  } else {
    EXPECT_NEAR(got, want, tolerance) << "row " << row;
  }
}

// The classes have to be those of the reference but for logits that an error could exchange: each of them is
// at most so much less probable than the one that the reference has in its place.
void ExpectTopMatches(absl::Span<const double> log_p, absl::Span<const float> values,
                      absl::Span<const int32_t> classes, double tolerance, size_t row) {
  std::vector<int32_t> order(log_p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return log_p[static_cast<size_t>(a)] > log_p[static_cast<size_t>(b)];
  });
  std::vector<int32_t> seen(classes.begin(), classes.end());
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end()) << "row " << row << ": a class twice";
  for (size_t i = 0; i < classes.size(); ++i) {
    ASSERT_GE(classes[i], 0) << "row " << row << " rank " << i;
    ASSERT_LT(static_cast<size_t>(classes[i]), log_p.size()) << "row " << row << " rank " << i;
    const double here = log_p[static_cast<size_t>(classes[i])];
    const double want = log_p[static_cast<size_t>(order[i])];
    ExpectLogProbNear(values[i], here, tolerance, row);
    ExpectLogProbNear(static_cast<float>(here), want, 2 * tolerance, row);
    if (i == 0) continue;
    EXPECT_GE(values[i - 1], values[i]) << "row " << row << " rank " << i;
    if (values[i - 1] == values[i] && log_p[static_cast<size_t>(classes[i - 1])] == here) {
      EXPECT_LT(classes[i - 1], classes[i]) << "row " << row << " rank " << i;
    }
  }
}

// What was wanted of single classes.
void ExpectClassesMatch(const Tolerance& tolerance, const Problem& problem, const SliceData& slice,
                        const reference::Result& want, const SliceOutputs& got) {
  if (slice.class_count == 0 && slice.top_k == 0) return;
  const std::vector<double> log_p =
      reference::LogProbabilities(ReferenceHead(problem), problem.options, ReferenceRows(slice));
  const auto vocab = static_cast<size_t>(problem.config.vocab_size);
  for (size_t row = 0; row < slice.targets.size(); ++row) {
    const absl::Span<const float> given = PartOf(got.class_logprobs, row, slice.class_count);
    const absl::Span<const float> top = PartOf(got.top_logprobs, row, slice.top_k);
    const absl::Span<const int32_t> top_classes = PartOf(got.top_classes, row, slice.top_k);
    if (slice.targets[row] == kIgnoredTarget) {
      for (const float value : given) EXPECT_EQ(value, 0.0f) << "ignored row " << row;
      for (const float value : top) EXPECT_EQ(value, 0.0f) << "ignored row " << row;
      for (const int32_t place : top_classes) EXPECT_EQ(place, -1) << "ignored row " << row;
      continue;
    }
    // The difference of two numbers that are rounded to fp32 each.
    const double allowed =
        2 * (LogitTolerance(tolerance, want, row) + UnitRoundoff(DType::kFloat32) * std::fabs(want.lse[row]));
    const auto of_row = absl::MakeConstSpan(log_p).subspan(row * vocab, vocab);
    const absl::Span<const int32_t> classes =
        PartOf(slice.classes, slice.shared_classes ? 0 : row, slice.class_count);
    for (size_t i = 0; i < given.size(); ++i) {
      ExpectLogProbNear(given[i], of_row[static_cast<size_t>(classes[i])], allowed, row);
    }
    ExpectTopMatches(of_row, top, top_classes, allowed, row);
  }
}

void ExpectIgnoredRow(const SliceOutputs& got, size_t row, int64_t hidden_size) {
  EXPECT_EQ(got.loss[row], 0.0f) << "ignored row " << row;
  EXPECT_EQ(got.lse[row], 0.0f) << "ignored row " << row;
  EXPECT_EQ(got.entropy[row], 0.0f) << "ignored row " << row;
  EXPECT_EQ(got.target_logprob[row], 0.0f) << "ignored row " << row;
  EXPECT_EQ(got.argmax[row], -1) << "ignored row " << row;
  if (got.grad_hidden.empty()) return;
  const auto begin = got.grad_hidden.begin() + static_cast<int64_t>(row) * hidden_size;
  EXPECT_TRUE(std::all_of(begin, begin + hidden_size, [](float g) { return g == 0.0f; })) << "row " << row;
}

bool HasGradient(const Problem& problem, const SliceData& slice, size_t row) {
  const bool accumulated =
      problem.accumulate_gradients && (slice.accumulate.empty() || slice.accumulate[row] != 0);
  const bool absent = !slice.row_weights.empty() && slice.row_weights[row] == 0.0f &&
                      (slice.grad_lse.empty() || slice.grad_lse[row] == 0.0f) &&
                      (slice.grad_entropy.empty() || slice.grad_entropy[row] == 0.0f);
  return slice.targets[row] != kIgnoredTarget && !absent && (slice.want_grad_hidden || accumulated);
}

// Of the rows with a gradient.
double DroppedMass(const Problem& problem, const SliceData& slice, const reference::Result& want) {
  double sum = 0.0;
  for (size_t row = 0; row < want.dropped_mass.size(); ++row) {
    if (HasGradient(problem, slice, row)) sum += want.dropped_mass[row];
  }
  return sum;
}

// Whatever an error of the logits could move over the threshold is allowed for.
void ExpectDroppedMassMatches(const Tolerance& tolerance, const Problem& problem, const SliceData& slice,
                              const reference::Result& want, double got) {
  const double dropped = DroppedMass(problem, slice, want);
  // Heads that recompute logits may sum up exponentials relative to a number 48 above the target's: their
  // exponents are off by half a unit of numbers below 64, once in the sum and once in what is taken from it.
  const double row_tolerance = problem.config.logits == Logits::kRecomputed ? 0x1p-18 : 1e-6;
  double allowed = row_tolerance * static_cast<double>(want.dropped_mass.size());
  if (problem.options.gradients == Gradients::kFiltered) {
    const auto p = reference::Probabilities(ReferenceHead(problem), problem.options, ReferenceRows(slice));
    const auto vocab = static_cast<size_t>(problem.config.vocab_size);
    for (size_t i = 0; i < p.size(); ++i) {
      const double logit = 2.0 * LogitTolerance(tolerance, want, i / vocab);
      const double epsilon = double{problem.options.filter_epsilon};
      if (p[i] < epsilon) allowed += p[i] * logit;
      if (p[i] > epsilon * std::exp(-logit) && p[i] < epsilon * std::exp(logit)) allowed += p[i];
    }
  }
  EXPECT_NEAR(got, dropped, allowed);
}

// A backend may estimate the sums from the classes that it has taken: kappa^2 tau times one number below tau
// for each of them, so with at most this variance.
void ExpectSamplingSumsMatch(DType compute, const Problem& problem, const SliceData& slice,
                             const reference::Result& want, const LossSums& got) {
  const double tau = double{problem.options.sample_threshold};
  const double smoothing = double{problem.options.label_smoothing};
  double variance = 0.0, square = 0.0, noise = 0.0, allowed = 1e-30;
  for (size_t row = 0; row < want.sampling_variance.size(); ++row) {
    if (!HasGradient(problem, slice, row)) continue;
    variance += want.sampling_variance[row];
    square += want.squared_gradient[row];
    noise += std::pow(tau * want.sample_scale[row], 2) * want.sampling_variance[row];
    // Label smoothing's uniform part of the target's gradient need not be counted.
    const double element = SampledElementError(compute) * (1.0 + want.max_abs_logit[row]);
    allowed += (2.0 * element + 1e-6 + smoothing) * want.squared_gradient[row];
  }
  EXPECT_NEAR(got.sampling_variance, variance, allowed + 6.0 * std::sqrt(noise));
  EXPECT_NEAR(got.squared_gradient, square, allowed + 6.0 * std::sqrt(noise));
}

// Rows of which rounding decides whether they are clipped are the caller's to avoid.
void ExpectObjectiveSumsMatch(const Tolerance& tolerance, const SliceData& slice,
                              const reference::Result& want, const ObjectiveSums& got) {
  double allowed = 1e-12;  // of the log-probabilities
  for (size_t row = 0; row < want.loss.size(); ++row) {
    if (slice.targets[row] == kIgnoredTarget) continue;
    allowed += (2.0 * LogitTolerance(tolerance, want, row) + 1e-6) * (1.0 + want.loss_sensitivity[row]);
  }
  const ObjectiveSums& sums = want.sums.objective;
  EXPECT_EQ(got.rows, sums.rows);
  EXPECT_EQ(got.clipped_rows, sums.clipped_rows);
  EXPECT_NEAR(got.ratio, sums.ratio, allowed + 4.0 * tolerance.logit * std::fabs(sums.ratio));
  EXPECT_NEAR(got.old_kl, sums.old_kl, allowed + 4.0 * tolerance.logit * std::fabs(sums.ratio));
  EXPECT_NEAR(got.ref_kl, sums.ref_kl, allowed + 4.0 * tolerance.logit * std::fabs(sums.ref_kl));
}

void ExpectSumsMatch(const Tolerance& tolerance, const Problem& problem, const SliceData& slice,
                     const reference::Result& want, const LossSums& got, bool with_entropy) {
  double loss_tolerance = 1e-12;
  double entropy_tolerance = 1e-12;
  int64_t undecided = 0;
  for (size_t row = 0; row < want.loss.size(); ++row) {
    if (slice.targets[row] == kIgnoredTarget) continue;
    loss_tolerance += LossTolerance(tolerance, problem, slice, want, row);
    entropy_tolerance += (1.0 + std::log(static_cast<double>(problem.config.vocab_size))) *
                         LogitTolerance(tolerance, want, row);
    if (want.top_gap[row] <= 2 * LogitTolerance(tolerance, want, row)) ++undecided;
  }
  EXPECT_NEAR(got.loss, want.sums.loss, loss_tolerance);
  EXPECT_NEAR(got.z_loss, want.sums.z_loss, loss_tolerance);
  if (with_entropy) {
    EXPECT_NEAR(got.entropy, want.sums.entropy, entropy_tolerance);
  }
  const Distillation& distillation = problem.options.distillation;
  if (distillation.weight > 0.0f) {
    EXPECT_NEAR(got.divergence, want.sums.divergence, loss_tolerance / double{distillation.weight});
  }
  const double least = double{distillation.target_weight};
  EXPECT_NEAR(got.target_loss, want.sums.target_loss, least > 0.0 ? loss_tolerance / least : 0.0);
  ExpectDroppedMassMatches(tolerance, problem, slice, want, got.dropped_mass);
  EXPECT_EQ(got.valid_rows, want.sums.valid_rows);
  ExpectObjectiveSumsMatch(tolerance, slice, want, got.objective);
  EXPECT_NEAR(static_cast<double>(got.correct_rows), static_cast<double>(want.sums.correct_rows),
              static_cast<double>(undecided));
}

bool AnyGradient(const Problem& problem) {
  for (const SliceData& slice : problem.slices) {
    for (size_t row = 0; row < slice.targets.size(); ++row) {
      if (HasGradient(problem, slice, row)) return true;
    }
  }
  return false;
}

bool AnyGradEntropy(const Problem& problem) {
  if (problem.options.objective.entropy_bonus != 0.0f && AnyGradient(problem)) return true;
  for (const SliceData& slice : problem.slices) {
    for (size_t row = 0; row < slice.grad_entropy.size(); ++row) {
      if (slice.targets[row] != kIgnoredTarget && slice.grad_entropy[row] != 0.0f) return true;
    }
  }
  return false;
}

// The predicted relative error of the chunk, if it is sampled.
double PredictedError(const Problem& problem) {
  double variance = 0.0;
  double square = 0.0;
  for (const SliceData& slice : problem.slices) {
    const auto result =
        reference::Compute(ReferenceHead(problem), problem.options, SampledRows(problem, slice), nullptr);
    for (size_t row = 0; row < slice.targets.size(); ++row) {
      if (!HasGradient(problem, slice, row)) continue;
      variance += result.sampling_variance[row];
      square += result.squared_gradient[row];
    }
  }
  return square > 0.0 ? std::sqrt(variance / square) : 0.0;
}

// What a backend decides for the chunk as a whole.
Gradients DecisionFor(const Problem& problem) {
  const LossOptions& options = problem.options;
  if (!WhyExact(options, AnyGradEntropy(problem)).empty()) return Gradients::kExact;
  if (options.gradients != Gradients::kAuto) return options.gradients;
  return PredictedError(problem) <= double{options.max_gradient_error} ? Gradients::kSampled
                                                                       : Gradients::kExact;
}

}  // namespace

reference::Head ReferenceHead(const Problem& problem) {
  std::vector<reference::Head> teacher;
  for (const Problem& teaching : problem.teacher) teacher.push_back(ReferenceHead(teaching));
  return {problem.config,
          ToDouble(problem.weight),
          ToDouble(problem.bias),
          ToDouble(problem.norm_gain),
          ToDouble(problem.norm_shift),
          ToDouble(problem.class_weights),
          std::move(teacher)};
}

namespace {

// log softmax(z / temperature) of a row, from log softmax(z).
std::vector<double> Softened(absl::Span<const double> log_p, double temperature) {
  std::vector<double> softened;
  double sum = 0.0;
  for (const double each : log_p) sum += std::exp(each / temperature);
  for (const double each : log_p) softened.push_back(each / temperature - std::log(sum));
  return softened;
}

}  // namespace

double LeastGapToTeacher(const Problem& problem) {
  const reference::Head head = ReferenceHead(problem);
  const Distillation& distillation = problem.options.distillation;
  const LossOptions of_teacher = {.logit_scale = distillation.teacher_logit_scale,
                                  .softcap = distillation.teacher_softcap};
  const auto vocab = static_cast<size_t>(problem.config.vocab_size);
  double least = std::numeric_limits<double>::infinity();
  for (const SliceData& slice : problem.slices) {
    reference::Rows rows = ReferenceRows(slice);
    const std::vector<double> student = reference::LogProbabilities(head, problem.options, rows);
    rows.hidden = rows.teacher_hidden;
    const std::vector<double> teacher = reference::LogProbabilities(head.teacher.front(), of_teacher, rows);
    for (size_t row = 0; row < rows.targets.size(); ++row) {
      const double temperature = double{distillation.temperature};
      const auto log_q = Softened(absl::MakeSpan(student).subspan(row * vocab, vocab), temperature);
      const auto log_p = Softened(absl::MakeSpan(teacher).subspan(row * vocab, vocab), temperature);
      for (size_t v = 0; v < vocab; ++v) least = std::min(least, std::fabs(log_q[v] - log_p[v]));
    }
  }
  return least;
}

reference::Rows ReferenceRows(const SliceData& slice) {
  return {ToDouble(slice.hidden),
          slice.targets,
          ToDouble(slice.row_weights),
          slice.accumulate,
          double{slice.grad_scale},
          ToDouble(slice.grad_loss),
          ToDouble(slice.grad_lse),
          ToDouble(slice.grad_entropy),
          ToDouble(slice.advantages),
          ToDouble(slice.old_logprobs),
          ToDouble(slice.ref_logprobs),
          /*stopped_logprobs=*/{},
          slice.sample_seed,
          slice.first_row,
          /*sample_uniform=*/false,
          /*class_parts=*/1,
          /*class_shares=*/{},
          /*logit_error=*/0.0,
          ToDouble(slice.teacher_hidden),
          slice.target_classes,
          ToDouble(slice.target_weights),
          slice.target_count};
}

Problem WithObjective(Problem problem, const Objective& objective, Rng& rng) {
  problem.options.objective = objective;
  problem.options.label_smoothing = 0.0f;
  problem.options.use_class_weights = false;
  LossOptions plain = problem.options;
  plain.objective = Objective();
  plain.gradients = Gradients::kExact;
  const Tolerance tolerance =
      ToleranceFor(problem.config.compute_dtype, RoundsHidden(problem.config.compute_dtype, problem));
  const double bounds[] = {std::log(1.0 - double{objective.clip_low}),
                           std::log1p(double{objective.clip_high}), std::log(double{objective.dual_clip})};
  for (SliceData& slice : problem.slices) {
    const auto result = reference::Compute(ReferenceHead(problem), plain, ReferenceRows(slice), nullptr);
    slice.advantages.clear();
    slice.old_logprobs.clear();
    slice.ref_logprobs.clear();
    for (size_t row = 0; row < slice.targets.size(); ++row) {
      const double margin = 2.0 * LogitTolerance(tolerance, result, row);
      float log_ratio = 0.0f;
      for (int tries = 0; tries < 200; ++tries) {
        log_ratio = Uniform(rng, -1.5f, 1.5f);
        const bool clear = std::all_of(std::begin(bounds), std::end(bounds), [&](double bound) {
          return !std::isfinite(bound) || std::fabs(double{log_ratio} - bound) > margin;
        });
        if (clear) break;
        log_ratio = 2.0f + static_cast<float>(margin);  // beyond all of them
      }
      const auto logprob = static_cast<float>(result.target_logprob[row]);
      slice.advantages.push_back(Chance(rng, 0.1) ? 0.0f : Uniform(rng, -2.0f, 2.0f));
      slice.old_logprobs.push_back(logprob - log_ratio);
      slice.ref_logprobs.push_back(logprob + Uniform(rng, -1.0f, 1.0f));
    }
    if (!NeedsAdvantage(objective.kind)) slice.advantages.clear();
    if (!NeedsOldLogprob(objective.kind)) slice.old_logprobs.clear();
    if (!objective.needs_reference()) slice.ref_logprobs.clear();
  }
  return problem;
}

std::vector<reference::Result> ComputeReference(const Problem& problem,
                                                reference::ParamGradients* gradients) {
  const reference::Head head = ReferenceHead(problem);
  LossOptions options = problem.options;
  options.gradients = DecisionFor(problem);
  std::vector<reference::Result> results;
  for (const SliceData& slice : problem.slices) {
    results.push_back(reference::Compute(head, options, SampledRows(problem, slice),
                                         problem.accumulate_gradients ? gradients : nullptr));
  }
  return results;
}

Problem WithClearEpsilon(Problem problem) {
  if (problem.options.gradients != Gradients::kFiltered) return problem;
  std::vector<double> p;
  for (const SliceData& slice : problem.slices) {
    const auto more = reference::Probabilities(ReferenceHead(problem), problem.options, ReferenceRows(slice));
    p.insert(p.end(), more.begin(), more.end());
  }
  std::sort(p.begin(), p.end());
  if (problem.options.filter_epsilon == 0.0f) return problem;
  // The widest gap in epsilon's bin, which is its neighbours' too: doing it again changes nothing.
  constexpr double kWidth = 2.25;
  const auto bin = [](float epsilon) { return std::floor(std::log(double{epsilon}) / std::log(kWidth)); };
  const double here = bin(problem.options.filter_epsilon);
  double widest = 1.0;
  for (size_t i = 1; i < p.size(); ++i) {
    const auto middle = static_cast<float>(std::sqrt(p[i - 1] * p[i]));
    if (p[i] <= widest * p[i - 1] || bin(middle) != here) continue;
    widest = p[i] / p[i - 1];
    problem.options.filter_epsilon = middle;
  }
  return problem;
}

Problem AsComputed(Problem problem, const ChunkRun& run) {
  if (!MayBeSampled(problem)) return problem;
  if (problem.exact_distilled && !problem.teacher.empty()) {
    EXPECT_EQ(run.gradients, Gradients::kExact) << Name(run.gradients);
    problem.options.gradients = Gradients::kExact;
    return problem;
  }
  // The gradient of one class is 0 either way.
  const bool may_be_exact = problem.options.gradients == Gradients::kAuto || !AnyGradient(problem) ||
                            problem.config.vocab_size == 1;
  EXPECT_TRUE(run.gradients == Gradients::kSampled || (may_be_exact && run.gradients == Gradients::kExact))
      << Name(run.gradients);
  if (problem.options.gradients == Gradients::kAuto && AnyGradient(problem)) {
    const double limit = double{problem.options.max_gradient_error};
    const bool sampled = run.gradients == Gradients::kSampled;
    Problem taken = problem;
    if (sampled) taken.options.sample_threshold = run.sample_threshold;
    const double error = PredictedError(taken);
    EXPECT_TRUE(sampled || error > 0.5 * limit) << "predicted error " << error;
    EXPECT_TRUE(!sampled || error < 2.0 * limit || limit == 0.0) << "predicted error " << error;
    for (const SliceOutputs& slice : run.slices) {
      EXPECT_TRUE(limit > 0.0 || slice.sums.sampling_variance == 0.0);
    }
  }
  problem.samples_uniform = problem.auto_samples_uniform && problem.options.gradients == Gradients::kAuto;
  problem.options.gradients = run.gradients;
  if (run.gradients != Gradients::kSampled) return problem;
  EXPECT_GE(run.sample_threshold, problem.options.sample_threshold);
  problem.options.sample_threshold = run.sample_threshold;
  return problem;
}

double MaxAbsLogit(absl::Span<const reference::Result> results) {
  double largest = 0.0;
  for (const reference::Result& result : results) {
    for (double z : result.max_abs_logit) largest = std::max(largest, z);
  }
  return largest;
}

void ExpectSliceMatches(DType compute, const Problem& problem, const SliceData& slice,
                        const reference::Result& want, const SliceOutputs& got) {
  EXPECT_EQ(got.first_nonfinite_row, -1);
  const Tolerance tolerance = ToleranceFor(compute, RoundsHidden(compute, problem));
  ExpectSumsMatch(tolerance, problem, slice, want, got.sums, !got.entropy.empty());
  ExpectSamplingSumsMatch(compute, problem, slice, want, got.sums);
  ExpectClassesMatch(tolerance, problem, slice, want, got);
  for (size_t row = 0; row < got.loss.size(); ++row) {
    if (slice.targets[row] == kIgnoredTarget) {
      ExpectIgnoredRow(got, row, problem.config.hidden_size);
    } else {
      ExpectRowMatches(tolerance, problem, slice, want, got, row);
    }
  }
  if (!slice.want_grad_hidden) return;
  ExpectGradientNear("grad_hidden", got.grad_hidden, want.grad_hidden,
                     OverClasses(tolerance, compute, problem.config.vocab_size), problem.hidden_dtype,
                     MaxAbsLogit({&want, 1}));
}

void ExpectGradientsMatch(HeadKernels& head, const reference::ParamGradients& want, double max_abs_logit,
                          bool rounded) {
  const Tolerance tolerance = ToleranceFor(head.compute_dtype(), rounded);
  const std::pair<Param, const reference::Gradient*> params[] = {{Param::kWeight, &want.weight},
                                                                 {Param::kBias, &want.bias},
                                                                 {Param::kNormGain, &want.norm_gain},
                                                                 {Param::kNormShift, &want.norm_shift}};
  for (const auto& [param, gradient] : params) {
    if (!HasTensor(head.config(), {param, Role::kGradient})) continue;
    ExpectGradientNear(std::string(Name(param)).c_str(), ReadGradient(head, param), *gradient, tolerance,
                       DType::kFloat32, max_abs_logit);
  }
}

void RunAndCompare(Backend& backend, const std::vector<Problem>& chunks, const RunOptions& options) {
  const std::unique_ptr<HeadKernels> head = MakeHead(backend, chunks.front());
  ASSERT_NE(head, nullptr);
  std::unique_ptr<HeadKernels> teacher;
  RunOptions running = options;
  if (!chunks.front().teacher.empty()) {
    teacher = MakeHead(backend, chunks.front().teacher.front());
    ASSERT_NE(teacher, nullptr);
    running.teacher = teacher.get();
  }
  reference::ParamGradients gradients = reference::ZeroGradients(chunks.front().config);
  double max_abs_logit = 0.0;
  for (const Problem& chunk : chunks) {
    const Problem asked = WithClearSamples(WithClearEpsilon(chunk));
    SCOPED_TRACE(Describe(asked));
    const ChunkRun got = RunChunk(*head, asked, running);
    ASSERT_TRUE(got.results.ok()) << got.results;
    ASSERT_TRUE(got.done.ok()) << got.done;
    const Problem problem = AsComputed(asked, got);
    const std::vector<reference::Result> want = ComputeReference(problem, &gradients);
    for (size_t i = 0; i < want.size(); ++i) {
      SCOPED_TRACE(absl::StrCat("slice ", i));
      ExpectSliceMatches(head->compute_dtype(), problem, problem.slices[i], want[i], got.slices[i]);
    }
    max_abs_logit = std::max(max_abs_logit, MaxAbsLogit(want));
  }
  SCOPED_TRACE(Describe(chunks.front()));
  if (!head->config().trainable) return;
  ExpectGradientsMatch(*head, gradients, max_abs_logit, RoundsHidden(head->compute_dtype(), chunks.front()));
}

namespace {

// The sum of what is undecided in a slice.
double UndecidedOf(const reference::SampledClasses& classes, const SliceData& slice, const Problem& problem) {
  const size_t vocab = slice.targets.empty() ? 0 : classes.size.size() / slice.targets.size();
  double sum = 0.0;
  for (size_t row = 0; row < slice.targets.size(); ++row) {
    const auto begin = static_cast<std::ptrdiff_t>(row * vocab),
               end = begin + static_cast<std::ptrdiff_t>(vocab);
    const auto parts =
        reference::SampledPartsOf(vocab, problem.class_parts, problem.config.shares, slice.sample_seed,
                                  static_cast<uint64_t>(slice.first_row) + row);
    const std::vector<double> undecided =
        reference::UndecidedClasses({classes.size.begin() + begin, classes.size.begin() + end},
                                    {classes.error.begin() + begin, classes.error.begin() + end}, parts);
    sum = std::accumulate(undecided.begin(), undecided.end(), sum);
  }
  return sum;
}

}  // namespace

bool MayBeSampled(const Problem& problem) { return MaySample(problem.options.gradients); }

reference::Rows SampledRows(const Problem& problem, const SliceData& slice) {
  reference::Rows rows = ReferenceRows(slice);
  const bool is_auto = problem.options.gradients == Gradients::kAuto;
  rows.sample_uniform = problem.samples_uniform || (problem.auto_samples_uniform && is_auto);
  rows.class_parts = problem.class_parts;
  rows.class_shares = problem.config.shares;
  rows.logit_error = SampledElementError(problem.config.compute_dtype);
  return rows;
}

Problem WithClearSamples(Problem problem) {
  constexpr int kTries = 30;
  if (!MayBeSampled(problem)) return problem;
  for (SliceData& slice : problem.slices) {
    const auto classes = reference::ComputeSampledClasses(ReferenceHead(problem), problem.options,
                                                          SampledRows(problem, slice));
    uint64_t best = slice.sample_seed;
    double least = UndecidedOf(classes, slice, problem);
    for (int i = 0; i < kTries && least > 0.0; ++i) {
      slice.sample_seed = MixBits(slice.sample_seed);
      const double here = UndecidedOf(classes, slice, problem);
      if (here >= least) continue;
      least = here;
      best = slice.sample_seed;
    }
    slice.sample_seed = best;
  }
  return problem;
}

double UndecidedError(const reference::Gradient& want) {
  return 3.0 * std::sqrt(std::accumulate(want.undecided.begin(), want.undecided.end(), 0.0));
}

}  // namespace lossd::kernels::testing
