// SPDX-License-Identifier: Apache-2.0
#include "server/head/head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "tests/server/head/memory_kernels.h"

namespace lossd::head::head_test {
namespace {

using kernels::DType;
using kernels::Param;
using kernels::Role;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr kernels::TensorId kWeight{Param::kWeight, Role::kValue};

TEST(HeadTest, TensorNames) {
  EXPECT_EQ(TensorName(kWeight), "weight");
  EXPECT_EQ(TensorName({Param::kWeight, Role::kMoment1}), "weight.moment1");
  EXPECT_EQ(TensorName({Param::kNormGain, Role::kMoment2}), "norm.gain.moment2");
  EXPECT_EQ(TensorName({Param::kBias, Role::kGradient}), "bias.gradient");
}

TEST(HeadTest, PassesRowsThrough) {
  const kernels::HeadConfig config{.hidden_size = 3, .vocab_size = 4};
  Head head("lm", std::make_unique<MemoryKernels>(config));
  EXPECT_EQ(head.name(), "lm");
  EXPECT_EQ(head.config(), config);
  const float rows[6] = {1, 2, 3, 4, 5, 6};
  uint8_t bytes[24];
  std::memcpy(bytes, rows, sizeof(bytes));
  ASSERT_TRUE(head.WriteRows(kWeight, 1, 2, DType::kFloat32, bytes).ok());
  EXPECT_THAT(static_cast<MemoryKernels&>(head.kernels()).tensor(kWeight),
              ElementsAre(0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0));
  uint8_t read[12];
  ASSERT_TRUE(head.ReadRows(kWeight, 2, 1, DType::kFloat32, absl::MakeSpan(read)).ok());
  EXPECT_EQ(std::memcmp(read, bytes + 12, 12), 0);
}

TEST(HeadTest, ErrorsNameHeadAndTensor) {
  Head head("lm", std::make_unique<MemoryKernels>(kernels::HeadConfig{.hidden_size = 3, .vocab_size = 4}));
  uint8_t bytes[24] = {};
  const auto code = [&](kernels::TensorId id, int64_t begin, int64_t rows, size_t size) {
    const absl::Status read =
        head.ReadRows(id, begin, rows, DType::kFloat32, absl::MakeSpan(bytes).first(size));
    const absl::Status write =
        head.WriteRows(id, begin, rows, DType::kFloat32, absl::MakeSpan(bytes).first(size));
    EXPECT_EQ(read, write);
    EXPECT_THAT(std::string(read.message()), HasSubstr("head 'lm', tensor " + TensorName(id)));
    return read.code();
  };
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(code({Param::kBias, Role::kValue}, 0, 1, 4), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(kWeight, 3, 2, 24), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(kWeight, -1, 2, 24), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(kWeight, 1, kMax, 24), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(kWeight, 0, 2, 23), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(head.ReadRows(kWeight, 0, 4, DType::kFloat16, absl::MakeSpan(bytes)).code(),
            absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace lossd::head::head_test
