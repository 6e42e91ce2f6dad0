// SPDX-License-Identifier: Apache-2.0
#include "server/engine/head_directory.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "tests/server/engine/session_fixture.h"

namespace lossd::engine {
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

  ASSERT_TRUE(heads.BeginDelete("head").ok());
  EXPECT_EQ(heads.BeginDelete("head").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(heads.Find("head").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(heads.Published(), IsEmpty());
  EXPECT_THAT(heads.Sessions(), ElementsAre(session_));
  EXPECT_EQ(heads.Reserve("head").code(), absl::StatusCode::kAlreadyExists) << "its memory is not free yet";
  EXPECT_EQ(heads.Remove("head"), session_);
  EXPECT_EQ(heads.Remove("head"), nullptr);
  EXPECT_TRUE(heads.Reserve("head").ok());
}

TEST_F(HeadDirectoryTest, HeadsAreLimited) {
  HeadDirectory heads(/*max_heads=*/2);
  ASSERT_TRUE(heads.Reserve("a").ok());
  ASSERT_TRUE(heads.Reserve("b").ok());
  EXPECT_EQ(heads.Reserve("c").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(heads.Reserve("a").code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(heads.Remove("a"), nullptr) << "its creation failed";
  EXPECT_TRUE(heads.Reserve("c").ok());
}

}  // namespace
}  // namespace lossd::engine
