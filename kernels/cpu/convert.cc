// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/convert.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace lossd::kernels {
namespace {

float FromBFloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t ToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// The exponent of a half moved into a float's place is 112 too small; the multiplication corrects it, for
// subnormal halves too. Infinity and NaN get the float's exponent for them.
float FromFloat16(uint16_t half) {
  const uint32_t magnitude = uint32_t{half} & 0x7fffu;
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  const uint32_t bits = magnitude >= 0x7c00u ? special : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(bits | ((uint32_t{half} & 0x8000u) << 16));
}

uint16_t ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Adding 0.5 leaves a subnormal half in the low bits, rounded by the addition itself.
  const float sum = std::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(sum) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t small_or_normal = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t half = magnitude >= (143u << 23) ? special : small_or_normal;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// Elements may be unaligned, hence memcpy, which compiles to a plain load or store.
template <float (*kConvert)(uint16_t)>
void Widen(const void* from, int64_t n, float* to) {
  const auto* bytes = static_cast<const unsigned char*>(from);
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, sizeof(bits));
    to[i] = kConvert(bits);
  }
}

template <uint16_t (*kConvert)(float)>
void Narrow(const float* from, int64_t n, void* to) {
  auto* bytes = static_cast<unsigned char*>(to);
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t bits = kConvert(from[i]);
    std::memcpy(bytes + 2 * i, &bits, sizeof(bits));
  }
}

}  // namespace

void ToFloat(DType dtype, const void* from, int64_t n, float* to) {
  if (n <= 0) return;
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kFloat16:
      Widen<FromFloat16>(from, n, to);
      return;
    case DType::kBFloat16:
      Widen<FromBFloat16>(from, n, to);
      return;
  }
}

void FromFloat(DType dtype, const float* from, int64_t n, void* to) {
  if (n <= 0) return;
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kFloat16:
      Narrow<ToFloat16>(from, n, to);
      return;
    case DType::kBFloat16:
      Narrow<ToBFloat16>(from, n, to);
      return;
  }
}

void AddScaled(DType dtype, const void* from, int64_t n, float scale, float* to) {
  constexpr int64_t kBlock = 1024;  // stays in the first cache
  float block[kBlock];
  const auto* bytes = static_cast<const unsigned char*>(from);
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    ToFloat(dtype, bytes + i * static_cast<int64_t>(SizeOf(dtype)), count, block);
    for (int64_t j = 0; j < count; ++j) to[i + j] += scale * block[j];
  }
}

}  // namespace lossd::kernels
