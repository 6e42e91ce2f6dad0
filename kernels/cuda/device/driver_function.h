// SPDX-License-Identifier: Apache-2.0
// Functions of CUDA's driver, found at run time: nothing links the driver, so that programs start without it.
//
// Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_DRIVER_FUNCTION_H_
#define LOSSD_KERNELS_CUDA_DEVICE_DRIVER_FUNCTION_H_

#include <cuda_runtime_api.h>

namespace lossd::kernels::cuda {

// Sets `function` to the driver's function of this name as CUDA 12.0 has it; null if the driver lacks it.
template <typename Function>
cudaError_t FindDriverFunction(const char* name, Function& function) {
  constexpr unsigned kVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
  const bool is_there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  function = is_there ? reinterpret_cast<Function>(found) : nullptr;
  return error;
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_DRIVER_FUNCTION_H_
