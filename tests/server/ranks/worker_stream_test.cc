// SPDX-License-Identifier: Apache-2.0
// The leader's end of a stream whose worker does what it must not: it is lost, and all that is under way
// fails once.
#include "server/ranks/worker_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/host_bytes.h"
#include "tests/server/ranks/worker_stream_fixture.h"

namespace lossd::ranks::worker_stream_test {
namespace {

using testing::kHidden;
using testing::kRows;
using testing::kSlices;
using testing::WorkerStreamTest;

TEST_F(WorkerStreamTest, ResultsComeToTheSlices) {
  Submit();
  Say(SliceResults(1, 0));
  Say(SliceResults(1, 1));
  Say(Results(1));
  Say(Done(1));
  worker_.AwaitHeard();
  absl::MutexLock lock(&mutex_);
  ASSERT_EQ(results_.size(), 1u);
  ASSERT_EQ(done_.size(), 1u);
  EXPECT_TRUE(results_[0].ok()) << results_[0];
  EXPECT_TRUE(done_[0].ok()) << done_[0];
  for (const auto& hidden : hidden_) {
    for (const float value : hidden) EXPECT_NE(value, 0.0f);
  }
}

TEST_F(WorkerStreamTest, RowsInSharedMemoryAreNamed) {
  const uint64_t region = ShareHidden();
  hidden_[1][0] = 7;
  Submit();
  for (size_t i = 0; i < kSlices; ++i) {
    const v1::ChunkSlice& slice = worker_.slices()[i];
    EXPECT_TRUE(slice.hidden().empty());
    for (const v1::RowsPlace& place : {slice.hidden_at(), slice.grad_hidden_at()}) {
      EXPECT_EQ(place.region(), region);
      EXPECT_EQ(place.offset(), i * sizeof(hidden_[0]));
    }
    Say(InPlace(SliceResults(1, static_cast<uint32_t>(i))));
  }
  Say(Results(1));
  Say(Done(1));
  worker_.AwaitHeard();
  absl::MutexLock lock(&mutex_);
  ASSERT_EQ(done_.size(), 1u);
  EXPECT_TRUE(results_[0].ok()) << results_[0];
  EXPECT_EQ(hidden_[1][0], 7) << "the worker writes there, and nobody else";
  EXPECT_NE(losses_[1][1], 0.0f);
}

// The leader writes them, where the worker may still read.
TEST_F(WorkerStreamTest, ByVocabularyAWorkerIsToldOfNoPlaceForGradients) {
  ShareHidden();
  Submit(/*is_part=*/true);
  EXPECT_TRUE(worker_.slices()[0].has_hidden_at());
  EXPECT_FALSE(worker_.slices()[0].has_grad_hidden_at());
  EXPECT_TRUE(worker_.slices()[0].want_grad_hidden());
}

TEST_F(WorkerStreamTest, GradientsGoElsewhereIfHiddenStatesAreToStay) {
  ShareHidden();
  float elsewhere[kSlices][kRows * kHidden] = {};
  for (size_t i = 0; i < kSlices; ++i) slices_[i].grad_hidden = elsewhere[i];
  Submit();
  EXPECT_TRUE(worker_.slices()[0].has_hidden_at());
  EXPECT_FALSE(worker_.slices()[0].has_grad_hidden_at());
  Say(SliceResults(1, 0));
  Say(SliceResults(1, 1));
  Say(Results(1));
  Say(Done(1));
  worker_.AwaitHeard();
  EXPECT_NE(elsewhere[1][0], 0.0f);
  EXPECT_EQ(hidden_[1][0], 0.0f);
}

// In memory of the leader, all of it.
constexpr size_t kSliceBytes = kRows * kHidden * sizeof(float);

TEST_F(WorkerStreamTest, RowsToBeRetainedAreKeptBeforeTheWorkerHearsOfThem) {
  ShareHidden();
  auto backend = kernels::CreateCpuBackend({.threads = 1}).value();
  const auto retained = backend->AllocateRetained(2 * kSliceBytes).value();
  chunk_.retained = retained.get();
  slices_[1].retained_offset = kSliceBytes;
  hidden_[0][0] = 5;
  hidden_[1][0] = 7;
  float kept = 3;
  const auto bytes = absl::Span<uint8_t>(reinterpret_cast<uint8_t*>(&kept), sizeof(kept));
  ASSERT_TRUE(kernels::WriteBytesOf(retained.get(), 0, bytes).ok());
  worker_.set_on_write([&](int message) {
    if (message != 3) return;  // the second slice
    EXPECT_TRUE(kernels::ReadBytesOf(retained.get(), kSliceBytes, bytes).ok());
    EXPECT_EQ(kept, 7);
    EXPECT_TRUE(kernels::ReadBytesOf(retained.get(), 0, bytes).ok());
    EXPECT_EQ(kept, 3) << "nothing was to be kept there";
  });
  Submit();
  EXPECT_EQ(worker_.slices().size(), kSlices);
}

// Not where the leader delivers the gradients, and the other parts of the head read.
TEST_F(WorkerStreamTest, RetainedRowsLieWhereTheirGradientsGoIfThatIsShared) {
  auto backend = kernels::CreateCpuBackend({.threads = 1}).value();
  const auto retained = backend->AllocateRetained(kSliceBytes).value();
  const float value = 7;
  const auto bytes = absl::Span<const uint8_t>(reinterpret_cast<const uint8_t*>(&value), sizeof(value));
  ASSERT_TRUE(kernels::WriteBytesOf(retained.get(), 0, bytes).ok());
  chunk_.retained = retained.get();
  slices_[1].hidden = nullptr;
  slices_[1].retained_offset = 0;
  Submit();
  EXPECT_EQ(worker_.slices()[1].hidden().substr(0, 4), std::string("\0\0\xe0\x40", 4));
  EXPECT_EQ(hidden_[1][0], 0);
  const uint64_t region = ShareHidden();
  Submit(/*is_part=*/true);
  EXPECT_EQ(worker_.slices()[3].hidden().size(), kSliceBytes);
  EXPECT_EQ(hidden_[1][0], 0);
  Submit();
  const v1::ChunkSlice& slice = worker_.slices()[5];
  EXPECT_TRUE(slice.hidden().empty());
  for (const v1::RowsPlace& place : {slice.hidden_at(), slice.grad_hidden_at()}) {
    EXPECT_EQ(place.region(), region);
    EXPECT_EQ(place.offset(), kSliceBytes);
  }
  EXPECT_EQ(hidden_[1][0], 7);
}

TEST_F(WorkerStreamTest, RetainedRowsThatCannotBeReadAreALoss) {
  slices_[0].hidden = nullptr;
  slices_[0].retained_offset = 0;
  Submit();
  reader_.join();
  EXPECT_EQ(end_.message(), "the host cannot read retained memory");
  EXPECT_EQ(results_heard(), 1u);
}

TEST_F(WorkerStreamTest, GradientsInPlaceThatHaveNoneAreALoss) {
  Submit();
  Say(InPlace(SliceResults(1, 0)));
  ExpectLost("gradients where they do not belong");
}

TEST_F(WorkerStreamTest, GradientsInAMessageThatHaveAPlaceAreALoss) {
  ShareHidden();
  Submit();
  Say(SliceResults(1, 0));
  ExpectLost("gradients where they do not belong");
}

// Else the hidden states, or what was in the memory before, would go for gradients.
TEST_F(WorkerStreamTest, AChunkThatSucceedsHasResultsOfEverySlice) {
  Submit();
  Say(SliceResults(1, 0));
  Say(Results(1));
  ExpectLost("results of 1 of 2 slices");
}

TEST_F(WorkerStreamTest, SoHasAPartOfAHeadThatIsSplitByVocabulary) {
  Submit(/*is_part=*/true);
  Say(Results(1));
  ExpectLost("results of 0 of 2 slices");
}

TEST_F(WorkerStreamTest, ResultsOfSlicesComeOnceAndInOrder) {
  Submit();
  Say(SliceResults(1, 0));
  Say(SliceResults(1, 0));
  ExpectLost("results of a slice");
}

TEST_F(WorkerStreamTest, AChunkThatFailedHasNone) {
  Submit();
  v1::FromWorker failed = Results(1);
  failed.mutable_results()->mutable_status()->set_code(static_cast<int>(absl::StatusCode::kInternal));
  Say(failed);
  Say(Done(1));
  worker_.AwaitHeard();
  absl::MutexLock lock(&mutex_);
  ASSERT_EQ(results_.size(), 1u);
  EXPECT_EQ(results_[0].code(), absl::StatusCode::kInternal);
}

// The engine gives the memory of a chunk to others when it has results, while the chunk would still be read.
TEST_F(WorkerStreamTest, AChunkThatIsStillBeingSentHasNoResults) {
  size_t heard_early = 0;
  worker_.set_on_write([&](int number) {
    if (number != 2) return;  // the first of its slices; the chunk's start was before it
    for (uint32_t slice = 0; slice < kSlices; ++slice) Say(SliceResults(1, slice));
    Say(Results(1));
    worker_.AwaitHeard();
    heard_early = results_heard();
  });
  Submit();
  EXPECT_EQ(heard_early, 0u);
  ExpectLost("results of a slice");
}

TEST_F(WorkerStreamTest, WhatDoesNotBelongToAChunkIsALoss) {
  Submit();
  Say(Done(1));
  ExpectLost("finished a chunk that has no results");
}

TEST_F(WorkerStreamTest, ResultsOfAnotherChunkAreALoss) {
  Submit();
  Say(SliceResults(2, 0));
  ExpectLost("results of a slice");
}

TEST_F(WorkerStreamTest, ResultsOfASliceThatThereIsNotAreALoss) {
  Submit();
  Say(SliceResults(1, 7));
  ExpectLost("results of a slice");
}

TEST_F(WorkerStreamTest, ResultsOfAnotherLengthAreALoss) {
  Submit();
  v1::FromWorker message = SliceResults(1, 0);
  message.mutable_slice()->mutable_grad_hidden()->push_back('x');
  Say(message);
  ExpectLost("33 bytes of gradients instead of 32");
}

TEST_F(WorkerStreamTest, AnAnswerToNothingIsALoss) {
  Submit();
  v1::FromWorker message;
  message.mutable_answer()->set_request(5);
  Say(message);
  ExpectLost("answered request 5");
}

TEST_F(WorkerStreamTest, AWorkerThatSaysThatItsDeviceIsLostIsLostWhateverTheReason) {
  Submit();
  v1::FromWorker message;
  message.mutable_lost();
  Say(message);
  ExpectLost("its device is lost");
}

TEST_F(WorkerStreamTest, ARequestThatIsUnderWayFailsWithTheWorker) {
  const uint64_t request = stream_.Start(v1::Request());
  worker_.End();
  EXPECT_EQ(stream_.Await(request).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(stream_.Call(v1::Request()).status().code(), absl::StatusCode::kUnavailable);
  Submit();
  absl::MutexLock lock(&mutex_);
  ASSERT_EQ(done_.size(), 1u);
  EXPECT_EQ(done_[0].code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace lossd::ranks::worker_stream_test
