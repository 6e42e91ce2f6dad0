// SPDX-License-Identifier: Apache-2.0
// A library that is loaded at run time, so that programs start where it is missing.
//
// Driven by one thread.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_SHARED_LIBRARY_H_
#define LOSSD_KERNELS_CUDA_DEVICE_SHARED_LIBRARY_H_

#include <dlfcn.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::kernels::cuda {

class SharedLibrary {
 public:
  SharedLibrary() = default;
  ~SharedLibrary();
  SharedLibrary(const SharedLibrary&) = delete;
  SharedLibrary& operator=(const SharedLibrary&) = delete;

  // The first of these files that can be loaded. UNAVAILABLE with `message` and what is wrong with each.
  absl::Status Load(absl::Span<const char* const> names, absl::string_view message);

  // False if the library has no such function; dlerror() says so.
  template <typename Function>
  bool Find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(dlsym(file_, name));
    return function != nullptr;
  }

  // From now on the library stays when the object goes.
  void KeepLoaded() { file_ = nullptr; }

 private:
  void* file_ = nullptr;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_SHARED_LIBRARY_H_
