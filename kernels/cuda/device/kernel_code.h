// SPDX-License-Identifier: Apache-2.0
// Loads the code of this library's kernels before it is needed. CUDA otherwise loads the code of a kernel at
// its first launch, and that call waits for all work that is on the GPU. In a process that a server shares
// with a trainer, such work may itself wait for the server: a collective of the trainer, for a rank that
// waits for the head.
//
// Each source file with kernels says LOSSD_KERNEL_FILE once, outside of namespaces, with a name that no other
// file has. Thread-safe once static objects have been made.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_KERNEL_CODE_H_
#define LOSSD_KERNELS_CUDA_DEVICE_KERNEL_CODE_H_

#include <vector>

#include "absl/status/status.h"

namespace lossd::kernels::cuda {

// A kernel of each file.
inline std::vector<const void*>& KernelFiles() {
  static auto& files = *new std::vector<const void*>;
  return files;
}

struct KernelFile {
  explicit KernelFile(const void* kernel) { KernelFiles().push_back(kernel); }
};

// Loads all kernels of all files for the current GPU; those that are built for other GPUs alone stay. Takes
// some milliseconds and the memory of the code. UNAVAILABLE with a driver of before CUDA 12.4, or if it
// fails.
absl::Status LoadKernelCode();

}  // namespace lossd::kernels::cuda

#define LOSSD_KERNEL_FILE(name)                                              \
  namespace lossd::kernels::cuda::kernel_files {                             \
  namespace {                                                                \
  __global__ void name##Kernel() {}                                          \
  const KernelFile name##File(reinterpret_cast<const void*>(&name##Kernel)); \
  }                                                                          \
  }

#endif  // LOSSD_KERNELS_CUDA_DEVICE_KERNEL_CODE_H_
