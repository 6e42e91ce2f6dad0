// SPDX-License-Identifier: Apache-2.0
#include "kernels/errors/bytes.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace lossd::errors::bytes_test {
namespace {

TEST(BytesTest, HumanBytesHaveThreeDigits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1.00 KiB");
  EXPECT_EQ(HumanBytes(9.994 * 1024), "9.99 KiB");
  EXPECT_EQ(HumanBytes(9.996 * 1024), "10.0 KiB");
  EXPECT_EQ(HumanBytes(99.96 * 1024), "100 KiB");
  EXPECT_EQ(HumanBytes(1.5 * 1024 * 1024 * 1024), "1.50 GiB");
  EXPECT_EQ(HumanBytes(-2048), "-2.00 KiB");
  EXPECT_EQ(HumanBytes(18446744073709551616.0), "16.0 EiB");
}

TEST(BytesTest, ExactBytesHaveAUnitWhereTheNumberIsLong) {
  EXPECT_EQ(ExactBytes(int64_t{0}), "0 bytes");
  EXPECT_EQ(ExactBytes(kManyBytes - 1), "9999 bytes");
  EXPECT_EQ(ExactBytes(kManyBytes), "10000 bytes (9.77 KiB)");
  EXPECT_EQ(ExactBytes(int64_t{1610612736}), "1610612736 bytes (1.50 GiB)");
  EXPECT_EQ(ExactBytes(int64_t{-1610612736}), "-1610612736 bytes (-1.50 GiB)");
  EXPECT_EQ(ExactBytes(std::numeric_limits<uint64_t>::max()), "18446744073709551615 bytes (16.0 EiB)");
}

}  // namespace
}  // namespace lossd::errors::bytes_test
