// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/convert.h"

#include <bit>
#include <cmath>
#include <vector>

#include "Eigen/Core"
#include "gtest/gtest.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::convert_test {
namespace {

// Every 16-bit pattern widens as Eigen's types do and narrows back to itself.
template <typename T>
void CheckAllPatterns(DType dtype) {
  std::vector<uint16_t> bits(1 << 16);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<float> values(bits.size());
  std::vector<uint16_t> back(bits.size());
  ToFloat(dtype, bits.data(), 1 << 16, values.data());
  FromFloat(dtype, values.data(), 1 << 16, back.data());
  for (size_t i = 0; i < bits.size(); ++i) {
    const float want = static_cast<float>(std::bit_cast<T>(bits[i]));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(values[i])) << i;
      EXPECT_TRUE(std::isnan(static_cast<float>(std::bit_cast<T>(back[i])))) << i;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(want)) << i;
      EXPECT_EQ(back[i], bits[i]);
    }
  }
}

// fp32 patterns all over the range, at an odd address.
void CheckNarrowing(DType dtype, Rng& rng) {
  std::vector<float> values = {
      0.0f,      -0.0f,           65519.0f,       65520.0f,       65535.99f,       65536.0f,  1e30f,
      0x1p-14f,  0x1p-24f,        0x1.8p-25f,     0x1p-25f,       0x1.000002p-25f, 0x1p-149f, INFINITY,
      -INFINITY, 0x1.ffffffp-15f, 1.00048828125f, 1.00146484375f, 3.3895314e38f,   3.4e38f};
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(rng()));
    if (!std::isnan(value)) values.push_back(value);
    values.push_back(std::ldexp(Uniform(rng, -1.0f, 1.0f), static_cast<int>(UniformInt(rng, -30, 20))));
  }
  const std::vector<uint8_t> want = Encode(dtype, values);
  std::vector<uint8_t> got(want.size() + 1);
  FromFloat(dtype, values.data(), static_cast<int64_t>(values.size()), got.data() + 1);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(got[2 * i + 1], want[2 * i]) << values[i];
    EXPECT_EQ(got[2 * i + 2], want[2 * i + 1]) << values[i];
  }
}

TEST(ConvertTest, Float16) {
  Rng rng = FreshRng();
  CheckAllPatterns<Eigen::half>(DType::kFloat16);
  CheckNarrowing(DType::kFloat16, rng);
}

TEST(ConvertTest, BFloat16) {
  Rng rng = FreshRng();
  CheckAllPatterns<Eigen::bfloat16>(DType::kBFloat16);
  CheckNarrowing(DType::kBFloat16, rng);
}

TEST(ConvertTest, NanStaysNan) {
  const float payloads[] = {std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu), NAN};
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    uint8_t bytes[12];
    float back[3];
    FromFloat(dtype, payloads, 3, bytes);
    ToFloat(dtype, bytes, 3, back);
    for (float value : back) EXPECT_TRUE(std::isnan(value)) << Name(dtype);
  }
}

}  // namespace
}  // namespace lossd::kernels::testing::convert_test
