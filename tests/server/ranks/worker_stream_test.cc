// SPDX-License-Identifier: Apache-2.0
// The leader's end of a stream whose worker does what it must not: it is lost, and all that is under way
// fails once.
#include "server/ranks/worker_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lossd::ranks {
namespace {

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
  void Submit(bool is_part = false) {
    stream_.Submit({.id = 1, .hidden_size = kHidden, .is_part = is_part}, &chunk_,
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
    EXPECT_THAT(std::string(end_.message()), HasSubstr("rank 3 (elsewhere"));
    EXPECT_THAT(std::string(end_.message()), HasSubstr(why));
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
  EXPECT_EQ(stream_.state().memory.peak_total, 77);
}

TEST_F(WorkerStreamTest, TrafficIsCounted) {
  Submit();
  Say(SliceResults(1, 0));
  Say(SliceResults(1, 1));
  Say(Results(1));
  Say(Done(1));
  worker_.AwaitHeard();
  const RankTraffic once = stream_.state().traffic;
  EXPECT_EQ(once.chunks, 1);
  EXPECT_EQ(once.rows, kSlices * kRows);
  const int64_t payload = kSlices * kRows * kHidden * sizeof(float);
  EXPECT_GT(once.sent_bytes, payload);
  EXPECT_GT(once.received_bytes, payload);
  EXPECT_LT(once.sent_bytes, payload + 400);
  EXPECT_LT(once.received_bytes, payload + 400);
  Submit();  // number 2, which fails
  v1::FromWorker failed = Results(2);
  failed.mutable_results()->mutable_status()->set_code(static_cast<int>(absl::StatusCode::kInternal));
  Say(failed);
  v1::FromWorker done = Done(2);
  done.mutable_done()->mutable_status()->set_code(static_cast<int>(absl::StatusCode::kInternal));
  Say(done);
  worker_.AwaitHeard();
  const RankTraffic twice = stream_.state().traffic;
  EXPECT_EQ(twice.chunks, 1);
  EXPECT_EQ(twice.rows, once.rows);
  EXPECT_EQ(twice.sent_bytes, 2 * once.sent_bytes);
}

v1::FromWorker MetricsWith(const std::string& help) {
  v1::FromWorker message;
  v1::MetricFamily* const family = message.mutable_metrics()->add_families();
  family->set_name("lossd_something");
  family->set_help(help);
  return message;
}

TEST_F(WorkerStreamTest, MetricsAreThoseThatCameLast) {
  EXPECT_EQ(stream_.state().metrics.families_size(), 0);
  Say(MetricsWith("first"));
  Say(MetricsWith("second"));
  worker_.AwaitHeard();
  const v1::Metrics metrics = stream_.state().metrics;
  ASSERT_EQ(metrics.families_size(), 1);
  EXPECT_EQ(metrics.families(0).help(), "second");
}

TEST_F(WorkerStreamTest, MoreMetricsThanThereCanBeAreALoss) {
  Submit();
  Say(MetricsWith(std::string(kMostMetricsBytes, 'x')));
  ExpectLost("too many metrics");
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
}  // namespace lossd::ranks
