// SPDX-License-Identifier: Apache-2.0
// Element types of hidden states, weights and gradients.
//
// Everything here is stateless and thread-safe.
#ifndef LOSSD_KERNELS_DTYPE_H_
#define LOSSD_KERNELS_DTYPE_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace lossd::kernels {

enum class DType : uint8_t {
  kFloat32,   // IEEE 754 binary32
  kFloat16,   // IEEE 754 binary16
  kBFloat16,  // the upper 16 bits of a binary32
};

// Bytes of one element.
constexpr size_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Bytes of `elements` elements, which are at least 0.
constexpr size_t SizeOf(int64_t elements, DType dtype) {
  return static_cast<size_t>(elements) * SizeOf(dtype);
}

// "fp32", "fp16" or "bf16".
constexpr absl::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
  }
  return "unknown";
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DTYPE_H_
