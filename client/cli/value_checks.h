// SPDX-License-Identifier: Apache-2.0
// What the value of an option may be: checks of numbers and texts, and the words for the protocol's
// enumerations. Each check returns "" for a value that may stand there, and otherwise what it must be and
// what it is: `must be a whole number from 1 to 64, got "-3"`.
//
// Stateless and thread-safe.
#ifndef LOSSD_CLIENT_CLI_VALUE_CHECKS_H_
#define LOSSD_CLIENT_CLI_VALUE_CHECKS_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::cli {

using ValueCheck = std::function<std::string(const std::string&)>;

// A number without a fraction, in [least, most].
ValueCheck WholeNumber(uint64_t least = 0, uint64_t most = std::numeric_limits<uint64_t>::max());
ValueCheck WholeNumberOfAnySign();
// Whatever the field takes: infinite ones and "nan" are left to the field's own rule.
ValueCheck AnyNumber();
// Finite, and in [least, most] or above 0.
ValueCheck NumberFromTo(double least, double most);
ValueCheck NumberAboveZero();

// Any number of bytes that fits: see ParseBytes.
ValueCheck NumberOfBytes();
ValueCheck NotEmpty();

// `rule` is what follows "must", e.g. "be BEGIN:END"; `fits` says whether a value keeps to it.
ValueCheck Rule(std::string rule, std::function<bool(const std::string&)> fits);

// A number, possibly with a fraction, and one of the units B, KiB, MiB, GiB, TiB (1024 each; the "iB" may be
// left out) or KB, MB, GB, TB (1000 each), in any case; without a unit: bytes. lossd's flags take the same,
// but for K, M, G and T. Nullopt for anything else, a negative number, or one from 2^62 on.
std::optional<uint64_t> ParseBytes(absl::string_view text);

// The words for the protocol's enumerations, as printed, as in JSON and as taken by flags.
const std::map<std::string, v1::DType>& DTypes();                    // fp32, fp16, bf16
const std::map<std::string, v1::Norm>& Norms();                      // none, layernorm, rmsnorm
const std::map<std::string, v1::OptimizerState>& OptimizerStates();  // none, momentum, adam
const std::map<std::string, v1::Param>& Params();                    // weight, bias, norm-gain, ...
const std::map<std::string, v1::Role>& Roles();                      // value, gradient, moment1, moment2
const std::map<std::string, v1::Logits>& LogitsWords();              // stored, recomputed
const std::map<std::string, v1::Split>& Splits();                    // any, rows, vocabulary
const std::map<std::string, v1::Gradients>& GradientsWords();        // exact, filtered, sampled, auto
const std::map<std::string, v1::Reduction>& Reductions();            // sum, mean, none

// The word for a value; "unspecified" for one without.
template <typename E>
std::string NameOf(const std::map<std::string, E>& words, E value) {
  for (const auto& [word, meaning] : words) {
    if (meaning == value) return word;
  }
  return "unspecified";
}

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_VALUE_CHECKS_H_
