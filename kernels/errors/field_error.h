// SPDX-License-Identifier: Apache-2.0
// Errors that name the wrong field (FieldError), and functions for the texts in errors.
//
// A field error is an absl::Status with a message for people. Its payload, a FieldViolation, has the same
// content for programs, which never parse the message.
//
//   // "softcap must be 0 or > 0, got -1"
//   return errors::FieldError("softcap", "be 0 or > 0", options.softcap);
//
// Each layer names fields as it knows them. A layer above that knows the path to these fields adds it:
//
//   // "open.options.softcap must be ..."
//   return errors::Within("open.options.", kernels::Validate(options));
//
// Fields and values may hold any bytes. They are shortened to kMaxFieldBytes and kMaxValueBytes, in the
// payload and in the message, and never within a UTF-8 character.
//
// Checks of the values of rows are also here, because client and server use them and must report the same
// errors.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_KERNELS_ERRORS_FIELD_ERROR_H_
#define LOSSD_KERNELS_ERRORS_FIELD_ERROR_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::errors {

inline constexpr size_t kMaxFieldBytes = 300;
inline constexpr size_t kMaxValueBytes = 300;

struct FieldViolation {
  std::string field;  // the path of the field, e.g. "open.targets[17]"
  // The message about the field, e.g. "must be finite" or "repeats row 3".
  std::string rule;
  std::string value;  // the value that was found, as text
  friend bool operator==(const FieldViolation&, const FieldViolation&) = default;
};

// The error "<field> must <rule>, got <value>". An empty value is shown as "".
absl::Status FieldError(absl::string_view field, absl::string_view rule, const absl::AlphaNum& value,
                        absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// The error "<field> <problem>, got <value>", for problems that need other words than "must": "slice.rows
// repeats row 3, got [3, 6)".
absl::Status FieldProblem(absl::string_view field, absl::string_view problem, const absl::AlphaNum& value,
                          absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// `status` with its own message and this violation, replacing an earlier one. For errors whose message has
// another form: errors of files, for example, name the file first. An OK status stays OK.
absl::Status WithViolation(absl::Status status, const FieldViolation& violation);

// The violation of a status; nullopt if it has none.
std::optional<FieldViolation> GetFieldViolation(const absl::Status& status);

// ---- Values of rows. The client checks them before it sends them, and the server when they arrive ----

// The error "<field>[i] must be finite" for the first value that is not finite; OK if all are.
absl::Status CheckFinite(absl::string_view field, absl::Span<const float> values);

// The error "<field>[index] must be in [0, count)", followed by `also`.
absl::Status ClassError(absl::string_view field, size_t index, int64_t value, int64_t count,
                        absl::string_view also);

// ClassError unless `value` is in [0, count). Inline, because every row is checked.
inline absl::Status CheckClass(absl::string_view field, size_t index, int64_t value, int64_t count,
                               absl::string_view also = "") {
  if (value >= 0 && value < count) return absl::OkStatus();
  return ClassError(field, index, value, count, also);
}

// The rule for the sum of a row's soft target weights. The sum must also be a finite float.
enum class WeightSum { kAny, kAboveZero, kAtMostOne };
// With kAtMostOne, the sum may exceed 1 by this much.
inline constexpr double kMostOverOne = 1e-3;
// The class of an entry that names no class. Its weight is 0.
inline constexpr int32_t kNoClass = -1;

// Checks the soft targets of rows:
// - each of `classes` [rows, each] is in [0, vocab_size) or kNoClass;
// - each of `weights` [rows, each] is finite and >= 0, and 0 for kNoClass;
// - the sum of a row's weights obeys `rule`, unless the row's entry in `targets` [rows] is `ignored`.
// The error names "<prefix>target_classes[i]" or "<prefix>target_weights[i]". For a sum it names the row's
// first weight.
absl::Status CheckSoftTargets(absl::string_view prefix, WeightSum rule, int64_t vocab_size, size_t each,
                              absl::Span<const int32_t> classes, absl::Span<const float> weights,
                              absl::Span<const int32_t> targets, int32_t ignored);

// Puts `prefix`, e.g. "open.options.", before the field: in the payload, and in the message if it begins with
// the field. Code and other payloads stay. A status without a violation is returned unchanged.
absl::Status Within(absl::string_view prefix, absl::Status status);

// Shortened and ValidUtf8 make text for people from arbitrary bytes: names that clients sent, file names,
// contents of files.

// `text` if it has at most `limit` bytes. Otherwise its beginning and "...", together at most `limit` bytes,
// never cut within a UTF-8 character. `limit` is at least 3. Bytes that are not UTF-8 stay as they are.
std::string Shortened(absl::string_view text, size_t limit);

// `text` with the replacement character U+FFFD (three bytes) in place of every byte that is not part of a
// valid UTF-8 character. Overlong forms, surrogates and code points above U+10FFFF are not valid.
std::string ValidUtf8(absl::string_view text);

// HumanBytes and ExactBytes write numbers of bytes for people: HumanBytes in a readable unit, ExactBytes also
// exactly, for values that people calculate with. ParseBytes reads numbers that people write. Units are
// binary. In messages, FieldError shows the value of a field "..._bytes" as ExactBytes: "got 8388608 bytes
// (8.00 MiB)".

// From this number on, ExactBytes adds the value in a larger unit.
inline constexpr int64_t kManyBytes = 10'000;

// Three significant digits: "17 B", "1.50 GiB".
std::string HumanBytes(double bytes);

// "4096 bytes", or from kManyBytes on "1610612736 bytes (1.50 GiB)".
std::string ExactBytes(int64_t bytes);
std::string ExactBytes(uint64_t bytes);

// Parses "4096", "64KiB" or "1.5 gb": a number, possibly with a fraction, and a unit in upper or lower case.
// Units are B (or none), KiB, MiB, GiB, TiB, and KB, MB, GB, TB (powers of 1000). The result is rounded.
// nullopt for other texts, and for 2^62 bytes or more.
std::optional<int64_t> ParseBytes(absl::string_view text);

// SetTexts and GetTexts keep a list of texts in a payload of an absl::Status. Each text is stored as its
// length and its bytes, so a text may hold any bytes. Such payloads must not leave the process, because
// lengths are in the byte order of the machine.

// Attaches the texts under the type URL `type`, and replaces earlier ones. Has no effect on an OK status.
void SetTexts(absl::string_view type, absl::Span<const std::string> texts, absl::Status* status);

// The texts that SetTexts has attached; nullopt if `status` has no such payload, or if its bytes are not such
// a list.
std::optional<std::vector<std::string>> GetTexts(absl::string_view type, const absl::Status& status);

// `status` with another message and the same code and payloads.
absl::Status WithMessage(const absl::Status& status, absl::string_view message);

}  // namespace lossd::errors

#endif  // LOSSD_KERNELS_ERRORS_FIELD_ERROR_H_
