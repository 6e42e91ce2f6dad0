// SPDX-License-Identifier: Apache-2.0
#include "kernels/errors/payload.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/cord.h"

namespace lossd::errors::payload_test {
namespace {

using Texts = std::vector<std::string>;

constexpr char kType[] = "lossd/test";

TEST(PayloadTest, TextsOfAnyBytesComeBack) {
  std::string all_bytes;
  for (int byte = 0; byte < 256; ++byte) all_bytes.push_back(static_cast<char>(byte));
  for (const Texts& texts :
       {Texts{}, Texts{""}, Texts{"", "", ""}, Texts{"a", std::string("\0|\n,", 4), all_bytes},
        Texts{std::string(100000, 'x')}}) {
    absl::Status status = absl::InternalError("x");
    SetTexts(kType, texts, &status);
    EXPECT_EQ(GetTexts(kType, status), texts);
    EXPECT_EQ(GetTexts("lossd/other", status), std::nullopt);
  }
}

TEST(PayloadTest, LaterTextsReplaceEarlierOnes) {
  absl::Status status = absl::InternalError("x");
  SetTexts(kType, Texts{"a", "b"}, &status);
  SetTexts(kType, Texts{"c"}, &status);
  EXPECT_EQ(GetTexts(kType, status), Texts{"c"});
}

TEST(PayloadTest, NothingIsAttachedToOk) {
  absl::Status status;
  SetTexts(kType, Texts{"a"}, &status);
  EXPECT_EQ(GetTexts(kType, status), std::nullopt);
  EXPECT_TRUE(status.ok());
}

TEST(PayloadTest, OtherBytesAreNoTexts) {
  absl::Status status = absl::InternalError("x");
  SetTexts(kType, Texts{"abc", "de"}, &status);
  const std::string good(*status.GetPayload(kType));
  for (size_t size = 1; size < good.size(); ++size) {
    status.SetPayload(kType, absl::Cord(good.substr(0, size)));
    const bool first_text_alone = size == sizeof(uint64_t) + 3;
    EXPECT_EQ(GetTexts(kType, status).has_value(), first_text_alone) << size;
  }
  status.SetPayload(kType, absl::Cord(std::string(16, '\xff')));  // a length near 2^64
  EXPECT_EQ(GetTexts(kType, status), std::nullopt);
}

TEST(PayloadTest, AnotherMessageKeepsCodeAndPayloads) {
  absl::Status status = absl::AbortedError("before");
  SetTexts(kType, Texts{"a"}, &status);
  status.SetPayload("lossd/other", absl::Cord("b"));
  absl::Status expected = absl::AbortedError("after");
  SetTexts(kType, Texts{"a"}, &expected);
  expected.SetPayload("lossd/other", absl::Cord("b"));
  EXPECT_EQ(WithMessage(status, "after"), expected);
}

}  // namespace
}  // namespace lossd::errors::payload_test
