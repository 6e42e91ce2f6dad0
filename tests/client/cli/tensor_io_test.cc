// SPDX-License-Identifier: Apache-2.0
#include "client/cli/tensor_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "client/cli/random_rows.h"
#include "tests/support/temp_folder.h"

namespace lossd::cli::tensor_io_test {
namespace {

using ::testing::HasSubstr;

template <typename T>
TensorData Make(formats::DType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  return {dtype, std::move(shape), std::vector<uint8_t>(bytes, bytes + values.size() * sizeof(T))};
}

class TensorIoTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) { return folder_.File(name); }

  test::TempFolder folder_;
};

TEST_F(TensorIoTest, ThereAndBack) {
  const TensorData tensor = Make<float>(formats::DType::kFloat32, {2, 3}, {1, 2, 3, 4, 5, 6});
  for (const std::string name : {"a.npy", "a.safetensors"}) {
    ASSERT_TRUE(SaveTensors(Path(name), {{"x", tensor}}).ok());
    const auto loaded = LoadTensor(Path(name));
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->shape, tensor.shape);
    EXPECT_EQ(loaded->bytes, tensor.bytes);
    EXPECT_EQ(SaveTensors(Path(name), {{"x", tensor}}).code(), absl::StatusCode::kAlreadyExists);
  }
  EXPECT_EQ(LoadTensor(Path("a.safetensors:x"))->bytes, tensor.bytes);
  EXPECT_EQ(LoadTensor(Path("a.safetensors:y")).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TensorIoTest, OneOfSeveralTensorsMustBeNamed) {
  const TensorData tensor = Make<float>(formats::DType::kFloat32, {1}, {1});
  ASSERT_TRUE(SaveTensors(Path("a.safetensors"), {{"x", tensor}, {"y", tensor}}).ok());
  EXPECT_THAT(std::string(LoadTensor(Path("a.safetensors")).status().message()),
              HasSubstr("(x, y); name one"));
  EXPECT_TRUE(LoadTensor(Path("a.safetensors:y")).ok());
  EXPECT_EQ(SaveTensors(Path("a.npy"), {{"x", tensor}, {"y", tensor}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LoadTensor("a.txt").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckOutputPath("a.txt", 1).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TensorIoTest, Bf16BecomesFp32InNpy) {
  const TensorData tensor = Make<uint16_t>(formats::DType::kBFloat16, {2}, {0x3f80, 0xc000});  // 1, -2
  ASSERT_TRUE(SaveTensors(Path("a.npy"), {{"x", tensor}}).ok());
  const auto loaded = LoadTensor(Path("a.npy"));
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->dtype, formats::DType::kFloat32);
  EXPECT_EQ(loaded->bytes, Make<float>(formats::DType::kFloat32, {2}, {1, -2}).bytes);
}

TEST_F(TensorIoTest, IntegersNarrowWithChecks) {
  EXPECT_THAT(*ToInt32(Make<int64_t>(formats::DType::kInt64, {3}, {-100, 0, 2147483647})),
              ::testing::ElementsAre(-100, 0, 2147483647));
  EXPECT_THAT(*ToInt32(Make<uint16_t>(formats::DType::kUInt16, {1}, {65535})), ::testing::ElementsAre(65535));
  EXPECT_THAT(
      std::string(ToInt32(Make<int64_t>(formats::DType::kInt64, {2}, {0, 2147483648})).status().message()),
      HasSubstr("element 1 is 2147483648"));
  EXPECT_EQ(ToInt32(Make<float>(formats::DType::kFloat32, {1}, {1})).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ConvertTo(v1::DTYPE_FP32, Make<int64_t>(formats::DType::kInt64, {1}, {1})).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RandomRowsTest, SameSeedSameRows) {
  const auto a = RandomRows(100, 33, 7, v1::DTYPE_FP32, 5), b = RandomRows(100, 33, 7, v1::DTYPE_FP32, 5);
  EXPECT_EQ(a->hidden, b->hidden);
  EXPECT_EQ(a->targets, b->targets);
  EXPECT_NE(a->hidden, RandomRows(100, 33, 7, v1::DTYPE_FP32, 6)->hidden);
  std::vector<float> values(100 * 33);
  std::memcpy(values.data(), a->hidden.data(), a->hidden.size());
  double sum = 0, squares = 0;
  for (double value : values) {
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / 3300, 0, 0.1);
  EXPECT_NEAR(squares / 3300, 1, 0.1);
  EXPECT_THAT(a->targets, ::testing::Each(::testing::AllOf(::testing::Ge(0), ::testing::Lt(7))));
}

}  // namespace
}  // namespace lossd::cli::tensor_io_test
