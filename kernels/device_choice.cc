#include "kernels/device_choice.h"

#include <cstddef>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {

std::string GpuUuidText(absl::Span<const char> bytes) {
  const std::string hex = absl::BytesToHexString(absl::string_view(bytes.data(), bytes.size()));
  const absl::string_view text = hex;
  return absl::StrCat("GPU-", absl::StrJoin({text.substr(0, 8), text.substr(8, 4), text.substr(12, 4),
                                             text.substr(16, 4), text.substr(20)},
                                            "-"));
}

absl::StatusOr<int> FindGpu(absl::string_view device, absl::Span<const std::string> uuids) {
  int index = 0;
  if (absl::SimpleAtoi(device, &index)) {
    if (index >= 0 && index < static_cast<int>(uuids.size())) return index;
    return errors::FieldError(
        "device", absl::StrCat("be in [0, ", uuids.size(), ") (GPUs found: ", uuids.size(), ")"), device);
  }
  constexpr size_t kLeastLength = 5;
  int found = -1;
  int matches = 0;
  for (size_t i = 0; i < uuids.size() && device.size() >= kLeastLength; ++i) {
    if (!absl::StartsWithIgnoreCase(uuids[i], device)) continue;
    found = static_cast<int>(i);
    ++matches;
  }
  if (matches == 1) return found;
  return errors::FieldError(
      "device",
      absl::StrCat("be the index of a GPU or the beginning of the UUID of one of these: ",
                   absl::StrJoin(uuids, ", ")),
      device);
}

}  // namespace lossd::kernels
