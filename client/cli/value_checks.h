// SPDX-License-Identifier: Apache-2.0
// What the value of an option may be. Each check returns "" for a value that may stand there, and else what
// it must be and what it is: `must be a whole number from 1 to 64, got "-3"`.
//
// Stateless and thread-safe.
#ifndef LOSSD_CLIENT_CLI_VALUE_CHECKS_H_
#define LOSSD_CLIENT_CLI_VALUE_CHECKS_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

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

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_VALUE_CHECKS_H_
