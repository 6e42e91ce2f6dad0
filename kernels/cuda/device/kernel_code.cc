// SPDX-License-Identifier: Apache-2.0
// LoadKernelCode (kernel_code.h), by functions of the driver.
#include "kernels/cuda/device/kernel_code.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda {
namespace {

constexpr unsigned kFirstVersion = 12040;  // the first version of CUDA whose driver can load a function

struct CodeDriver {
  decltype(&cuFuncGetModule) module_of = nullptr;
  decltype(&cuModuleGetFunctionCount) count = nullptr;
  decltype(&cuModuleEnumerateFunctions) enumerate = nullptr;
  decltype(&cuFuncLoad) load = nullptr;

  bool Find() {
    FindDriverFunction("cuFuncGetModule", module_of, kFirstVersion);
    FindDriverFunction("cuModuleGetFunctionCount", count, kFirstVersion);
    FindDriverFunction("cuModuleEnumerateFunctions", enumerate, kFirstVersion);
    FindDriverFunction("cuFuncLoad", load, kFirstVersion);
    return module_of != nullptr && count != nullptr && enumerate != nullptr && load != nullptr;
  }
};

absl::Status CodeStatus(CUresult result, absl::string_view call) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(call, " failed: ", static_cast<int>(result)));
}

// Loads all kernels of the source file that `kernel` is in. The driver knows them as the functions of one
// module.
absl::Status LoadFile(const CodeDriver& driver, const void* kernel) {
  cudaFunction_t function = nullptr;
  const cudaError_t error = cudaGetFuncBySymbol(&function, kernel);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();  // the file is for other GPUs
    return absl::OkStatus();
  }
  LOSSD_RETURN_IF_CUDA_ERROR(error, "cudaGetFuncBySymbol");
  CUmodule module = nullptr;
  LOSSD_RETURN_IF_ERROR(CodeStatus(driver.module_of(&module, function), "cuFuncGetModule"));
  unsigned count = 0;
  LOSSD_RETURN_IF_ERROR(CodeStatus(driver.count(&count, module), "cuModuleGetFunctionCount"));
  std::vector<CUfunction> functions(count);
  LOSSD_RETURN_IF_ERROR(
      CodeStatus(driver.enumerate(functions.data(), count, module), "cuModuleEnumerateFunctions"));
  for (const CUfunction each : functions) {
    LOSSD_RETURN_IF_ERROR(CodeStatus(driver.load(each), "cuFuncLoad"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status LoadKernelCode() {
  CodeDriver driver;
  if (!driver.Find()) {
    cudaGetLastError();
    return absl::UnavailableError(
        "device: a server in a process of other work needs a driver of CUDA 12.4 or later");
  }
  for (const void* kernel : KernelFiles()) LOSSD_RETURN_IF_ERROR(LoadFile(driver, kernel));
  return absl::OkStatus();
}

}  // namespace lossd::kernels::cuda
