// SPDX-License-Identifier: Apache-2.0
// Convert: conversion of elements between floating-point types (dtype.h).
#include "proto/tensorfile/dtype.h"

#include <Eigen/Core>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::formats {
namespace {

template <typename From, typename To>
void ConvertElements(absl::Span<const uint8_t> in, absl::Span<uint8_t> out) {
  const size_t count = in.size() / sizeof(From);
  for (size_t i = 0; i < count; ++i) {
    From element;
    std::memcpy(&element, in.data() + i * sizeof(From), sizeof(From));
    const auto converted = static_cast<To>(element);
    std::memcpy(out.data() + i * sizeof(To), &converted, sizeof(To));
  }
}

template <typename From>
void ConvertFrom(absl::Span<const uint8_t> in, DType to, absl::Span<uint8_t> out) {
  switch (to) {
    case DType::kFloat64:
      return ConvertElements<From, double>(in, out);
    case DType::kFloat32:
      return ConvertElements<From, float>(in, out);
    case DType::kFloat16:
      return ConvertElements<From, Eigen::half>(in, out);
    default:
      return ConvertElements<From, Eigen::bfloat16>(in, out);
  }
}

// True if `bytes` bytes are whole elements of a convertible type.
bool IsWhole(DType dtype, size_t bytes) {
  return IsConvertible(dtype) && bytes % static_cast<size_t>(SizeOf(dtype)) == 0;
}

}  // namespace

absl::Status Convert(DType from, absl::Span<const uint8_t> in, DType to, absl::Span<uint8_t> out) {
  if (!IsWhole(from, in.size()) || !IsWhole(to, out.size()) ||
      in.size() / static_cast<size_t>(SizeOf(from)) != out.size() / static_cast<size_t>(SizeOf(to))) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot convert ", errors::ExactBytes(in.size()), " of type ", static_cast<int>(from),
                     " to ", errors::ExactBytes(out.size()), " of type ", static_cast<int>(to)));
  }
  switch (from) {
    case DType::kFloat64:
      ConvertFrom<double>(in, to, out);
      break;
    case DType::kFloat32:
      ConvertFrom<float>(in, to, out);
      break;
    case DType::kFloat16:
      ConvertFrom<Eigen::half>(in, to, out);
      break;
    default:
      ConvertFrom<Eigen::bfloat16>(in, to, out);
      break;
  }
  return absl::OkStatus();
}

}  // namespace lossd::formats
