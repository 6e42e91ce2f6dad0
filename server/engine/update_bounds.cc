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
constexpr double kModerate = 1e18;  // whose square is a float still
constexpr double kFar = 1e20;       // a change that takes 1e18 steps to leave the range of a float

bool IsAdamW(const OptimizerOptions& options) { return options.kind == OptimizerOptions::Kind::kAdamW; }

absl::Status TooLarge(absl::string_view field, absl::string_view what, double value) {
  return InvalidField(field, absl::StrCat("must be a number that fp32 has", what), absl::StrCat(value));
}

// What AdamW multiplies the quotient of the moments with.
double RateOf(const OptimizerOptions& options, int64_t update) {
  if (!IsAdamW(options)) return options.learning_rate;
  return options.learning_rate / (1.0 - std::pow(options.beta1, static_cast<double>(update)));
}

// The most that |m| / sqrt(v) can be if both moments had these decay rates always: by Cauchy's inequality.
double MostQuotient(const OptimizerOptions& options) {
  const double ratio = options.beta1 * options.beta1 / options.beta2;
  if (options.beta2 == 0.0) return options.beta1 == 0.0 ? 1.0 : std::numeric_limits<double>::infinity();
  if (ratio >= 1.0) return std::numeric_limits<double>::infinity();
  return (1.0 - options.beta1) / std::sqrt((1.0 - options.beta2) * (1.0 - ratio));
}

bool IsBoundedAdamW(const OptimizerOptions& options, double rate, double gradient) {
  const double epsilon = static_cast<float>(options.epsilon);
  return gradient <= kModerate && epsilon > 0.0 && rate / epsilon <= kFar / 10.0 &&
         rate * MostQuotient(options) <= kFar && options.learning_rate * options.weight_decay <= 1.0;
}

bool IsBoundedSgd(const OptimizerOptions& options, double gradient) {
  return options.learning_rate * gradient <= kFar && gradient <= kModerate &&
         options.learning_rate * options.weight_decay <= 1.0 && options.momentum <= 1.0 &&
         std::abs(1.0 - options.dampening) <= 1.0;
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

absl::Status CheckReach(const OptimizerOptions& options, int64_t update, double norm, UpdateReach* reach) {
  const bool adamw = IsAdamW(options);
  const double gradient = std::abs(options.grad_multiplier) * norm;
  const double rate = RateOf(options, update);
  const double most_gradient = adamw ? std::sqrt(kMostFloat) : kMostFloat;
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
  const bool bounded = adamw ? IsBoundedAdamW(options, rate, gradient) : IsBoundedSgd(options, gradient);
  *reach = bounded ? UpdateReach::kBounded : UpdateReach::kUnknown;
  return absl::OkStatus();
}

}  // namespace lossd::engine
