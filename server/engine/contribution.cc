// SPDX-License-Identifier: Apache-2.0
#include "server/engine/contribution.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

// The numbers of a type as their bits without the sign, which order them by magnitude.
struct Magnitudes {
  uint32_t mask;      // all bits but the sign
  uint32_t infinity;  // the least that is not finite

  static Magnitudes Of(kernels::DType dtype) {
    switch (dtype) {
      case kernels::DType::kFloat16:
        return {0x7fffu, 0x7c00u};
      case kernels::DType::kBFloat16:
        return {0x7fffu, 0x7f80u};
      case kernels::DType::kFloat32:
        break;
    }
    return {0x7fffffffu, 0x7f800000u};
  }
};

float FiniteValue(kernels::DType dtype, uint32_t bits) {
  switch (dtype) {
    case kernels::DType::kFloat16: {
      const int exponent = static_cast<int>(bits >> 10);
      const auto fraction = static_cast<float>(bits & 0x3ffu);
      return exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024.0f + fraction, exponent - 25);
    }
    case kernels::DType::kBFloat16:
      return std::bit_cast<float>(bits << 16);
    case kernels::DType::kFloat32:
      break;
  }
  return std::bit_cast<float>(bits);
}

// The least magnitude that is not finite or whose product with the scale, rounded to fp32, is not.
uint32_t LeastOverflowing(kernels::DType dtype, float scale) {
  uint32_t fits = 0;
  uint32_t overflows = Magnitudes::Of(dtype).infinity;
  while (overflows - fits > 1) {
    const uint32_t middle = fits + (overflows - fits) / 2;
    (std::isfinite(FiniteValue(dtype, middle) * scale) ? fits : overflows) = middle;
  }
  return overflows;
}

// The index of the first element of at least the given magnitude, else -1.
template <typename Bits>
int64_t FirstAtLeast(absl::Span<const uint8_t> values, Bits mask, Bits least) {
  constexpr int64_t kBlock = 4096;  // looked at without branches
  const int64_t count = static_cast<int64_t>(values.size() / sizeof(Bits));
  const auto is_less = [&](int64_t i) {
    Bits bits;  // elements may be unaligned
    std::memcpy(&bits, values.data() + static_cast<size_t>(i) * sizeof(Bits), sizeof(Bits));
    return static_cast<Bits>(bits & mask) < least;
  };
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    bool all = true;
    for (int64_t i = begin; i < end; ++i) all &= is_less(i);
    for (int64_t i = begin; !all && i < end; ++i) {
      if (!is_less(i)) return i;
    }
  }
  return -1;
}

int64_t FirstOverflowing(const ContributionTerms& terms, absl::Span<const uint8_t> values) {
  const uint32_t mask = Magnitudes::Of(terms.dtype).mask;
  const uint32_t least = LeastOverflowing(terms.dtype, terms.scale);
  if (terms.dtype == kernels::DType::kFloat32) return FirstAtLeast<uint32_t>(values, mask, least);
  return FirstAtLeast<uint16_t>(values, static_cast<uint16_t>(mask), static_cast<uint16_t>(least));
}

}  // namespace

absl::Status CheckFinite(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values) {
  const int64_t bad = FirstOverflowing(contribution.terms, values);
  if (bad < 0) return absl::OkStatus();
  return FieldError(
      absl::StatusCode::kOutOfRange,
      absl::StrCat("payload row ", rows.begin + bad / contribution.cols, " column ", bad % contribution.cols),
      absl::StrCat("must be finite, also after multiplication by open.scale ", contribution.terms.scale,
                   "; nothing of its slice was added"),
      "a value that is not finite");
}

std::vector<uint64_t> RowChecksums(absl::Span<const uint8_t> values, int64_t row_bytes) {
  const auto size = static_cast<size_t>(row_bytes);
  std::vector<uint64_t> checksums(values.size() / size);
  for (size_t row = 0; row < checksums.size(); ++row) {
    const uint64_t hash = XXH3_64bits(values.data() + row * size, size);
    checksums[row] = hash == 0 ? 1 : hash;
  }
  return checksums;
}

}  // namespace lossd::engine
