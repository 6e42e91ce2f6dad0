// SPDX-License-Identifier: Apache-2.0
// Finds the GPUs that a user names, and reads the environment of MPS and NCCL (device_choice.h).
#include "kernels/device_choice.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
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

absl::StatusOr<std::vector<int>> FindGpus(absl::string_view devices, absl::Span<const std::string> uuids) {
  std::vector<int> found;
  if (devices == "all") {
    for (size_t i = 0; i < uuids.size(); ++i) found.push_back(static_cast<int>(i));
    return found;
  }
  for (const absl::string_view part : absl::StrSplit(devices, ',')) {
    const absl::string_view device = absl::StripAsciiWhitespace(part);
    const absl::StatusOr<int> gpu = FindGpu(device, uuids);
    if (!gpu.ok()) {
      return errors::FieldError(
          "devices",
          absl::StrCat("be \"all\", or GPUs with commas between them (", gpu.status().message(), ")"),
          devices);
    }
    if (std::find(found.begin(), found.end(), *gpu) != found.end()) {
      return errors::FieldError(
          "devices", absl::StrCat("name each GPU once (", device, " is number ", *gpu, ")"), devices);
    }
    found.push_back(*gpu);
  }
  return found;
}

absl::Status CheckAlike(absl::Span<const std::string> descriptions) {
  const auto kind = [](absl::string_view description) {
    return description.substr(std::min(description.find(' '), description.size()));
  };
  for (const std::string& description : descriptions) {
    if (kind(description) == kind(descriptions.front())) continue;
    return errors::FieldError("devices", absl::StrCat("be alike, as ", descriptions.front()), description);
  }
  return absl::OkStatus();
}

namespace {

std::string FromEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// MPS has two priorities. Every value but 1 means the first one.
std::string PriorityText() {
  const bool below = FromEnvironment("CUDA_MPS_CLIENT_PRIORITY") == "1";
  return absl::StrCat("client priority ", below ? "1 (below normal)" : "0 (normal)");
}

// The share of the multiprocessors that the environment sets; empty if it is all of them.
std::string ShareText() {
  float percent = 100.0f;
  const std::string value = FromEnvironment("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
  if (!absl::SimpleAtof(value, &percent) || !(percent > 0.0f && percent < 100.0f)) return "";
  return absl::StrCat(", ", percent, " % of the multiprocessors");
}

}  // namespace

std::string GpuSharing(bool mps) {
  return mps ? absl::StrCat("MPS, ", PriorityText(), ShareText()) : "time slices";
}

void SetNcclDefaults() {
  if (std::getenv(kNcclMulticast) == nullptr) setenv(kNcclMulticast, "0", /*overwrite=*/0);
}

std::string NcclMulticast() {
  const char* const value = std::getenv(kNcclMulticast);
  return value == nullptr ? "" : value;
}

}  // namespace lossd::kernels
