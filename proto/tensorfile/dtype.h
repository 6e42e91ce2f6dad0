// SPDX-License-Identifier: Apache-2.0
// Element types of tensor files. Stateless and thread-safe.
#ifndef LOSSD_PROTO_TENSORFILE_DTYPE_H_
#define LOSSD_PROTO_TENSORFILE_DTYPE_H_

#include <cstdint>

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
  kOther,  // of a kind unknown here; element size unknown
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

// True for the types that Convert (convert.h) takes.
constexpr bool IsConvertible(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_DTYPE_H_
