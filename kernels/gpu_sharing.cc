// SPDX-License-Identifier: Apache-2.0
#include "kernels/gpu_sharing.h"

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lossd::kernels {
namespace {

std::string FromEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// MPS knows two levels and takes everything but 1 for the first.
std::string PriorityText() {
  const bool below = FromEnvironment("CUDA_MPS_CLIENT_PRIORITY") == "1";
  return absl::StrCat("client priority ", below ? "1 (below normal)" : "0 (normal)");
}

// Of the multiprocessors; all of them unless the environment says otherwise.
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

}  // namespace lossd::kernels
