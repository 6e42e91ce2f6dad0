// SPDX-License-Identifier: Apache-2.0
// LoadKernelCode loads the code of this library's kernels in advance. Otherwise CUDA loads the code of a
// kernel at its first launch, and that call waits for all work on the GPU. In a process that a server shares
// with a trainer, such work may itself wait for the server: for example a collective of the trainer, which
// waits for a rank that waits for the head.
//
// Each source file with kernels uses LOSSD_KERNEL_FILE once, outside of namespaces, with a name that no other
// file uses. Thread-safe after the initialization of static objects.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_KERNEL_CODE_H_
#define LOSSD_KERNELS_CUDA_DEVICE_KERNEL_CODE_H_

#include <vector>

#include "absl/status/status.h"

namespace lossd::kernels::cuda {

// One kernel of each source file, by which the file's code is found.
inline std::vector<const void*>& KernelFiles() {
  static auto& files = *new std::vector<const void*>;
  return files;
}

// Registers a source file, by one of its kernels (LOSSD_KERNEL_FILE).
struct KernelFile {
  explicit KernelFile(const void* kernel) { KernelFiles().push_back(kernel); }
};

// Loads all kernels of all files for the current GPU, except those that are built only for other GPUs. Takes
// some milliseconds and the memory of the code. UNAVAILABLE if the driver is older than CUDA 12.4, or if
// loading fails.
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
