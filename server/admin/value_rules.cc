// SPDX-License-Identifier: Apache-2.0
#include "server/admin/value_rules.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace lossd::admin {
namespace {

constexpr size_t kBlock = 4096;  // elements that are looked at together

// Bits of an element: the sign, and those that are all 1 in NaNs and infinities.
struct Float32 {
  using Bits = uint32_t;
  static constexpr Bits kSign = 0x8000'0000, kExponent = 0x7f80'0000;
  static float Value(Bits bits) { return std::bit_cast<float>(bits); }
};
struct BFloat16 {
  using Bits = uint16_t;
  static constexpr Bits kSign = 0x8000, kExponent = 0x7f80;
  static float Value(Bits bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
struct Float16 {
  using Bits = uint16_t;
  static constexpr Bits kSign = 0x8000, kExponent = 0x7c00;
  static float Value(Bits bits) {
    const int exponent = (bits & kExponent) >> 10;
    const int fraction = bits & 0x3ff;
    float size = std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 0x400),
                            std::max(exponent, 1) - 25);
    if (exponent == 31) size = fraction == 0 ? INFINITY : NAN;
    return (bits & kSign) != 0 ? -size : size;
  }
};

template <typename Type>
bool BreaksRules(const ValueRules& rules, typename Type::Bits bits) {
  const bool is_negative = (bits & Type::kSign) != 0 && (bits & ~Type::kSign) != 0;
  if ((bits & Type::kExponent) == Type::kExponent) {
    const float value = Type::Value(bits);
    if (std::isnan(value)) return !rules.non_finite;
    const bool taken = rules.non_finite || (rules.minus_infinity && value < 0);
    return !taken || (is_negative && !rules.negative);
  }
  return is_negative && !rules.negative;
}

// Whether a block may have something that breaks the rules; a loop that compilers turn into vector code.
template <typename Type>
bool LooksBad(const ValueRules& rules, const typename Type::Bits* bits, size_t count) {
  bool special = false, negative = false;
  for (size_t i = 0; i < count; ++i) {
    special |= (bits[i] & Type::kExponent) == Type::kExponent;
    negative |= (bits[i] & Type::kSign) != 0;
  }
  return (special && !rules.non_finite) || (negative && !rules.negative);
}

template <typename Type>
std::optional<RefusedValue> Search(const ValueRules& rules, absl::Span<const uint8_t> bytes) {
  using Bits = typename Type::Bits;
  const size_t elements = bytes.size() / sizeof(Bits);
  Bits block[kBlock];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t count = std::min(kBlock, elements - begin);
    std::memcpy(block, bytes.data() + begin * sizeof(Bits), count * sizeof(Bits));
    if (!LooksBad<Type>(rules, block, count)) continue;
    for (size_t i = 0; i < count; ++i) {
      if (BreaksRules<Type>(rules, block[i])) {
        return RefusedValue{static_cast<int64_t>(begin + i), Type::Value(block[i])};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<RefusedValue> FirstRefused(const ValueRules& rules, kernels::DType dtype,
                                         absl::Span<const uint8_t> bytes) {
  if (rules.non_finite && rules.negative) return std::nullopt;
  switch (dtype) {
    case kernels::DType::kFloat32:
      return Search<Float32>(rules, bytes);
    case kernels::DType::kFloat16:
      return Search<Float16>(rules, bytes);
    case kernels::DType::kBFloat16:
      return Search<BFloat16>(rules, bytes);
  }
  return std::nullopt;
}

}  // namespace lossd::admin
