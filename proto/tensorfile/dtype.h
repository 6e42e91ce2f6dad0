// SPDX-License-Identifier: Apache-2.0
// Element types of tensor files, their sizes and names, and the conversion of elements between fp64, fp32,
// fp16 and bf16. Functions are stateless and thread-safe.
#ifndef LOSSD_PROTO_TENSORFILE_DTYPE_H_
#define LOSSD_PROTO_TENSORFILE_DTYPE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::formats {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,   // IEEE 754 binary16
  kBFloat16,  // the upper 16 bits of a binary32
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt64,
  kUInt32,
  kUInt16,
  kUInt8,
  kBool,
  kFloat8E5M2,
  kFloat8E4M3,
  kOther,  // any other type; its element size is not known
};

// Bytes of one element; 0 for kOther.
constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kUInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
    case DType::kUInt16:
      return 2;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3:
      return 1;
    case DType::kOther:
      return 0;
  }
  return 0;
}

// True for the types that Convert accepts.
constexpr bool IsConvertible(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}

// The name that a file format uses in its headers for an element type.
struct NamedDType {
  absl::string_view name;
  DType dtype;
};

// The type with this name in a format; kOther if there is none.
constexpr DType DTypeNamed(absl::Span<const NamedDType> names, absl::string_view name) {
  for (const NamedDType& known : names) {
    if (known.name == name) return known.dtype;
  }
  return DType::kOther;
}

// The name of a type in a format; empty if the format has none for it.
constexpr absl::string_view NameOf(absl::Span<const NamedDType> names, DType dtype) {
  for (const NamedDType& known : names) {
    if (known.dtype == dtype) return known.name;
  }
  return "";
}

// Converts all elements of `in` (type `from`, dense, any alignment) to `out` (type `to`). Rounds to nearest,
// ties to even. Values that are too large become infinity; NaN stays NaN. fp64 is converted to the 16-bit
// types through fp32 (two roundings). The spans must not overlap. INVALID_ARGUMENT if a type is not
// convertible or the numbers of elements differ; then `out` is unchanged.
absl::Status Convert(DType from, absl::Span<const uint8_t> in, DType to, absl::Span<uint8_t> out);

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_DTYPE_H_
