// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/server/ranks/local_worker.h"

namespace lossd::ranks::collectives_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Offer = std::vector<std::string>;
const Offer kBoth = {"nccl", "gloo"};
const char kVersion[] = "2.28.3";

v1::Hello Worker(uint32_t rank, const std::string& gpu, const Offer& offered,
                 const std::string& nccl_version = kVersion) {
  v1::Hello hello;
  hello.set_nccl_version(nccl_version);
  hello.set_rank(rank);
  hello.set_gpu_uuid(gpu);
  for (const std::string& collectives : offered) hello.add_collectives(collectives);
  return hello;
}

TEST(RankCollectivesTest, NcclWhereAllHaveItAndAGpuEach) {
  const auto choice =
      ChooseCollectives(kBoth, "GPU-0", kVersion, {Worker(1, "GPU-1", kBoth), Worker(2, "GPU-2", kBoth)});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->collectives, "nccl");
  EXPECT_THAT(choice->reason, IsEmpty());
}

TEST(RankCollectivesTest, GlooWhereTwoHaveTheSameGpu) {
  const auto choice =
      ChooseCollectives(kBoth, "GPU-0", kVersion, {Worker(1, "GPU-1", kBoth), Worker(2, "GPU-1", kBoth)});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->collectives, "gloo");
  EXPECT_EQ(
      choice->reason,
      "rank 2: device must be a GPU of its own for collectives nccl, and rank 1 has this one, got GPU-1");
}

TEST(RankCollectivesTest, GlooWhereNcclIsMissing) {
  const auto of_worker = ChooseCollectives(kBoth, "GPU-0", kVersion, {Worker(1, "GPU-1", {"gloo"})});
  ASSERT_TRUE(of_worker.ok()) << of_worker.status();
  EXPECT_EQ(of_worker->collectives, "gloo");
  EXPECT_EQ(of_worker->reason, "rank 1: collectives must have nccl, as rank 0 has, got gloo");
  // At rank 0 it is not offered, and there is nothing that it would be slower than.
  const auto of_leader = ChooseCollectives({"gloo"}, "GPU-0", kVersion, {Worker(1, "GPU-1", kBoth)});
  ASSERT_TRUE(of_leader.ok()) << of_leader.status();
  EXPECT_EQ(of_leader->collectives, "gloo");
  EXPECT_THAT(of_leader->reason, IsEmpty());
}

TEST(RankCollectivesTest, NcclOfOneVersion) {
  const std::vector<v1::Hello> workers = {Worker(1, "GPU-1", kBoth), Worker(2, "GPU-2", kBoth, "2.27.7")};
  const std::string reason = "rank 2: version of NCCL must be what rank 0 has, 2.28.3, got 2.27.7";
  const auto choice = ChooseCollectives(kBoth, "GPU-0", kVersion, workers);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->collectives, "gloo");
  EXPECT_EQ(choice->reason, reason);
  const absl::Status only = ChooseCollectives({"nccl"}, "GPU-0", kVersion, workers).status();
  EXPECT_EQ(only.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(only.message()), HasSubstr(reason));
}

// A link that knows no collectives but Gloo.
TEST(RankCollectivesTest, ProcessesOfSeveralDevicesHaveNoGpuInCommon) {
  NoLink link;
  const std::vector<v1::Hello> workers = {Worker(1, "GPU-1", kBoth), Worker(2, "GPU-0", kBoth)};
  const absl::Status status = UseCollectives(&link, "GPU-0", /*devices=*/2, workers).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      status.message(),
      "rank 2: device must be a GPU of its own for processes of several devices, and rank 0 has this one, "
      "got GPU-0");
  EXPECT_TRUE(UseCollectives(&link, "GPU-0", /*devices=*/1, workers).ok()) << "as tests do";
  EXPECT_TRUE(UseCollectives(&link, "", /*devices=*/2, {Worker(1, "", kBoth), Worker(2, "", kBoth)}).ok());
}

TEST(RankCollectivesTest, RanksOnCpusHaveNoGpuInCommon) {
  const auto choice = ChooseCollectives({"gloo"}, "", "", {Worker(1, "", {"gloo"}), Worker(2, "", {"gloo"})});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->collectives, "gloo");
}

TEST(RankCollectivesTest, WhatIsInTheWayIsNamed) {
  const absl::Status shared =
      ChooseCollectives({"nccl"}, "GPU-0", kVersion, {Worker(1, "GPU-0", {"nccl"})}).status();
  EXPECT_EQ(shared.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shared.message()),
              AllOf(HasSubstr("rank 1: device must be a GPU of its own"), HasSubstr("rank 0 has this one")));
  const absl::Status none = ChooseCollectives(kBoth, "GPU-0", kVersion, {Worker(1, "GPU-1", {})}).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.message()), HasSubstr("rank 1: collectives must have nccl"));
}

}  // namespace
}  // namespace lossd::ranks::collectives_test
