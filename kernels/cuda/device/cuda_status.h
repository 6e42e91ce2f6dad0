// SPDX-License-Identifier: Apache-2.0
// Helpers for calls of CUDA and of libraries that are loaded at run time. ToStatus makes an absl::Status with
// the name of the call, FindDriverFunction finds functions of CUDA's driver, and SharedLibrary loads a
// library. The program is not linked with the driver or these libraries, so it starts where they are missing.
//
// Functions are stateless and thread-safe. A SharedLibrary is driven by one thread.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_CUDA_STATUS_H_
#define LOSSD_KERNELS_CUDA_DEVICE_CUDA_STATUS_H_

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels::cuda {

// OK for success, RESOURCE_EXHAUSTED for a failed allocation, UNAVAILABLE for everything else, because the
// device's state is unknown afterwards.
inline absl::Status ToStatus(cudaError_t error, absl::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message =
      absl::StrCat(call, " failed: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::UnavailableError(message);
}

// Moves the value of `from` to `to`, or returns its status.
template <typename T>
absl::Status Take(absl::StatusOr<T> from, T& to) {
  if (!from.ok()) return from.status();
  to = *std::move(from);
  return absl::OkStatus();
}

}  // namespace lossd::kernels::cuda

// Returns the Status of a failed CUDA runtime call from the enclosing function.
#define LOSSD_RETURN_IF_CUDA_ERROR(call, name)                        \
  do {                                                                \
    if (cudaError_t lossd_error = (call); lossd_error != cudaSuccess) \
      return ::lossd::kernels::cuda::ToStatus(lossd_error, name);     \
  } while (false)

namespace lossd::kernels::cuda {

// Sets `function` to the driver's function of this name, in the form that CUDA `version` defines; null if the
// driver lacks it.
template <typename Function>
cudaError_t FindDriverFunction(const char* name, Function& function, unsigned version = 12000) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  const bool is_there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  function = is_there ? reinterpret_cast<Function>(found) : nullptr;
  return error;
}

// A library that is loaded at run time.
class SharedLibrary {
 public:
  SharedLibrary() = default;
  ~SharedLibrary() {
    if (file_ != nullptr) dlclose(file_);
  }
  SharedLibrary(const SharedLibrary&) = delete;
  SharedLibrary& operator=(const SharedLibrary&) = delete;

  // Loads the first of these files that can be loaded. UNAVAILABLE with `message` and the reason for each
  // file if none can.
  absl::Status Load(absl::Span<const char* const> names, absl::string_view message) {
    std::string reasons;
    for (const char* name : names) {
      file_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (file_ != nullptr) return absl::OkStatus();
      absl::StrAppend(&reasons, reasons.empty() ? "" : "; ", dlerror());
    }
    return absl::UnavailableError(absl::StrCat(message, ": ", reasons));
  }

  // False if the library has no such function; dlerror() says so.
  template <typename Function>
  bool Find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(dlsym(file_, name));
    return function != nullptr;
  }

  // The library stays loaded when the object is destroyed.
  void KeepLoaded() { file_ = nullptr; }

 private:
  void* file_ = nullptr;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_CUDA_STATUS_H_
