// SPDX-License-Identifier: Apache-2.0
#include "client/cli/value_checks.h"

#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::cli {

// ---- Checks ----

namespace {

struct Unit {
  absl::string_view name;
  double bytes;
};

constexpr double kKib = 1024.0;
constexpr Unit kByteUnits[] = {{"TiB", kKib* kKib* kKib* kKib},
                               {"GiB", kKib* kKib* kKib},
                               {"MiB", kKib* kKib},
                               {"KiB", kKib},
                               {"T", kKib* kKib* kKib* kKib},
                               {"G", kKib* kKib* kKib},
                               {"M", kKib* kKib},
                               {"K", kKib},
                               {"TB", 1e12},
                               {"GB", 1e9},
                               {"MB", 1e6},
                               {"KB", 1e3},
                               {"B", 1.0},
                               {"", 1.0}};

// SimpleAtoi passes over spaces around a number, which a shell has kept on purpose or by accident.
template <typename T>
bool IsWhole(const std::string& text, T* number) {
  return !text.empty() && !absl::ascii_isspace(static_cast<unsigned char>(text.front())) &&
         absl::SimpleAtoi(text, number);
}

}  // namespace

ValueCheck Rule(std::string rule, std::function<bool(const std::string&)> fits) {
  return [rule = std::move(rule), fits = std::move(fits)](const std::string& text) {
    return fits(text) ? std::string() : absl::StrCat("must ", rule, ", got \"", text, "\"");
  };
}

ValueCheck WholeNumberOfAnySign() {
  return Rule("be a whole number", [](const std::string& text) {
    int64_t number = 0;
    return IsWhole(text, &number);
  });
}

ValueCheck WholeNumber(uint64_t least, uint64_t most) {
  const bool bounded = most != std::numeric_limits<uint64_t>::max();
  const std::string rule = bounded ? absl::StrCat("be a whole number from ", least, " to ", most)
                                   : absl::StrCat("be a whole number from ", least, " to 2^64 - 1");
  return Rule(rule, [least, most](const std::string& text) {
    uint64_t number = 0;
    return IsWhole(text, &number) && number >= least && number <= most;
  });
}

ValueCheck AnyNumber() {
  return Rule("be a number", [](const std::string& text) {
    double number = 0;
    return absl::SimpleAtod(text, &number);
  });
}

ValueCheck NumberFromTo(double least, double most) {
  return Rule(absl::StrFormat("be a number from %g to %g", least, most), [least, most](const auto& text) {
    double number = 0;
    return absl::SimpleAtod(text, &number) && number >= least && number <= most;
  });
}

ValueCheck NumberAboveZero() {
  return Rule("be a number above 0", [](const std::string& text) {
    double number = 0;
    return absl::SimpleAtod(text, &number) && number > 0 && std::isfinite(number);
  });
}

ValueCheck NumberOfBytes() {
  return Rule("be a number of bytes such as 4096, 64KiB or 2GiB",
              [](const std::string& text) { return ParseBytes(text).has_value(); });
}

ValueCheck NotEmpty() {
  return [](const std::string& text) { return text.empty() ? "must not be empty" : std::string(); };
}

std::optional<uint64_t> ParseBytes(absl::string_view text) {
  const size_t digits = text.find_last_of("0123456789.") + 1;  // 0 if there are none
  const absl::string_view name = absl::StripAsciiWhitespace(text.substr(digits));
  double number = 0.0;
  const bool is_number = absl::SimpleAtod(text.substr(0, digits), &number) &&
                         text.find_first_of("xX+-") == text.npos &&
                         text.substr(0, digits).find_first_of("eE") == text.npos;
  for (const Unit& unit : kByteUnits) {
    if (!is_number || !absl::EqualsIgnoreCase(name, unit.name)) continue;
    const double bytes = std::round(number * unit.bytes);
    if (!(bytes >= 0.0 && bytes < 0x1p62)) return std::nullopt;
    return static_cast<uint64_t>(bytes);
  }
  return std::nullopt;
}

// ---- Words of enumerations ----

const std::map<std::string, v1::DType>& DTypes() {
  static const auto* words = new std::map<std::string, v1::DType>{
      {"fp32", v1::DTYPE_FP32}, {"fp16", v1::DTYPE_FP16}, {"bf16", v1::DTYPE_BF16}};
  return *words;
}

const std::map<std::string, v1::Norm>& Norms() {
  static const auto* words = new std::map<std::string, v1::Norm>{
      {"none", v1::NORM_NONE}, {"layernorm", v1::NORM_LAYERNORM}, {"rmsnorm", v1::NORM_RMSNORM}};
  return *words;
}

const std::map<std::string, v1::OptimizerState>& OptimizerStates() {
  static const auto* words =
      new std::map<std::string, v1::OptimizerState>{{"none", v1::OPTIMIZER_STATE_NONE},
                                                    {"momentum", v1::OPTIMIZER_STATE_MOMENTUM},
                                                    {"adam", v1::OPTIMIZER_STATE_ADAM}};
  return *words;
}

const std::map<std::string, v1::Param>& Params() {
  static const auto* words = new std::map<std::string, v1::Param>{{"weight", v1::PARAM_WEIGHT},
                                                                  {"bias", v1::PARAM_BIAS},
                                                                  {"norm-gain", v1::PARAM_NORM_GAIN},
                                                                  {"norm-shift", v1::PARAM_NORM_SHIFT},
                                                                  {"class-weights", v1::PARAM_CLASS_WEIGHTS}};
  return *words;
}

const std::map<std::string, v1::Role>& Roles() {
  static const auto* words = new std::map<std::string, v1::Role>{{"value", v1::ROLE_VALUE},
                                                                 {"gradient", v1::ROLE_GRADIENT},
                                                                 {"moment1", v1::ROLE_MOMENT1},
                                                                 {"moment2", v1::ROLE_MOMENT2}};
  return *words;
}

const std::map<std::string, v1::Logits>& LogitsWords() {
  static const auto* words = new std::map<std::string, v1::Logits>{{"stored", v1::LOGITS_STORED},
                                                                   {"recomputed", v1::LOGITS_RECOMPUTED}};
  return *words;
}

const std::map<std::string, v1::Split>& Splits() {
  static const auto* words = new std::map<std::string, v1::Split>{
      {"any", v1::SPLIT_UNSPECIFIED}, {"rows", v1::SPLIT_ROWS}, {"vocabulary", v1::SPLIT_VOCABULARY}};
  return *words;
}

const std::map<std::string, v1::Gradients>& GradientsWords() {
  static const auto* words = new std::map<std::string, v1::Gradients>{{"exact", v1::GRADIENTS_EXACT},
                                                                      {"filtered", v1::GRADIENTS_FILTERED},
                                                                      {"sampled", v1::GRADIENTS_SAMPLED},
                                                                      {"auto", v1::GRADIENTS_AUTO}};
  return *words;
}

const std::map<std::string, v1::Reduction>& Reductions() {
  static const auto* words = new std::map<std::string, v1::Reduction>{
      {"sum", v1::REDUCTION_SUM}, {"none", v1::REDUCTION_NONE}, {"mean", v1::REDUCTION_MEAN}};
  return *words;
}

}  // namespace lossd::cli
