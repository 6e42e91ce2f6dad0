// SPDX-License-Identifier: Apache-2.0
#include "server/head/checksum.h"

#include <gtest/gtest.h>

#include <string>

namespace lossd::head::checksum_test {
namespace {

// Values of the XXH3 reference implementation.
TEST(ChecksumTest, KnownValues) {
  Checksum checksum;
  EXPECT_EQ(checksum.Digest(), "2d06800538d394c2");
  const std::string text = "lossd";
  checksum.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), 2));
  Checksum whole;
  whole.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), 5));
  EXPECT_NE(checksum.Digest(), whole.Digest());
  checksum.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()) + 2, 3));
  EXPECT_EQ(checksum.Digest(), whole.Digest());
}

}  // namespace
}  // namespace lossd::head::checksum_test
