// SPDX-License-Identifier: Apache-2.0
// Tests of the leader's end of a worker's stream: buffers, what is known of the worker, and workers that
// fail.
#include "server/ranks/worker_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/ranks/worker_heads.h"
#include "tests/server/ranks/worker_stream_fixture.h"

// ---- Buffers of a worker ----

namespace lossd::ranks::worker_buffers_test {
namespace {

using kernels::MemoryKind;

// A backend with two chunks in flight, whose memory can come to its end.
class LimitedBackend final : public kernels::Backend {
 public:
  kernels::BackendInfo info() const override { return cpu_->info(); }
  kernels::MemoryStats memory() const override { return cpu_->memory(); }
  int max_chunks_in_flight() const override { return 2; }
  absl::StatusOr<kernels::MemoryBytes> PlanHead(const kernels::HeadConfig& config) const override {
    return cpu_->PlanHead(config);
  }
  absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> CreateHead(
      const kernels::HeadConfig& config) override {
    return cpu_->CreateHead(config);
  }
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateStaging(int64_t bytes) override {
    if (left_ == 0) return absl::ResourceExhaustedError("no memory");
    --left_;
    return cpu_->AllocateStaging(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> AllocateRetained(int64_t bytes) override {
    return cpu_->AllocateRetained(bytes);
  }
  absl::Status PlanHostMemory(MemoryKind kind, int64_t bytes) override {
    return cpu_->PlanHostMemory(kind, bytes);
  }

  int64_t staging() const { return memory().current[MemoryKind::kStaging]; }
  void AllowMore(int buffers) { left_ = buffers; }

 private:
  const std::unique_ptr<kernels::Backend> cpu_ = kernels::CreateCpuBackend({.threads = 1}).value();
  int left_ = 100;
};

TEST(WorkerBuffersTest, WhatIsReservedIsThereForAsManyChunksAsAreInFlight) {
  LimitedBackend backend;
  WorkerBuffers buffers(&backend);
  ASSERT_TRUE(buffers.Reserve(1000).ok());
  backend.AllowMore(0);
  for (int round = 0; round < 3; ++round) {
    auto first = buffers.Take(1000), second = buffers.Take(1);
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_GE((*first)->bytes().size(), 1000u);
    EXPECT_EQ(buffers.Take(1000).status().code(), absl::StatusCode::kResourceExhausted);
    buffers.Return(*std::move(first));
    buffers.Return(*std::move(second));
  }
}

TEST(WorkerBuffersTest, WhatIsReservedStaysWhenALargerOneIsNotToBeHad) {
  LimitedBackend backend;
  WorkerBuffers buffers(&backend);
  ASSERT_TRUE(buffers.Reserve(1000).ok());
  backend.AllowMore(1);
  EXPECT_EQ(buffers.Reserve(5000).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(buffers.Take(5000).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(buffers.Take(1000).ok());
  EXPECT_TRUE(buffers.Take(1000).ok());
}

// Chunks of another head are under way while a larger one is created.
TEST(WorkerBuffersTest, SmallerOnesGoWhenLargerOnesAreReserved) {
  LimitedBackend backend;
  WorkerBuffers buffers(&backend);
  auto first = buffers.Take(100), second = buffers.Take(100);
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(buffers.Reserve(1000).ok());
  buffers.Return(*std::move(first));
  buffers.Return(*std::move(second));
  EXPECT_EQ(backend.staging(), 2000);
  backend.AllowMore(0);
  auto large = buffers.Take(1000), also_large = buffers.Take(1000);
  EXPECT_TRUE(large.ok() && also_large.ok());
}

TEST(WorkerBuffersTest, WithoutAReserveTheLargestChunkDecides) {
  LimitedBackend backend;
  WorkerBuffers buffers(&backend);
  for (const int64_t bytes : {100, 900, 300, 900}) {
    auto buffer = buffers.Take(bytes);
    ASSERT_TRUE(buffer.ok());
    EXPECT_GE(static_cast<int64_t>((*buffer)->bytes().size()), bytes);
    buffers.Return(*std::move(buffer));
  }
  EXPECT_LE(backend.staging(), 1000);
}

}  // namespace
}  // namespace lossd::ranks::worker_buffers_test

// ---- What is known of a worker ----
// What the leader knows of a worker: memory, traffic, metrics.

namespace lossd::ranks::worker_state_test {
namespace {

using testing::kHidden;
using testing::kRows;
using testing::kSlices;
using testing::WorkerStreamTest;

// Chunks take memory of a worker too, and steps may be far between.
TEST_F(WorkerStreamTest, MemoryIsWhatTheWorkerSaidLastWithChunksToo) {
  Submit();
  Say(SliceResults(1, 0));
  Say(SliceResults(1, 1));
  Say(Results(1));
  v1::FromWorker done = Done(1);
  done.mutable_done()->mutable_memory()->set_peak_total(77);
  Say(done);
  worker_.AwaitHeard();
  EXPECT_EQ(stream_.memory().peak_total, 77);
  EXPECT_EQ(stream_.report().state.memory.peak_total, 77);
}

TEST_F(WorkerStreamTest, TrafficIsCounted) {
  Submit();
  Say(SliceResults(1, 0));
  Say(SliceResults(1, 1));
  Say(Results(1));
  Say(Done(1));
  worker_.AwaitHeard();
  const kernels::RankState once = stream_.report().state;
  EXPECT_EQ(once.chunks, 1);
  EXPECT_EQ(once.rows, kSlices * kRows);
  const int64_t payload = kSlices * kRows * kHidden * sizeof(float);
  ASSERT_TRUE(once.traffic.has_value());
  EXPECT_GT(once.traffic->sent_bytes, payload);
  EXPECT_GT(once.traffic->received_bytes, payload);
  EXPECT_LT(once.traffic->sent_bytes, payload + 400);
  EXPECT_LT(once.traffic->received_bytes, payload + 400);
  Submit();  // number 2, which fails
  v1::FromWorker failed = Results(2);
  failed.mutable_results()->mutable_status()->set_code(static_cast<int>(absl::StatusCode::kInternal));
  Say(failed);
  v1::FromWorker done = Done(2);
  done.mutable_done()->mutable_status()->set_code(static_cast<int>(absl::StatusCode::kInternal));
  Say(done);
  worker_.AwaitHeard();
  const kernels::RankState twice = stream_.report().state;
  EXPECT_EQ(twice.chunks, 1);
  EXPECT_EQ(twice.rows, once.rows);
  ASSERT_TRUE(twice.traffic.has_value());
  EXPECT_EQ(twice.traffic->sent_bytes, 2 * once.traffic->sent_bytes);
}

v1::FromWorker MetricsWith(const std::string& help) {
  v1::FromWorker message;
  v1::MetricFamily* const family = message.mutable_metrics()->add_families();
  family->set_name("lossd_something");
  family->set_help(help);
  return message;
}

TEST_F(WorkerStreamTest, MetricsAreThoseThatCameLast) {
  EXPECT_EQ(stream_.report().metrics.families_size(), 0);
  Say(MetricsWith("first"));
  Say(MetricsWith("second"));
  worker_.AwaitHeard();
  const v1::Metrics metrics = stream_.report().metrics;
  ASSERT_EQ(metrics.families_size(), 1);
  EXPECT_EQ(metrics.families(0).help(), "second");
}

TEST_F(WorkerStreamTest, MoreMetricsThanThereCanBeAreALoss) {
  Submit();
  Say(MetricsWith(std::string(kMostMetricsBytes, 'x')));
  ExpectLost("too many metrics");
}

}  // namespace
}  // namespace lossd::ranks::worker_state_test

// ---- Workers that fail ----
// The worker does what it must not: it is lost, and all that is under way fails once.

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
  ASSERT_TRUE(retained->WriteBytes(0, bytes).ok());
  worker_.set_on_write([&](int message) {
    if (message != 3) return;  // the second slice
    EXPECT_TRUE(retained->ReadBytes(kSliceBytes, bytes).ok());
    EXPECT_EQ(kept, 7);
    EXPECT_TRUE(retained->ReadBytes(0, bytes).ok());
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
  ASSERT_TRUE(retained->WriteBytes(0, bytes).ok());
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
