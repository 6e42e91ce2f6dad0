// SPDX-License-Identifier: Apache-2.0
#include "server/app/byte_size.h"

#include <gtest/gtest.h>

namespace lossd::app::byte_size_test {
namespace {

int64_t Parse(absl::string_view text) {
  ByteSize size;
  std::string error;
  return AbslParseFlag(text, &size, &error) ? size.bytes : -1;
}

TEST(ByteSizeTest, Units) {
  EXPECT_EQ(Parse("4096"), 4096);
  EXPECT_EQ(Parse("0"), 0);
  EXPECT_EQ(Parse("12B"), 12);
  EXPECT_EQ(Parse("64KiB"), 64 << 10);
  EXPECT_EQ(Parse("256 mib"), 256 << 20);
  EXPECT_EQ(Parse("2GiB"), int64_t{2} << 30);
  EXPECT_EQ(Parse("1.5GiB"), int64_t{3} << 29);
  EXPECT_EQ(Parse("1TiB"), int64_t{1} << 40);
  EXPECT_EQ(Parse("3GB"), 3'000'000'000);
}

TEST(ByteSizeTest, Refusals) {
  for (const char* text :
       {"", "lots", "-1", "1e3", "0x10", "5PiB", "1 2", "GiB", "99999999TiB", "nan", "inf", "1..2"}) {
    EXPECT_EQ(Parse(text), -1) << text;
  }
  ByteSize size;
  std::string error;
  EXPECT_FALSE(AbslParseFlag("lots", &size, &error));
  EXPECT_NE(error.find("2GiB"), std::string::npos);
}

TEST(ByteSizeTest, RoundTrip) {
  for (const int64_t bytes :
       {int64_t{0}, int64_t{1}, int64_t{1000}, int64_t{1} << 10, int64_t{3} << 20, int64_t{5} << 40}) {
    EXPECT_EQ(Parse(AbslUnparseFlag(ByteSize{bytes})), bytes);
  }
  EXPECT_EQ(AbslUnparseFlag(ByteSize{int64_t{256} << 20}), "256MiB");
}

}  // namespace
}  // namespace lossd::app::byte_size_test
