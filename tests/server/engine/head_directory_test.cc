// SPDX-License-Identifier: Apache-2.0
#include "server/engine/head_directory.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "tests/server/engine/session_fixture.h"

namespace lossd::engine::head_directory_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using HeadDirectoryTest = SessionTest;

TEST_F(HeadDirectoryTest, AHeadComesAndGoes) {
  Start();
  HeadDirectory heads(/*max_heads=*/2);
  EXPECT_EQ(heads.Find("head").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(errors::GetFieldViolation(heads.Find("head").status())->value, "head");
  ASSERT_TRUE(heads.Reserve("head").ok());
  EXPECT_EQ(heads.Find("head").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(heads.Publish("head").code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(heads.Sessions(), IsEmpty());

  heads.Fill("head", session_);
  EXPECT_EQ(*heads.Find("head"), session_);
  EXPECT_EQ(heads.FindPublished("head").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(heads.Published(), IsEmpty());
  ASSERT_TRUE(heads.Publish("head").ok());
  EXPECT_EQ(*heads.FindPublished("head"), session_);
  EXPECT_THAT(heads.Published(), ElementsAre(session_));
  EXPECT_EQ(heads.published(), 1);

  const absl::StatusOr<uint64_t> number = heads.BeginDelete("head");
  ASSERT_TRUE(number.ok());
  EXPECT_EQ(heads.BeginDelete("head").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(heads.Find("head").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(heads.Published(), IsEmpty());
  EXPECT_THAT(heads.Sessions(), ElementsAre(session_));
  EXPECT_EQ(heads.Reserve("head").code(), absl::StatusCode::kAlreadyExists) << "its memory is not free yet";
  EXPECT_EQ(heads.EndDelete("head", *number), session_);
  EXPECT_EQ(heads.EndDelete("head", *number), nullptr);
  EXPECT_TRUE(heads.Reserve("head").ok());
}

TEST_F(HeadDirectoryTest, ADeletionTakesNoOtherHeadOfTheName) {
  Start();
  HeadDirectory heads(/*max_heads=*/2);
  ASSERT_TRUE(heads.Reserve("head").ok());
  const absl::StatusOr<uint64_t> first = heads.BeginDelete("head");
  ASSERT_TRUE(first.ok());
  heads.Remove("head");  // it could not be created
  ASSERT_TRUE(heads.Reserve("head").ok());
  const absl::StatusOr<uint64_t> second = heads.BeginDelete("head");
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(heads.EndDelete("head", *first), nullptr);
  heads.Fill("head", session_);
  EXPECT_EQ(heads.EndDelete("head", *second), session_);
}

TEST_F(HeadDirectoryTest, HeadsAreLimited) {
  HeadDirectory heads(/*max_heads=*/2);
  ASSERT_TRUE(heads.Reserve("a").ok());
  ASSERT_TRUE(heads.Reserve("b").ok());
  EXPECT_EQ(heads.Reserve("c").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(heads.Reserve("a").code(), absl::StatusCode::kAlreadyExists);
  heads.Remove("a");
  EXPECT_TRUE(heads.Reserve("c").ok());
}

}  // namespace
}  // namespace lossd::engine::head_directory_test
