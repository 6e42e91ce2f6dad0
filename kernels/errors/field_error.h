// SPDX-License-Identifier: Apache-2.0
// Errors that name the field at fault, and the text that goes into errors.
//
// A field error is an absl::Status whose message is for people and whose payload, a FieldViolation, says the
// same to programs. No program reads the message.
//
//   // "softcap must be 0 or > 0, got -1"
//   return errors::FieldError("softcap", "be 0 or > 0", options.softcap);
//
// A layer names fields as it knows them. A layer that knows where they came from adds the path:
//
//   // "open.options.softcap must be ..."
//   return errors::Within("open.options.", kernels::Validate(options));
//
// Fields and values may hold any bytes. They are shortened to kMaxFieldBytes and kMaxValueBytes, in the
// payload and in the message, and never within a UTF-8 character.
//
// Checks of the values of rows are here, too: client and server say the same of them.
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
  std::string field;  // path of the field, e.g. "open.targets[17]"
  std::string rule;   // what the message says of the field, e.g. "must be finite" or "repeats row 3"
  std::string value;  // what was found there, as text
  friend bool operator==(const FieldViolation&, const FieldViolation&) = default;
};

// "<field> must <rule>, got <value>"; an empty value is shown as "".
absl::Status FieldError(absl::string_view field, absl::string_view rule, const absl::AlphaNum& value,
                        absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// "<field> <problem>, got <value>", for what is not said with "must": "slice.rows repeats row 3, got [3, 6)".
absl::Status FieldProblem(absl::string_view field, absl::string_view problem, const absl::AlphaNum& value,
                          absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// `status` with its own message and this violation, replacing an earlier one. For errors whose message has
// another form, e.g. those of files, which name the file first. An OK status stays OK.
absl::Status WithViolation(absl::Status status, const FieldViolation& violation);

// The field at fault; nullopt if the status names none.
std::optional<FieldViolation> GetFieldViolation(const absl::Status& status);

// ---- values of rows, which the client checks before it sends them, and the server when they come ----

// "<field>[i] must be finite" of the first value that is not.
absl::Status CheckFinite(absl::string_view field, absl::Span<const float> values);

// "<field>[index] must be in [0, count)", and `also` behind it.
absl::Status ClassError(absl::string_view field, size_t index, int64_t value, int64_t count,
                        absl::string_view also);

// That error, unless `value` is in [0, count). Inline, as every row is checked.
inline absl::Status CheckClass(absl::string_view field, size_t index, int64_t value, int64_t count,
                               absl::string_view also = "") {
  if (value >= 0 && value < count) return absl::OkStatus();
  return ClassError(field, index, value, count, also);
}

// What the weights of a row with soft targets add up to; always a finite float.
enum class WeightSum { kAny, kAboveZero, kAtMostOne };
// kAtMostOne: by how much the sum may be above 1.
inline constexpr double kMostOverOne = 1e-3;
// Of an entry that names no class; its weight is 0.
inline constexpr int32_t kNoClass = -1;

// Unless each of `classes` [rows, each] is in [0, vocab_size) or kNoClass, each of `weights` [rows, each] is
// finite, >= 0, and 0 at kNoClass, and the weights of rows whose `targets` [rows] entry is not `ignored` add
// up to such a sum. The error names "<prefix>target_classes[i]" or "<prefix>target_weights[i]"; of a sum the
// row's first weight.
absl::Status CheckSoftTargets(absl::string_view prefix, WeightSum rule, int64_t vocab_size, size_t each,
                              absl::Span<const int32_t> classes, absl::Span<const float> weights,
                              absl::Span<const int32_t> targets, int32_t ignored);

// Puts `prefix`, e.g. "open.options.", before the field, in the payload and where the message begins with the
// field. Code and other payloads stay. A status without a violation stays as it is.
absl::Status Within(absl::string_view prefix, absl::Status status);

// Shortened and ValidUtf8 make text for people out of bytes that may be anything: names that clients sent,
// file names, contents of files.

// `text` if it has at most `limit` bytes, else its beginning and "..." in at most `limit` bytes. The cut is
// never within a UTF-8 character. `limit` is at least 3; bytes that are not UTF-8 stay as they are.
std::string Shortened(absl::string_view text, size_t limit);

// `text` with the replacement character U+FFFD (three bytes) in place of every byte that is not part of a
// valid UTF-8 character. Overlong forms, surrogates and code points above U+10FFFF are not valid.
std::string ValidUtf8(absl::string_view text);

// HumanBytes and ExactBytes write numbers of bytes for people: in a unit that can be read, and exactly where
// somebody may have to calculate with them. ParseBytes reads what people write. Units are binary. FieldError
// shows the value of a field
// "..._bytes" as ExactBytes in its message: "got 8388608 bytes (8.00 MiB)".

// Below this, the number itself says as much as one in a larger unit.
inline constexpr int64_t kManyBytes = 10'000;

// "17 B", "1.50 GiB": three significant digits.
std::string HumanBytes(double bytes);

// "4096 bytes", "1610612736 bytes (1.50 GiB)": the second from kManyBytes on.
std::string ExactBytes(int64_t bytes);
std::string ExactBytes(uint64_t bytes);

// The bytes of "4096", "64KiB", "1.5 gb": a number, perhaps with a point, and a unit in letters of either
// case: B or none, KiB, MiB, GiB, TiB, or KB, MB, GB, TB (powers of 1000). Rounded; nullopt for other texts
// and for 2^62 bytes or more.
std::optional<int64_t> ParseBytes(absl::string_view text);

// SetTexts and GetTexts keep a list of texts in a payload of an absl::Status. Each text is stored as its
// length and its bytes, so a text may hold any bytes. Such payloads never leave the process: lengths are in
// the byte order of the machine.

// Attaches the texts under the type URL `type`, replacing earlier ones. No effect on an OK status.
void SetTexts(absl::string_view type, absl::Span<const std::string> texts, absl::Status* status);

// What SetTexts attached; nullopt if `status` has no such payload or its bytes are not such a list.
std::optional<std::vector<std::string>> GetTexts(absl::string_view type, const absl::Status& status);

// `status` with another message and the same code and payloads.
absl::Status WithMessage(const absl::Status& status, absl::string_view message);

}  // namespace lossd::errors

#endif  // LOSSD_KERNELS_ERRORS_FIELD_ERROR_H_
