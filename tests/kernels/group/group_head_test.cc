// SPDX-License-Identifier: Apache-2.0
// What the engine hears of a chunk that several members compute: once, in order, and the truth when some of
// them fail.
#include "kernels/group/group_head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/group/group_backend.h"
#include "tests/kernels/group/scripted_member.h"

namespace lossd::kernels::testing::group_head_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// "1 results", "1 done INTERNAL" and so on, in the order in which they were said.
class Heard {
 public:
  ChunkCallbacks Callbacks(int chunk) {
    return {.on_results = [this, chunk](const absl::Status& status) { Add(chunk, "results", status); },
            .on_done = [this, chunk](const absl::Status& status) { Add(chunk, "done", status); }};
  }
  std::vector<std::string> all() {
    absl::MutexLock lock(&mutex_);
    return all_;
  }

 private:
  void Add(int chunk, const char* what, const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    all_.push_back(absl::StrCat(chunk, " ", what, status.ok() ? "" : " ",
                                status.ok() ? "" : absl::StatusCodeToString(status.code())));
  }

  absl::Mutex mutex_;
  std::vector<std::string> all_;
};

class GroupHeadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::vector<std::unique_ptr<Backend>> members;
    for (MemberScript& script : scripts_) members.push_back(std::make_unique<ScriptedBackend>(&script));
    auto group = CreateGroupBackend(
        std::move(members),
        [this](absl::Span<HeadKernels* const>) -> absl::StatusOr<std::unique_ptr<Replicas>> {
          return std::make_unique<ScriptedReplicas>(&says_);
        },
        {.least_rows = 4,
         .join_classes = [](absl::Span<HeadKernels* const>) { return absl::OkStatus(); },
         .check_members = [this] { return check_; }});
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
    CreateHead(Split::kRows);
  }

  void CreateHead(Split split) {
    HeadConfig config;
    config.hidden_size = 2;
    config.vocab_size = 5;
    config.split = split;
    head_.reset();
    auto head = group_->CreateHead(config);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = *std::move(head);
  }

  Chunk& Submit(std::vector<int64_t> rows, int number, const std::function<void(Chunk&)>& change = {}) {
    auto& slices = slices_.emplace_back(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      slices[i].rows = rows[i];
      slices[i].hidden = hidden_;
      slices[i].targets = targets_;
    }
    Chunk& chunk = chunks_.emplace_back();
    chunk.hidden_dtype = DType::kFloat32;
    chunk.slices = absl::MakeSpan(slices);
    if (change) change(chunk);
    head_->Submit(&chunk, heard_.Callbacks(number));
    return chunk;
  }

  MemberScript& member(size_t i) { return scripts_[i]; }
  std::vector<std::string> heard() { return heard_.all(); }

  const float hidden_[64] = {};
  const int32_t targets_[32] = {};
  std::deque<std::vector<Slice>> slices_;
  std::deque<Chunk> chunks_;
  ScriptedReplicas::Says says_;
  MemberScript scripts_[2] = {MemberScript(2), MemberScript(2)};
  Heard heard_;
  absl::Status check_;
  std::unique_ptr<Backend> group_;
  std::unique_ptr<HeadKernels> head_;
};

TEST_F(GroupHeadTest, SpeaksForAllMembers) {
  EXPECT_EQ(head_->chunk_rows(), 16);
  EXPECT_EQ(head_->slice_rows(), 8);
  EXPECT_EQ(group_->max_chunks_in_flight(), 3);
  EXPECT_EQ(group_->info().device, "scripted + scripted");
}

TEST_F(GroupHeadTest, ResultsComeOnceFromAllMembers) {
  const Chunk& chunk = Submit({3, 5, 2}, 1);
  member(1).GiveResults();
  EXPECT_THAT(heard(), IsEmpty());
  member(0).GiveResults();
  EXPECT_THAT(heard(), ElementsAre("1 results"));
  for (const Slice& slice : chunk.slices) EXPECT_EQ(slice.sums.loss, static_cast<double>(slice.rows));
  EXPECT_EQ(chunk.choices.front().choice, "scripted");
  member(0).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results"));
  member(1).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results", "1 done"));
}

TEST_F(GroupHeadTest, WhatEachMemberHasDoneIsCounted) {
  const auto* const work = dynamic_cast<const GroupMembers*>(group_.get());
  ASSERT_NE(work, nullptr);
  EXPECT_EQ(work->MemberStates()[0].work.chunks, 0);
  Submit({3, 5, 2}, 1);  // 5 go to each
  Submit({1}, 2);        // few rows: by one, the second, which fails
  member(0).GiveResults();
  member(1).GiveResults();
  member(1).GiveResults(absl::InternalError("no"));
  member(0).Finish();
  member(1).Finish();
  member(1).Finish(absl::InternalError("no"));
  for (const size_t i : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(work->MemberStates()[i].work.chunks, 1) << i;
    EXPECT_EQ(work->MemberStates()[i].work.rows, 5) << i;
    EXPECT_GT(work->MemberStates()[i].work.busy, absl::ZeroDuration()) << i;
  }
}

// Its chunk is under way until it is done, however soon it was handed over.
TEST_F(GroupHeadTest, AMemberIsBusyWithAChunkUntilItIsDone) {
  const auto* const work = dynamic_cast<const GroupMembers*>(group_.get());
  Submit({2}, 1);
  member(0).GiveResults();
  const absl::Duration before = work->MemberStates()[0].work.busy;
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_GE(work->MemberStates()[0].work.busy, before + absl::Milliseconds(20));
  member(0).Finish();
  head_->ZeroGradients().IgnoreError();  // the thread is done with everything
  const absl::Duration idle = work->MemberStates()[0].work.busy;
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_LT(work->MemberStates()[0].work.busy - idle, absl::Milliseconds(20));
}

// A member that is lost may still write where the rows of its last chunk were, and other rows may lie there
// now.
TEST_F(GroupHeadTest, OnceAMemberIsLostNoChunkIsComputed) {
  for (const Split split : {Split::kRows, Split::kVocabulary}) {
    SCOPED_TRACE(static_cast<int>(split));
    CreateHead(split);
    const auto before = static_cast<std::ptrdiff_t>(heard().size());
    check_ = absl::UnavailableError("rank 1 is lost");
    Submit({2}, 7);     // few rows: by one member
    Submit({3, 5}, 8);  // by both
    const std::vector<std::string> all = heard();
    EXPECT_THAT(std::vector<std::string>(all.begin() + before, all.end()),
                ElementsAre("7 results UNAVAILABLE", "7 done UNAVAILABLE", "8 results UNAVAILABLE",
                            "8 done UNAVAILABLE"));
    check_ = absl::OkStatus();
  }
}

TEST_F(GroupHeadTest, ChunksAreHeardOfInTheOrderOfSubmission) {
  Submit({2}, 1);
  Submit({3}, 2);  // few rows: by the other member
  member(1).GiveResults();
  member(1).Finish();
  EXPECT_THAT(heard(), IsEmpty());
  member(0).GiveResults();
  EXPECT_THAT(heard(), ElementsAre("1 results", "2 results"));
  member(0).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results", "2 results", "1 done", "2 done"));
}

TEST_F(GroupHeadTest, IndependentChunksThatAccumulateGoByTheirTurn) {
  for (const uint64_t turn : {3, 3, 0}) {
    Submit({2, 4}, static_cast<int>(turn), [&](Chunk& chunk) {
      chunk.independent = true;
      chunk.turn = turn;
    });
  }
  for (int i = 0; i < 2; ++i) member(1).GiveResults();
  for (int i = 0; i < 2; ++i) member(1).Finish();
  member(0).GiveResults();
  member(0).Finish();
  EXPECT_EQ(heard().size(), 6u);
}

TEST_F(GroupHeadTest, AMemberIsGivenNoMoreThanItTakes) {
  for (int i = 0; i < 3; ++i) Submit({8, 8}, i);
  for (int i = 0; i < 3; ++i) {
    for (MemberScript& script : scripts_) {
      script.GiveResults();
      script.Finish();
    }
  }
  EXPECT_EQ(heard().size(), 6u);
}

TEST_F(GroupHeadTest, AChunkThatAllMembersRefuseAccumulatedNothing) {
  Submit({3, 5}, 1);
  for (MemberScript& script : scripts_) {
    script.GiveResults(absl::InternalError("lost"));
    script.Finish(absl::InternalError("lost"));
  }
  EXPECT_THAT(heard(), ElementsAre("1 results INTERNAL", "1 done INTERNAL"));
}

TEST_F(GroupHeadTest, WhereOnlySomeMembersFailTheGradientsAreLost) {
  Submit({3, 5}, 1);
  member(0).GiveResults(absl::InternalError("lost"));
  member(0).Finish(absl::InternalError("lost"));
  EXPECT_THAT(heard(), IsEmpty()) << "another member still works on the slices";
  member(1).GiveResults();
  member(1).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results INTERNAL", "1 done DATA_LOSS"));
}

TEST_F(GroupHeadTest, WithoutGradientsNothingIsLost) {
  Submit({3, 5}, 1, [](Chunk& chunk) { chunk.accumulate_gradients = false; });
  member(0).GiveResults(absl::InternalError("lost"));
  member(0).Finish(absl::InternalError("lost"));
  member(1).GiveResults();
  member(1).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results INTERNAL", "1 done INTERNAL"));
}

TEST_F(GroupHeadTest, AnErrorAfterTheResultsIsHeardAtTheEnd) {
  Submit({3, 5}, 1);
  for (MemberScript& script : scripts_) script.GiveResults();
  member(0).Finish();
  member(1).Finish(absl::InternalError("lost"));
  EXPECT_THAT(heard(), ElementsAre("1 results", "1 done INTERNAL"));
}

TEST_F(GroupHeadTest, RefusalsNameTheSliceAndTheMost) {
  std::string message;
  Submit({9}, 1);
  EXPECT_THAT(heard(), ElementsAre("1 results INVALID_ARGUMENT", "1 done INVALID_ARGUMENT"));
  EXPECT_EQ(member(0).in_flight() + member(1).in_flight(), 0);
  Submit({8, 8, 1}, 2);
  EXPECT_EQ(heard().back(), "2 done INVALID_ARGUMENT");
}

TEST_F(GroupHeadTest, SumsAreFormedOncePerAccumulation) {
  EXPECT_TRUE(head_->GradNorm().ok());
  EXPECT_EQ(says_.sums, 0) << "nothing was accumulated";
  Submit({3}, 1);
  member(0).GiveResults();
  member(0).Finish();
  EXPECT_NEAR(*head_->GradNorm(), std::sqrt(18.0), 1e-12);
  EXPECT_TRUE(head_->GradNorm().ok());
  EXPECT_EQ(says_.sums, 1);
  Submit({3}, 2);
  member(1).GiveResults();
  member(1).Finish();
  EXPECT_TRUE(head_->ApplyStep({.kind = OptimizerOptions::Kind::kSgd}, 1).ok());
  EXPECT_EQ(says_.sums, 2);
  EXPECT_EQ(says_.spreads, 1);
}

TEST_F(GroupHeadTest, AfterASumThatFailedTheGradientsHaveToBeZeroed) {
  Submit({3}, 1);
  member(0).GiveResults();
  member(0).Finish();
  says_.sum = absl::InternalError("the link is down");
  EXPECT_THAT(std::string(head_->GradNorm().status().message()), HasSubstr("the link is down"));
  says_.sum = absl::OkStatus();
  EXPECT_FALSE(head_->ApplyStep({.kind = OptimizerOptions::Kind::kSgd}, 1).ok()) << "half of it is summed";
  EXPECT_EQ(says_.spreads, 0);
  EXPECT_TRUE(head_->ZeroGradients().ok());
  EXPECT_TRUE(head_->GradNorm().ok());
}

TEST_F(GroupHeadTest, AStepThatOneMemberFailsIsSpreadToNone) {
  member(1).SayOfCalls(absl::UnavailableError("it fell off the bus"));
  EXPECT_THAT(head_->ApplyStep({.kind = OptimizerOptions::Kind::kSgd}, 1).message(),
              HasSubstr("fell off the bus"));
  EXPECT_EQ(says_.spreads, 0);
  EXPECT_FALSE(head_->GradNorm().ok());
  EXPECT_FALSE(head_->ZeroGradients().ok());
}

// ---- By vocabulary, every member has a part in every row ----

TEST_F(GroupHeadTest, ByVocabularyOneAnswerOfWhatOneMemberFailed) {
  CreateHead(Split::kVocabulary);
  for (const bool accumulate : {true, false}) {
    for (const size_t failing : {0, 1}) {
      const int number = accumulate ? 1 : 2;
      Submit({3, 5}, number, [&](Chunk& chunk) { chunk.accumulate_gradients = accumulate; });
      const auto before = static_cast<std::ptrdiff_t>(heard().size());
      const absl::Status lost = absl::UnavailableError("lost");
      member(failing).GiveResults(lost);
      member(failing).Finish(lost);
      EXPECT_EQ(heard().size(), before) << "another member still works on the slices";
      member(1 - failing).GiveResults();
      member(1 - failing).Finish();
      const std::string done = accumulate ? " done DATA_LOSS" : " done UNAVAILABLE";
      ASSERT_EQ(heard().size(), before + 2);
      EXPECT_EQ(heard()[before], absl::StrCat(number, " results UNAVAILABLE"));
      EXPECT_EQ(heard()[before + 1], absl::StrCat(number, done));
    }
  }
}

TEST_F(GroupHeadTest, ByVocabularyTheErrorOfOneMemberIsThatOfTheHead) {
  CreateHead(Split::kVocabulary);
  EXPECT_NEAR(*head_->GradNorm(), std::sqrt(18.0), 1e-12);
  member(1).SayOfCalls(absl::UnavailableError("it fell off the bus"));
  std::vector<uint8_t> bytes(5 * 2 * sizeof(float));
  const TensorId weight{Param::kWeight, Role::kValue};
  for (const absl::Status& status :
       {head_->GradNorm().status(), head_->ZeroGradients(),
        head_->ApplyStep({.kind = OptimizerOptions::Kind::kSgd}, 1),
        head_->ReadTensor(weight, 0, 5, DType::kFloat32, absl::MakeSpan(bytes)),
        head_->WriteTensor(weight, 0, 5, DType::kFloat32, bytes),
        head_->AddGradient(Param::kWeight, 0, 5, DType::kFloat32, 1.0f, bytes)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr("fell off the bus"));
  }
}

}  // namespace
}  // namespace lossd::kernels::testing::group_head_test
