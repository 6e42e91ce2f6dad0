// SPDX-License-Identifier: Apache-2.0
// Conversion of elements between fp64, fp32, fp16 and bf16.
//
// Rounds to nearest, ties to even; too large becomes infinity; NaN stays NaN. fp64 goes to the 16-bit
// types through fp32 (two roundings). Thread-safe.
#ifndef LOSSD_PROTO_TENSORFILE_CONVERT_H_
#define LOSSD_PROTO_TENSORFILE_CONVERT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/tensorfile/dtype.h"

namespace lossd::formats {

// Converts all elements of `in` (type `from`, dense, any alignment) to `out` (type `to`). The spans must
// not overlap. INVALID_ARGUMENT if a type is not convertible or the spans differ in their number of
// elements; then `out` is untouched.
absl::Status Convert(DType from, absl::Span<const uint8_t> in, DType to, absl::Span<uint8_t> out);

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_CONVERT_H_
