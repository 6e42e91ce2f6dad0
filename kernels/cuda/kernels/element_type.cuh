// SPDX-License-Identifier: Apache-2.0
// The element type of a matrix, known when the program runs, as a template argument of a kernel. Host code.
//
// The file is shorter than 60 lines because launchers of four folders include it and nothing else of each
// other.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ELEMENT_TYPE_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_ELEMENT_TYPE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

template <typename T>
struct Element {
  using Type = T;
};

// launch(Element<T>()) for the T of `dtype`, and what it returns. For example:
//   WithElement(dtype, [&](auto element) { return Launch<typename decltype(element)::Type>(params); })
template <typename LaunchFn>
cudaError_t WithElement(DType dtype, LaunchFn launch) {
  switch (dtype) {
    case DType::kFloat32:
      return launch(Element<float>());
    case DType::kFloat16:
      return launch(Element<__half>());
    case DType::kBFloat16:
      return launch(Element<__nv_bfloat16>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ELEMENT_TYPE_CUH_
