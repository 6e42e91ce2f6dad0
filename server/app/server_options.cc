// SPDX-License-Identifier: Apache-2.0
// Parses sizes, and sets options by their names (server_options.h).
#include "server/app/server_options.h"

#include <map>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/flags/marshalling.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::app {

bool AbslParseFlag(absl::string_view text, FileMode* mode, std::string* error) {
  mode->bits = 0;
  bool right = !text.empty() && text.size() <= 4;
  for (const char digit : text) {
    right = right && digit >= '0' && digit <= '7';
    mode->bits = mode->bits * 8 + static_cast<uint32_t>(digit - '0');
  }
  if (right && mode->bits <= 0777) return true;
  *error = "must be octal digits, at most 0777, as in 0660";
  return false;
}

std::string AbslUnparseFlag(FileMode mode) { return absl::StrFormat("0%o", mode.bits); }

bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  const std::optional<int64_t> bytes = errors::ParseBytes(text);
  if (!bytes.has_value()) {
    *error = "must be a number of bytes such as 4096, 64KiB or 2GiB";
    return false;
  }
  size->bytes = *bytes;
  return true;
}

std::string AbslUnparseFlag(const ByteSize& size) {
  constexpr std::pair<absl::string_view, int> kUnits[] = {{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}};
  for (const auto& [unit, shift] : kUnits) {
    const int64_t whole = size.bytes >> shift;
    if (whole != 0 && size.bytes == whole << shift) return absl::StrCat(whole, unit);
  }
  return absl::StrCat(size.bytes);
}

namespace {

// Parses the text and sets the field. If the text is wrong, returns false and sets `error`.
template <typename Type, typename Field>
bool SetField(absl::string_view text, Field* field, std::string* error) {
  Type value{*field};
  if (!absl::ParseFlag(text, &value, error)) {
    if (std::is_same_v<Type, absl::Duration> && error->empty())
      *error = "must be a duration such as 30s or 2m";
    return false;
  }
  *field = FieldOf(value);
  return true;
}

using Set = bool (*)(absl::string_view text, ServerOptions* options, std::string* error);

const std::map<absl::string_view, Set>& Setters() {
  static const auto* const setters = new std::map<absl::string_view, Set>({
#define LOSSD_OPTION(type, name, field, help)                                      \
  {#name, [](absl::string_view text, ServerOptions* options, std::string* error) { \
     return SetField<type>(text, &options->field, error);                          \
   }},
#define LOSSD_RANK_OPTION(type, name, field, help) LOSSD_OPTION(type, name, ranks.field, help)
#include "server/app/option_table.inc"
  });
  return *setters;
}

}  // namespace

absl::Status SetOption(absl::string_view name, absl::string_view text, ServerOptions* options) {
  const auto setter = Setters().find(name);
  if (setter == Setters().end())
    return absl::InvalidArgumentError(
        absl::StrCat("there is no option ", name, "; lossd --help lists those of the server"));
  if (std::string error; !setter->second(text, options, &error)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is \"", text, "\"", error.empty() ? ", which it cannot be" : "; it ", error));
  }
  return absl::OkStatus();
}

}  // namespace lossd::app
