// SPDX-License-Identifier: Apache-2.0
// Tests of the leader's end of a worker (worker_stream.h, remote_backend.h): buffers, what is known of the
// worker, workers that fail, and tensors that are read and written in pieces.
#include "server/ranks/worker_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/ranks/remote_backend.h"
#include "server/ranks/worker.h"

namespace lossd::ranks::worker_stream_test {
namespace {

using kernels::MemoryKind;
using ::testing::HasSubstr;

constexpr size_t kHidden = 4;
constexpr int64_t kRows = 2;  // of each slice
constexpr size_t kSlices = 2;

// A worker that says what the test has it say.
class PlayedWorker final : public WorkerTransport {
 public:
  bool Read(v1::FromWorker* message) override {
    absl::MutexLock lock(&mutex_);
    ++reads_;
    const auto news = [this] {
      mutex_.AssertHeld();
      return ended_ || !said_.empty();
    };
    mutex_.Await(absl::Condition(&news));
    if (said_.empty()) return false;
    *message = std::move(said_.front());
    said_.pop_front();
    return true;
  }
  bool Write(const v1::ToWorker& message) override {
    const int number = ++written_;
    if (message.has_chunk()) start_ = message.chunk();
    if (message.has_slice()) slices_.push_back(message.slice());
    if (on_write_) on_write_(number);
    return true;
  }
  void Cancel() override { End(); }

  void Say(v1::FromWorker message) {
    absl::MutexLock lock(&mutex_);
    said_.push_back(std::move(message));
  }
  void End() {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
  }
  // Everything that was said has been dealt with.
  void AwaitHeard() {
    absl::MutexLock lock(&mutex_);
    const auto heard = [this] {
      mutex_.AssertHeld();
      return ended_ || (said_.empty() && reads_ > said_in_all_);
    };
    mutex_.Await(absl::Condition(&heard));
  }
  // That were sent to it.
  const v1::ChunkStart& start() const { return start_; }  // the last one
  const std::vector<v1::ChunkSlice>& slices() const { return slices_; }
  // Runs within Write, with the number of the message, from 1 on.
  void set_on_write(std::function<void(int)> on_write) { on_write_ = std::move(on_write); }
  void CountSaid(int more) {
    absl::MutexLock lock(&mutex_);
    said_in_all_ += more;
  }

 private:
  std::function<void(int)> on_write_;
  int written_ = 0;
  v1::ChunkStart start_;
  std::vector<v1::ChunkSlice> slices_;
  absl::Mutex mutex_;
  std::deque<v1::FromWorker> said_ ABSL_GUARDED_BY(mutex_);
  int said_in_all_ ABSL_GUARDED_BY(mutex_) = 0;
  int reads_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

class WorkerStreamTest : public ::testing::Test {
 protected:
  WorkerStreamTest() : stream_(MakeHello(), &worker_) {
    for (size_t i = 0; i < kSlices; ++i) {
      slices_[i].rows = kRows;
      slices_[i].hidden = hidden_[i];
      slices_[i].targets = targets_;
      slices_[i].grad_hidden = hidden_[i];
      slices_[i].out.loss = losses_[i];
    }
    chunk_.hidden_dtype = kernels::DType::kFloat32;
    chunk_.slices = absl::MakeSpan(slices_);
    reader_ = std::thread([this] {
      stream_.Run([this](const absl::Status& status) { end_ = status; }, [](const std::string&) {});
    });
    worker_.AwaitHeard();  // it reads
  }
  ~WorkerStreamTest() override {
    worker_.End();
    if (reader_.joinable()) reader_.join();
  }
  static v1::Hello MakeHello() {
    v1::Hello hello;
    hello.set_rank(3);
    hello.set_host("elsewhere");
    return hello;
  }

  // Chunks are numbered from 1 on, with the requests.
  void Submit(bool is_part = false, const RemoteHeadId& teacher = {}) {
    const RemoteHeadId head = {.id = 1, .hidden_size = kHidden, .is_part = is_part};
    stream_.Submit({.head = head, .teacher = teacher}, &chunk_,
                   {.on_results =
                        [this](absl::Status status) {
                          absl::MutexLock lock(&mutex_);
                          results_.push_back(std::move(status));
                        },
                    .on_done =
                        [this](absl::Status status) {
                          absl::MutexLock lock(&mutex_);
                          done_.push_back(std::move(status));
                        }});
  }
  void Say(v1::FromWorker message) {
    worker_.CountSaid(1);
    worker_.Say(std::move(message));
  }
  static v1::FromWorker SliceResults(uint64_t chunk, uint32_t slice) {
    v1::FromWorker message;
    v1::SliceResults* const results = message.mutable_slice();
    results->set_chunk(chunk);
    results->set_slice(slice);
    results->set_first_nonfinite_row(-1);
    results->set_loss(std::string(kRows * sizeof(float), '\1'));
    results->set_grad_hidden(std::string(kRows * kHidden * sizeof(float), '\2'));
    return message;
  }
  static v1::FromWorker Results(uint64_t chunk) {
    v1::FromWorker message;
    message.mutable_results()->set_chunk(chunk);
    return message;
  }
  static v1::FromWorker Done(uint64_t chunk) {
    v1::FromWorker message;
    message.mutable_done()->set_chunk(chunk);
    return message;
  }
  // The hidden states lie in memory that the worker has mapped.
  uint64_t ShareHidden() {
    const absl::Span<uint8_t> memory = {reinterpret_cast<uint8_t*>(hidden_), sizeof(hidden_)};
    EXPECT_TRUE(regions_.Enter(3));
    const uint64_t region = regions_.Add(memory, wire::OwnedDescriptor());
    regions_.Told(3, *regions_.NextNews(3));
    EXPECT_TRUE(regions_.OnAnswer(3, region, /*mapped=*/true));
    stream_.ShareRows(&regions_);
    return region;
  }
  static v1::FromWorker InPlace(v1::FromWorker message) {
    message.mutable_slice()->clear_grad_hidden();
    message.mutable_slice()->set_grad_hidden_in_place(true);
    return message;
  }
  size_t results_heard() {
    absl::MutexLock lock(&mutex_);
    return results_.size();
  }
  // The worker is lost, and the chunk failed, each callback called once.
  void ExpectLost(const std::string& why) {
    worker_.AwaitHeard();
    worker_.End();  // where nobody has minded
    reader_.join();
    EXPECT_EQ(end_.code(), absl::StatusCode::kUnavailable) << end_;
    EXPECT_THAT(std::string(end_.message()), ::testing::HasSubstr("rank 3 (elsewhere"));
    EXPECT_THAT(std::string(end_.message()), ::testing::HasSubstr(why));
    absl::MutexLock lock(&mutex_);
    ASSERT_EQ(results_.size(), 1u);
    ASSERT_EQ(done_.size(), 1u);
    EXPECT_EQ(done_[0], end_);
  }

  float hidden_[kSlices][kRows * kHidden] = {};
  int32_t targets_[kRows] = {};
  float losses_[kSlices][kRows] = {};
  kernels::Slice slices_[kSlices];
  kernels::Chunk chunk_;
  RowRegions regions_{4, [] {}};
  PlayedWorker worker_;
  WorkerStream stream_;
  std::thread reader_;
  absl::Status end_;
  absl::Mutex mutex_;
  std::vector<absl::Status> results_ ABSL_GUARDED_BY(mutex_), done_ ABSL_GUARDED_BY(mutex_);
};

// ---- Buffers of a worker ----

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

// ---- What is known of a worker ----
// What the leader knows of a worker: memory, traffic, metrics.

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

// ---- Workers that fail ----
// The worker does what it must not: it is lost, and all that is under way fails once.

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

TEST_F(WorkerStreamTest, HiddenStatesOfATeacherAreNamedOrSent) {
  const uint64_t region = ShareHidden();
  std::vector<float> elsewhere(kRows * kHidden, 0.5f);
  // The first slice's are those of the second slice's rows, which lie in shared memory.
  slices_[0].teacher_hidden = hidden_[1];
  slices_[1].teacher_hidden = elsewhere.data();
  Submit(/*is_part=*/true, {.id = 5, .hidden_size = kHidden});
  EXPECT_EQ(worker_.start().teacher(), 5u);
  const v1::ChunkSlice& named = worker_.slices()[0];
  EXPECT_EQ(named.teacher_hidden_at().region(), region);
  EXPECT_EQ(named.teacher_hidden_at().offset(), sizeof(hidden_[0]));
  EXPECT_TRUE(named.teacher_hidden().empty());
  const v1::ChunkSlice& sent = worker_.slices()[1];
  EXPECT_FALSE(sent.has_teacher_hidden_at());
  EXPECT_EQ(sent.teacher_hidden(),
            std::string(reinterpret_cast<const char*>(elsewhere.data()), elsewhere.size() * sizeof(float)));
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

// Memory of a backend that leaves ReadBytes and WriteBytes as they are.
class OfTheDeviceAlone final : public kernels::RetainedMemory {
 public:
  int64_t size() const override { return kSliceBytes; }
};

TEST_F(WorkerStreamTest, RetainedRowsThatCannotBeReadAreALoss) {
  OfTheDeviceAlone retained;
  chunk_.retained = &retained;
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

// ---- Tensors in pieces ----
// Tensors of a worker that the leader reads and writes in pieces: several are under way at once, not more,
// and an error is that of the first piece that fails.

constexpr int64_t kWideHidden = int64_t{1} << 18;  // so that a piece has four rows
constexpr size_t kRowBytes = kWideHidden * sizeof(float);
constexpr int64_t kPieceRows = kPieceBytes / static_cast<int64_t>(kRowBytes);
constexpr int64_t kVocab = 40;
constexpr auto kFloat = kernels::DType::kFloat32;
constexpr kernels::TensorId kWeight = {kernels::Param::kWeight, kernels::Role::kValue};

// A worker that answers the oldest request when as many wait as may be under way, or no more are to come.
class PatientWorker final : public WorkerTransport {
 public:
  // `all`: requests that will come. `answer` fills an answer in; on the stream's reading thread.
  PatientWorker(int all, std::function<void(const v1::Request&, v1::Answer&)> answer)
      : all_(all), answer_(std::move(answer)) {}

  bool Read(v1::FromWorker* message) override {
    v1::Request request;
    {
      absl::MutexLock lock(&mutex_);
      const auto due = [this] {
        mutex_.AssertHeld();
        const bool enough = waiting_.size() >= kPiecesUnderWay || came_ >= all_ || hurried_;
        return ended_ || (enough && !waiting_.empty());
      };
      mutex_.Await(absl::Condition(&due));
      if (ended_) return false;
      request = std::move(waiting_.front());
      waiting_.pop_front();
    }
    message->mutable_answer()->Clear();
    message->mutable_answer()->set_request(request.id());
    if (!request.destroy()) answer_(request, *message->mutable_answer());
    return true;
  }
  bool Write(const v1::ToWorker& message) override {
    absl::MutexLock lock(&mutex_);
    if (!message.request().destroy()) ++came_;
    hurried_ = hurried_ || message.request().destroy();
    waiting_.push_back(message.request());
    most_ = std::max(most_, waiting_.size());
    return true;
  }
  void Cancel() override {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
  }
  // From now on every request is answered at once.
  void Hurry() {
    absl::MutexLock lock(&mutex_);
    hurried_ = true;
  }
  size_t most() {
    absl::MutexLock lock(&mutex_);
    return most_;
  }
  int came() {
    absl::MutexLock lock(&mutex_);
    return came_;
  }

 private:
  const int all_;
  const std::function<void(const v1::Request&, v1::Answer&)> answer_;
  absl::Mutex mutex_;
  std::deque<v1::Request> waiting_ ABSL_GUARDED_BY(mutex_);
  int came_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t most_ ABSL_GUARDED_BY(mutex_) = 0;
  bool hurried_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// A head of a played worker.
class Remote {
 public:
  Remote(int all, std::function<void(const v1::Request&, v1::Answer&)> answer)
      : worker_(all, std::move(answer)),
        stream_(std::make_shared<WorkerStream>(v1::Hello(), &worker_)),
        head_(std::make_unique<RemoteHead>(
            kernels::HeadConfig{.hidden_size = kWideHidden, .vocab_size = kVocab, .compute_dtype = kFloat}, 1,
            v1::HeadDescription(), stream_)),
        reader_([this] { stream_->Run([](const absl::Status&) {}, [](const std::string&) {}); }) {}
  ~Remote() {
    head_.reset();
    worker_.Cancel();
    reader_.join();
  }
  PatientWorker& worker() { return worker_; }
  RemoteHead& head() { return *head_; }

 private:
  PatientWorker worker_;
  std::shared_ptr<WorkerStream> stream_;
  std::unique_ptr<RemoteHead> head_;
  std::thread reader_;
};

// What row `row` holds everywhere.
char Content(int64_t row) { return static_cast<char>(row + 1); }

std::string Rows(int64_t first, int64_t rows) {
  std::string bytes;
  for (int64_t row = first; row < first + rows; ++row) bytes.append(kRowBytes, Content(row));
  return bytes;
}

absl::Span<const uint8_t> BytesOf(const std::string& bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

TEST(RemoteBackendTest, PiecesOfAReadAreUnderWayTogether) {
  constexpr int64_t kFirst = 3, kCount = 35;  // nine pieces, the last with three rows
  Remote remote(9, [](const v1::Request& request, v1::Answer& answer) {
    answer.set_payload(Rows(request.read().row_begin(), request.read().rows()));
  });
  std::string out(kCount * kRowBytes, 0);
  const absl::Status status = remote.head().ReadTensor(kWeight, kFirst, kCount, kFloat,
                                                       {reinterpret_cast<uint8_t*>(out.data()), out.size()});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(out, Rows(kFirst, kCount));
  EXPECT_EQ(remote.worker().came(), 9);
  EXPECT_EQ(remote.worker().most(), kPiecesUnderWay);
}

TEST(RemoteBackendTest, SoAreThoseOfAWriteAndAnAddition) {
  for (const bool add : {false, true}) {
    SCOPED_TRACE(add ? "AddGradient" : "WriteTensor");
    absl::Mutex mutex;
    std::string got;
    Remote remote(10, [&](const v1::Request& request, v1::Answer&) {
      const v1::TensorAccess& access = add ? request.add() : request.write();
      absl::MutexLock lock(&mutex);
      EXPECT_EQ(static_cast<size_t>(access.row_begin()) * kRowBytes, got.size());
      EXPECT_EQ(access.scale(), add ? 0.5f : 0.0f);
      got += access.payload();
    });
    const std::string in = Rows(0, kVocab);
    const absl::Status status =
        add ? remote.head().AddGradient(kernels::Param::kWeight, 0, kVocab, kFloat, 0.5f, BytesOf(in))
            : remote.head().WriteTensor(kWeight, 0, kVocab, kFloat, BytesOf(in));
    ASSERT_TRUE(status.ok()) << status;
    absl::MutexLock lock(&mutex);
    EXPECT_EQ(got, in);
    EXPECT_EQ(remote.worker().most(), kPiecesUnderWay);
  }
}

TEST(RemoteBackendTest, TheFirstPieceThatFailsIsTheError) {
  for (const int64_t failing : {0, 1, 8, 9}) {
    SCOPED_TRACE(failing);
    Remote remote(10, [failing](const v1::Request& request, v1::Answer& answer) {
      const int64_t piece = request.write().row_begin() / kPieceRows;
      if (piece < failing) return;
      answer.mutable_status()->set_code(static_cast<int>(absl::StatusCode::kInternal));
      answer.mutable_status()->set_message(absl::StrCat("piece ", piece));
    });
    // With the last of those that may be under way comes the error, and nothing after it.
    if (failing + static_cast<int64_t>(kPiecesUnderWay) < 10) remote.worker().Hurry();
    const std::string in = Rows(0, kVocab);
    EXPECT_EQ(remote.head().WriteTensor(kWeight, 0, kVocab, kFloat, BytesOf(in)),
              absl::InternalError(absl::StrCat("piece ", failing)));
    EXPECT_LE(remote.worker().came(), failing + static_cast<int64_t>(kPiecesUnderWay));
  }
}

TEST(RemoteBackendTest, RowsOfAnotherLengthAreAnError) {
  Remote remote(10, [](const v1::Request& request, v1::Answer& answer) {
    answer.set_payload(Rows(0, request.read().row_begin() == 0 ? 1 : kPieceRows));
  });
  remote.worker().Hurry();
  std::string out(kVocab * kRowBytes, 0);
  const absl::Status status = remote.head().ReadTensor(kWeight, 0, kVocab, kFloat,
                                                       {reinterpret_cast<uint8_t*>(out.data()), out.size()});
  EXPECT_EQ(status, absl::InternalError("a worker sent rows of another length"));
}

TEST(RemoteBackendTest, AWorkerThatIsLostMeanwhileIsTheError) {
  std::function<void()> lose;
  Remote remote(10, [&lose](const v1::Request& request, v1::Answer&) {
    if (request.write().row_begin() >= 2 * kPieceRows) lose();
  });
  lose = [&] { remote.worker().Cancel(); };
  const std::string in = Rows(0, kVocab);
  const absl::Status status = remote.head().WriteTensor(kWeight, 0, kVocab, kFloat, BytesOf(in));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is lost"));
}

}  // namespace
}  // namespace lossd::ranks::worker_stream_test
