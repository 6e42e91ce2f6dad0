// SPDX-License-Identifier: Apache-2.0
#include "server/engine/update_bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

using kernels::OptimizerOptions;

constexpr double kMostFloat = std::numeric_limits<float>::max();
constexpr double kSafe = 1e37;          // sums and products up to it are finite in fp32, roundings included
constexpr double kMostGradient = 1e19;  // whose square is
constexpr double kGrowth = 1.0 + 4e-7;  // what rounding may add

bool IsAdamW(const OptimizerOptions& options) { return options.kind == OptimizerOptions::Kind::kAdamW; }

absl::Status TooLarge(absl::string_view field, absl::string_view what, double value) {
  return InvalidField(field, absl::StrCat("must be a number that fp32 has", what), absl::StrCat(value));
}

// What AdamW multiplies the quotient of the moments with.
double RateOf(const OptimizerOptions& options, int64_t update) {
  if (!IsAdamW(options)) return options.learning_rate;
  return options.learning_rate / (1.0 - std::pow(options.beta1, static_cast<double>(update)));
}

bool Fits(double most) { return most <= kSafe; }  // NaN does not

double DecayOf(const OptimizerOptions& options, bool is_vector) {
  return is_vector && !options.decay_vectors ? 0.0 : options.weight_decay;
}

// AdamW: what a value is multiplied with.
double KeepOf(const OptimizerOptions& options, bool is_vector) {
  return 1.0 - options.learning_rate * DecayOf(options, is_vector);
}

// True if the factor makes no value larger and leaves the infinite ones what they are.
bool IsPlainKeep(double keep) { return static_cast<float>(keep) > 0.0f && keep <= 1.0; }

// What becomes of the values of one kind, weights or vectors.
struct Outcome {
  bool bounded = false;
  double value = Magnitudes::kUnknown;
  double moment1 = Magnitudes::kUnknown;
};

Outcome AfterChange(double value, double change, double moment1, bool fits) {
  const double after = kGrowth * value + change;
  return {.bounded = fits && (change <= kMostChange || Fits(after)), .value = after, .moment1 = moment1};
}

// `gradient`: the most that a gradient is, after the multiplier.
double AdamMoment1(const OptimizerOptions& options, double gradient, double before) {
  return kGrowth * (static_cast<float>(options.beta1) * before + (1.0 - options.beta1) * gradient);
}

double AdamMoment2(const OptimizerOptions& options, double gradient, double before) {
  return kGrowth * (static_cast<float>(options.beta2) * before + (1.0 - options.beta2) * gradient * gradient);
}

// The second moment may be 0 although the first is not: the square of a small gradient is 0 in fp32, and the
// decay rates may have been others before. So epsilon alone bounds the quotient.
double AdamChange(const OptimizerOptions& options, double rate, double moment1) {
  if (moment1 == 0.0) return 0.0;
  const float epsilon = static_cast<float>(options.epsilon);
  // A device may take a subnormal number for 0.
  if (epsilon < std::numeric_limits<float>::min()) return Magnitudes::kUnknown;
  return Fits(rate * moment1) ? rate * moment1 / epsilon : Magnitudes::kUnknown;
}

Outcome AfterAdamW(const OptimizerOptions& options, double change, bool is_vector, double value) {
  const double keep = KeepOf(options, is_vector);
  if (IsPlainKeep(keep)) return AfterChange(value, change, 0.0, true);
  const double kept = std::abs(keep) * value;
  return AfterChange(kept, change, 0.0, Fits(kept + change));
}

Outcome AfterSgd(const OptimizerOptions& options, int64_t update, double gradient, bool is_vector,
                 double value, double moment1) {
  const double decay = DecayOf(options, is_vector);
  const double g = decay > 0.0 ? gradient + decay * value : gradient;
  if (options.momentum == 0.0) {
    return AfterChange(value, options.learning_rate * g, moment1, Fits(g));
  }
  const double kept = update == 1 ? 0.0 : options.momentum;
  const double taken = update == 1 ? 1.0 : std::abs(1.0 - options.dampening);
  const double buffer = kGrowth * (kept * moment1 + taken * g);
  const double step = options.nesterov ? g + options.momentum * buffer : buffer;
  return AfterChange(value, options.learning_rate * step, buffer, Fits(g) && Fits(buffer) && Fits(step));
}

Reach AdamReach(const OptimizerOptions& options, double rate, double gradient, const Magnitudes& before) {
  const double moment1 = AdamMoment1(options, gradient, before.moment1);
  const double moment2 = AdamMoment2(options, gradient, before.moment2);
  const double change = AdamChange(options, rate, moment1);
  const Outcome matrix = AfterAdamW(options, change, false, before.matrix);
  const Outcome vectors = AfterAdamW(options, change, true, before.vectors);
  const bool moments_fit = Fits(moment1) && moment2 <= 2.0 * kMostGradient * kMostGradient;
  return {
      .reach =
          moments_fit && matrix.bounded && vectors.bounded ? UpdateReach::kBounded : UpdateReach::kUnknown,
      .after = {.matrix = matrix.value, .vectors = vectors.value, .moment1 = moment1, .moment2 = moment2}};
}

Reach SgdReach(const OptimizerOptions& options, int64_t update, double gradient, const Magnitudes& before) {
  const Outcome matrix = AfterSgd(options, update, gradient, false, before.matrix, before.moment1);
  const Outcome vectors = AfterSgd(options, update, gradient, true, before.vectors, before.moment1);
  return {.reach = matrix.bounded && vectors.bounded ? UpdateReach::kBounded : UpdateReach::kUnknown,
          .after = {.matrix = matrix.value,
                    .vectors = vectors.value,
                    .moment1 = std::max(matrix.moment1, vectors.moment1),
                    .moment2 = before.moment2}};
}

}  // namespace

absl::Status CheckOptionsFit(const OptimizerOptions& options, int64_t update) {
  const bool adamw = IsAdamW(options);
  const absl::string_view kind = adamw ? "optimizer.adamw." : "optimizer.sgd.";
  const auto check = [&](absl::string_view name, double value) {
    if (std::abs(value) <= kMostFloat) return absl::OkStatus();
    return TooLarge(absl::StrCat(kind, name), "", value);
  };
  if (std::abs(options.grad_multiplier) > kMostFloat) {
    return TooLarge("optimizer.grad_multiplier", "", options.grad_multiplier);
  }
  absl::Status status = check("learning_rate", options.learning_rate);
  status.Update(check("weight_decay", options.weight_decay));
  if (adamw) {
    status.Update(check("epsilon", options.epsilon));
  } else {
    status.Update(check("momentum", options.momentum));
    status.Update(check("dampening", options.dampening));
  }
  if (!status.ok()) return status;
  if (options.learning_rate * options.weight_decay > kMostFloat) {
    return TooLarge(absl::StrCat(kind, "weight_decay"), ", also times the learning rate",
                    options.weight_decay);
  }
  if (RateOf(options, update) > kMostFloat) {
    return TooLarge(absl::StrCat(kind, "learning_rate"), ", also divided by 1 - beta1^updates",
                    options.learning_rate);
  }
  return absl::OkStatus();
}

absl::StatusOr<Reach> CheckReach(const OptimizerOptions& options, int64_t update, double norm,
                                 const Magnitudes& before) {
  const bool adamw = IsAdamW(options);
  const double gradient = std::abs(options.grad_multiplier) * norm;
  const double rate = RateOf(options, update);
  const double most_gradient = adamw ? kMostGradient : kMostFloat;
  if (gradient > most_gradient) {
    return InvalidField("optimizer.grad_multiplier",
                        absl::StrCat("times the norm of the gradients, ", norm, ", is more than ",
                                     most_gradient, ", the most that fp32 ", adamw ? "moments take" : "has"),
                        absl::StrCat(options.grad_multiplier));
  }
  const double change = adamw ? rate : rate * gradient;
  if (change > kMostChange) {
    return InvalidField(adamw ? "optimizer.adamw.learning_rate" : "optimizer.sgd.learning_rate",
                        absl::StrCat("would change weights by up to ", change, ", more than ", kMostChange),
                        absl::StrCat(options.learning_rate));
  }
  return adamw ? AdamReach(options, rate, gradient, before) : SgdReach(options, update, gradient, before);
}

absl::Status CheckDecay(const OptimizerOptions& options, const Magnitudes& measured) {
  const auto spoils = [&](bool is_vector) {
    const double most = is_vector ? measured.vectors : measured.matrix;
    if (std::isfinite(most)) return false;
    return IsAdamW(options) ? !IsPlainKeep(KeepOf(options, is_vector)) : DecayOf(options, is_vector) > 0.0;
  };
  if (spoils(/*is_vector=*/true)) {
    return InvalidField("optimizer.decay_vectors",
                        "must be false while a bias, norm gain or norm shift of the head is infinite or NaN, "
                        "which such a decay would spoil",
                        "true");
  }
  if (!spoils(/*is_vector=*/false)) return absl::OkStatus();
  return InvalidField(
      IsAdamW(options) ? "optimizer.adamw.weight_decay" : "optimizer.sgd.weight_decay",
      "must be 0 while a weight of the head is infinite or NaN, which such a decay would spoil",
      absl::StrCat(options.weight_decay));
}

}  // namespace lossd::engine
