// SPDX-License-Identifier: Apache-2.0
// Conversions against the formats' definitions, computed here from sign, exponent and fraction.
#include "proto/tensorfile/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace lossd::formats::convert_test {
namespace {

template <typename To, typename From>
std::vector<To> Converted(DType from, const std::vector<From>& in, DType to) {
  std::vector<To> out(in.size());
  const absl::Status status =
      Convert(from, absl::MakeSpan(reinterpret_cast<const uint8_t*>(in.data()), in.size() * sizeof(From)), to,
              absl::MakeSpan(reinterpret_cast<uint8_t*>(out.data()), out.size() * sizeof(To)));
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

// The value of a binary16 that is no NaN.
double HalfValue(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double fraction = bits & 1023;
  const double magnitude = exponent == 31  ? std::numeric_limits<double>::infinity()
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

double BrainValue(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

bool IsNan16(DType dtype, uint16_t bits) {
  return dtype == DType::kFloat16 ? (bits & 0x7fff) > 0x7c00 : (bits & 0x7fff) > 0x7f80;
}

class SixteenBits : public testing::TestWithParam<DType> {
 protected:
  double Value(uint16_t bits) const {
    return GetParam() == DType::kFloat16 ? HalfValue(bits) : BrainValue(bits);
  }
  uint16_t Infinity() const { return GetParam() == DType::kFloat16 ? 0x7c00 : 0x7f80; }
};

TEST_P(SixteenBits, EveryValueWidensExactlyAndComesBack) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const std::vector<float> wide = Converted<float>(GetParam(), all, DType::kFloat32);
  const std::vector<double> wider = Converted<double>(GetParam(), all, DType::kFloat64);
  const std::vector<uint16_t> back = Converted<uint16_t>(DType::kFloat32, wide, GetParam());
  for (size_t i = 0; i < all.size(); ++i) {
    if (IsNan16(GetParam(), all[i])) {
      EXPECT_TRUE(std::isnan(wide[i]) && std::isnan(wider[i]) && IsNan16(GetParam(), back[i])) << i;
    } else {
      EXPECT_EQ(wide[i], Value(all[i])) << i;
      EXPECT_EQ(wider[i], Value(all[i])) << i;
      EXPECT_EQ(back[i], all[i]);
    }
  }
}

// Midpoints between neighbours go to the even one, anything else to the nearer one.
TEST_P(SixteenBits, RoundsToNearestEven) {
  for (uint16_t bits = 0; bits + 1 < Infinity(); ++bits) {
    const double low = Value(bits), high = Value(static_cast<uint16_t>(bits + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    const std::vector<float> in = {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, HUGE_VALF),
                                   -middle};
    const std::vector<uint16_t> out = Converted<uint16_t>(DType::kFloat32, in, GetParam());
    const auto even = static_cast<uint16_t>(bits + (bits & 1));
    ASSERT_EQ(out, (std::vector<uint16_t>{even, bits, static_cast<uint16_t>(bits + 1),
                                          static_cast<uint16_t>(even | 0x8000)}))
        << bits;
  }
  const std::vector<float> large = {std::numeric_limits<float>::max(), -HUGE_VALF};
  EXPECT_EQ(Converted<uint16_t>(DType::kFloat32, large, GetParam()),
            (std::vector<uint16_t>{Infinity(), static_cast<uint16_t>(Infinity() | 0x8000)}));
}

INSTANTIATE_TEST_SUITE_P(ConvertTest, SixteenBits, testing::Values(DType::kFloat16, DType::kBFloat16),
                         [](const auto& tested) {
                           return tested.param == DType::kFloat16 ? "fp16" : "bf16";
                         });

TEST(ConvertTest, WideTypes) {
  const std::vector<double> in = {0.1, -1e300, 1.0 / 3, 1e-320};
  EXPECT_EQ(Converted<float>(DType::kFloat64, in, DType::kFloat32),
            (std::vector<float>{0.1f, -HUGE_VALF, 1.0f / 3, 0.0f}));
  EXPECT_EQ(Converted<double>(DType::kFloat64, in, DType::kFloat64), in);
  EXPECT_EQ(Converted<uint16_t>(DType::kFloat64, std::vector<double>{1.0, -2.0}, DType::kBFloat16),
            (std::vector<uint16_t>{0x3f80, 0xc000}));
}

TEST(ConvertTest, UnalignedMemory) {
  std::vector<uint8_t> in(9), out(5);
  const float values[] = {1.5f, -2.0f};
  std::memcpy(in.data() + 1, values, 8);
  ASSERT_TRUE(Convert(DType::kFloat32, absl::MakeConstSpan(in).subspan(1), DType::kFloat16,
                      absl::MakeSpan(out).subspan(1))
                  .ok());
  EXPECT_EQ(out, (std::vector<uint8_t>{0, 0x00, 0x3e, 0x00, 0xc0}));
}

TEST(ConvertTest, RefusesOtherTypesAndSizes) {
  std::vector<uint8_t> in(8), out(8, 7);
  const auto code = [&](DType from, size_t in_bytes, DType to, size_t out_bytes) {
    return Convert(from, absl::MakeConstSpan(in).first(in_bytes), to, absl::MakeSpan(out).first(out_bytes))
        .code();
  };
  EXPECT_EQ(code(DType::kInt32, 8, DType::kFloat32, 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kFloat32, 8, DType::kOther, 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kFloat32, 8, DType::kFloat16, 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kFloat32, 7, DType::kFloat16, 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(out, std::vector<uint8_t>(8, 7));
  EXPECT_EQ(code(DType::kFloat32, 0, DType::kFloat16, 0), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace lossd::formats::convert_test
