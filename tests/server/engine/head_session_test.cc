// SPDX-License-Identifier: Apache-2.0
// Tests of head_session.h: the session of one head, and the directory of all heads.
#include "server/engine/head_session.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "server/engine/operations.h"
#include "tests/server/engine/engine_fixture.h"

// ---- The session of a head ----
// Driven by hand: slices from their caller to the device and back, and versions.

namespace lossd::engine::head_session_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

using HeadSessionTest = SessionTest;

TEST_F(HeadSessionTest, ASliceGoesToTheDeviceAndBack) {
  Start();
  EXPECT_FALSE(RunNext());
  Call call = Open(Spec(1, 4, {0, 4}));
  const SentSlice first = Send(call, {0, 3});
  EXPECT_TRUE(first.queued()) << "there is memory, so all is done in the call";
  EXPECT_EQ(Snapshot().queued_slices, 1);
  EXPECT_FALSE(RunNext({.chunks = 1, .max_chunks = 1})) << "the device is full";
  EXPECT_TRUE(RunNext());
  EXPECT_TRUE(Send(call, {3, 4}).queued());
  EXPECT_TRUE(RunNext());
  ASSERT_TRUE(call.results->Wait().ok());
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(1, {0, 4})));
  EXPECT_EQ(Snapshot().total_rows, 4);
  EXPECT_EQ(Snapshot().open_streams, 0);
}

TEST_F(HeadSessionTest, ASliceWaitsForMemoryAndItsStreamForIt) {
  device_.chunk_rows = 1000;
  Start();
  Call large = Open(LossOnly(1, 600));
  ASSERT_TRUE(Send(large, {0, 300}).queued());
  ASSERT_TRUE(Send(large, {300, 600}).queued());
  Call waiting = Open(LossOnly(2, 200));
  const SentSlice slice = Send(waiting, {0, 200});
  EXPECT_FALSE(slice.copied());
  waiting.stream->HalfClose();
  EXPECT_FALSE(waiting.results->finished()) << "a slice of it is still to come";
  ASSERT_TRUE(RunNext());
  EXPECT_TRUE(slice.Wait()) << "memory of the chunk came back";
  ASSERT_TRUE(RunNext());
  EXPECT_TRUE(waiting.results->Wait().ok()) << waiting.results->Wait();
}

TEST_F(HeadSessionTest, AStreamThatHasFailedTakesNoSliceThoughItIsNotOver) {
  Start();
  Call call = Open(Spec(1, 8, {0, 8}));
  ASSERT_TRUE(Send(call, {0, 4}).queued());
  DeviceLoop::Work chunk;
  {
    absl::MutexLock lock(&context_->mutex);
    chunk = session_->TakeWork({.max_chunks = 1});  // a slice of it is on the device
  }
  call.stream->Cancel(absl::CancelledError("cut"));
  EXPECT_FALSE(call.results->finished());
  EXPECT_FALSE(Send(call, {4, 8}).copied());
  EXPECT_EQ(context_->staging->used_bytes(), 256) << "of the slice on the device";
  chunk();
  EXPECT_EQ(call.results->Wait().code(), absl::StatusCode::kCancelled);
}

TEST_F(HeadSessionTest, AStreamMayEndWhileItsSliceWaitsForMemory) {
  device_.chunk_rows = 1000;
  Start();
  Call large = Open(LossOnly(1, 600));
  ASSERT_TRUE(Send(large, {0, 300}).queued());
  ASSERT_TRUE(Send(large, {300, 600}).queued());
  Call waiting = Open(LossOnly(2, 200));
  const SentSlice slice = Send(waiting, {0, 200});
  waiting.stream->Cancel(absl::CancelledError("enough"));
  EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kCancelled);
  waiting.stream.reset();
  EXPECT_FALSE(slice.Wait());
  EXPECT_FALSE(slice.copied());
  ASSERT_TRUE(RunNext());
  ASSERT_TRUE(large.results->Wait().ok());
  EXPECT_FALSE(RunNext());
  EXPECT_EQ(context_->staging->used_bytes(), 0);
}

TEST_F(HeadSessionTest, ABadSliceIsRefusedBeforeItGetsMemory) {
  Start();
  Call call = Open(Spec(1, 400, {0, 400}));
  bool copied = false;
  call.stream->Receive({.rows = {0, 342},
                        .bytes = 342 * kRowBytes,
                        .copy = [&](uint8_t*) { copied = true; },
                        .on_queued = [](int64_t) { FAIL() << "it was refused"; }});
  EXPECT_THAT(std::string(call.results->Wait().message()), HasSubstr("payload must have at most 4096 bytes"));
  EXPECT_FALSE(copied);
  EXPECT_EQ(context_->staging->peak_bytes(), 0);
}

TEST_F(HeadSessionTest, ASliceThatLiesInStagingMemoryMayBeLarger) {
  device_.chunk_rows = 1000;
  Start();
  Call call = Open(LossOnly(1, 600));
  std::vector<uint8_t> memory(600 * kRowBytes);
  bool queued = false;
  call.stream->Receive({.rows = {0, 600},
                        .bytes = 600 * kRowBytes,
                        .in_place = StagingBuffer(memory.data(), 600 * kRowBytes, [] {}),
                        .copy = nullptr,
                        .on_queued = [&](int64_t) { queued = true; }});
  EXPECT_TRUE(queued);
  ASSERT_TRUE(RunNext());
  call.stream->HalfClose();
  EXPECT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  EXPECT_EQ(context_->staging->peak_bytes(), 0);

  Call narrow = Open(LossOnly(2, 600));
  const int64_t most = narrow.stream->limits().max_bytes_in_place;
  narrow.stream->Receive({.rows = {0, 600},
                          .bytes = most + 1,
                          .in_place = StagingBuffer(memory.data(), most + 1, [] {}),
                          .copy = nullptr,
                          .on_queued = [](int64_t) { FAIL() << "it was refused"; }});
  EXPECT_THAT(std::string(narrow.results->Wait().message()),
              HasSubstr(absl::StrCat("slice.in_region must have at most ", errors::ExactBytes(most))));
}

TEST_F(HeadSessionTest, AStepEndsWhatBelongsToItAndHasItsOwnGeneration) {
  Start();
  Call accumulates = Open(Spec(1, 4, {0, 4})), loss_only = Open(LossOnly(2, 4));
  ASSERT_TRUE(Send(accumulates, {0, 2}).queued());
  ASSERT_TRUE(Send(loss_only, {0, 4}).queued());
  const uint64_t generation = session_->step().versions().generation();
  EXPECT_TRUE(ZeroGradients(*session_, 0, "").ok());
  EXPECT_GT(session_->step().versions().generation(), generation);
  EXPECT_EQ(accumulates.results->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(loss_only.results->finished());
  EXPECT_TRUE(RunNext());
  EXPECT_TRUE(loss_only.results->Wait().ok());
  EXPECT_THAT(device_.chunks(), ElementsAre(ElementsAre(4)));

  const auto applied = ApplyStep(*session_, {.step = 0});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->state.step, 1u);
  EXPECT_FALSE(applied->repeated);
  EXPECT_TRUE(ApplyStep(*session_, {.step = 0})->repeated);
  EXPECT_EQ(device_.steps, 1);
  EXPECT_EQ(ZeroGradients(*session_, 0, "").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(BeginLoad(*session_, {.step = 7, .updates = 5}, std::nullopt, {}).ok());
  EXPECT_TRUE(EndLoad(*session_).ok());
  EXPECT_EQ(Snapshot().state.step, 7u);
  EXPECT_EQ(Snapshot().updates, 5u);
}

TEST_F(HeadSessionTest, AFailedUpdateMakesTheWeightsInvalidAndAFailedZeroingTheGradients) {
  Start();
  device_.fail_zero = absl::InternalError("boom");
  EXPECT_THAT(std::string(ZeroGradients(*session_, 0, "").status().message()), HasSubstr("zero them again"));
  EXPECT_EQ(OpenStatus(Spec(1, 4, {0, 4})).code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(OpenStatus(LossOnly(2, 4)).ok()) << "the weights are as they were";
  device_.fail_zero = absl::OkStatus();
  ASSERT_TRUE(ZeroGradients(*session_, 0, "").ok());
  device_.fail_step = absl::InternalError("boom");
  EXPECT_THAT(std::string(ApplyStep(*session_, {.step = 0}).status().message()),
              HasSubstr("load a checkpoint"));
  EXPECT_EQ(OpenStatus(LossOnly(3, 4)).code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(Snapshot().tensors_status.ok());
}

// A backend may let go of a chunk, and with it of the session, when the engine has ended.
TEST_F(HeadSessionTest, ADeletedHeadKeepsNoMemoryOfTheEngine) {
  Start({.retained_bytes = 4096});
  StreamSpec spec = LossOnly(1, 4);
  spec.reduction = Reduction::kNone;
  spec.retain = true;
  Call call = Open(spec);
  ASSERT_TRUE(Send(call, {0, 4}).queued());
  ASSERT_TRUE(RunNext());
  ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  EXPECT_GT(context_->retained_ranges.used(), 0);
  session_->DeleteHead();
  EXPECT_EQ(context_->retained_ranges.used(), 0);
}

TEST_F(HeadSessionTest, ItsPartOfTheStats) {
  Start();
  Call call = Open(Spec(1, 4, {0, 4}));
  ASSERT_TRUE(Send(call, {0, 3}).queued());
  EngineStats stats{.open_streams = 1, .queued_rows = 1, .ledger_rows = 1};
  absl::MutexLock lock(&context_->mutex);
  AddTo(*session_, stats);
  EXPECT_EQ(stats.open_streams, 2);
  EXPECT_EQ(stats.queued_slices, 1);
  EXPECT_EQ(stats.queued_rows, 4);
  EXPECT_EQ(stats.ledger_rows, 5);
}

}  // namespace
}  // namespace lossd::engine::head_session_test

// ---- The directory of heads ----

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
  const absl::StatusOr<uint64_t> taken = heads.Reserve("head");
  ASSERT_TRUE(taken.ok());
  EXPECT_EQ(heads.Find("head").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(heads.Publish("head").code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(heads.Sessions(), IsEmpty());

  ASSERT_TRUE(heads.Fill("head", *taken, session_));
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
  EXPECT_EQ(heads.Reserve("head").status().code(), absl::StatusCode::kAlreadyExists)
      << "its memory is not free yet";
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
  heads.Remove("head", *first);  // it could not be created
  ASSERT_TRUE(heads.Reserve("head").ok());
  const absl::StatusOr<uint64_t> second = heads.BeginDelete("head");
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(heads.EndDelete("head", *first), nullptr);
  EXPECT_TRUE(heads.Fill("head", *second, session_));
  EXPECT_EQ(heads.EndDelete("head", *second), session_);
}

// A creation whose head is deleted before it is made neither fills nor removes another head of the name.
TEST_F(HeadDirectoryTest, ACreationTakesNoOtherHeadOfTheName) {
  Start();
  HeadDirectory heads(/*max_heads=*/2);
  const absl::StatusOr<uint64_t> first = heads.Reserve("head");
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(heads.EndDelete("head", *heads.BeginDelete("head")), nullptr);
  EXPECT_FALSE(heads.Fill("head", *first, session_));
  const absl::StatusOr<uint64_t> second = heads.Reserve("head");
  ASSERT_TRUE(second.ok());
  EXPECT_FALSE(heads.Fill("head", *first, session_));
  heads.Remove("head", *first);
  EXPECT_EQ(heads.Find("head").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(heads.Fill("head", *second, session_));
  EXPECT_EQ(*heads.Find("head"), session_);
}

TEST_F(HeadDirectoryTest, HeadsAreLimited) {
  HeadDirectory heads(/*max_heads=*/2);
  const absl::StatusOr<uint64_t> first = heads.Reserve("a");
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(heads.Reserve("b").ok());
  EXPECT_EQ(heads.Reserve("c").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(heads.Reserve("a").status().code(), absl::StatusCode::kAlreadyExists);
  heads.Remove("a", *first);
  EXPECT_TRUE(heads.Reserve("c").ok());
}

}  // namespace
}  // namespace lossd::engine::head_directory_test
