// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/cuda_status.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace lossd::kernels::cuda {

SharedLibrary::~SharedLibrary() {
  if (file_ != nullptr) dlclose(file_);
}

absl::Status SharedLibrary::Load(absl::Span<const char* const> names, absl::string_view message) {
  std::string reasons;
  for (const char* name : names) {
    file_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (file_ != nullptr) return absl::OkStatus();
    absl::StrAppend(&reasons, reasons.empty() ? "" : "; ", dlerror());
  }
  return absl::UnavailableError(absl::StrCat(message, ": ", reasons));
}

}  // namespace lossd::kernels::cuda
