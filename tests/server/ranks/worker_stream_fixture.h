// SPDX-License-Identifier: Apache-2.0
// A worker stream whose worker says what a test has it say, and a chunk for it.
#ifndef LOSSD_TESTS_SERVER_RANKS_WORKER_STREAM_FIXTURE_H_
#define LOSSD_TESTS_SERVER_RANKS_WORKER_STREAM_FIXTURE_H_

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
#include "server/ranks/worker_stream.h"

namespace lossd::ranks::testing {

inline constexpr size_t kHidden = 4;
inline constexpr int64_t kRows = 2;  // of each slice
inline constexpr size_t kSlices = 2;

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

}  // namespace lossd::ranks::testing

#endif  // LOSSD_TESTS_SERVER_RANKS_WORKER_STREAM_FIXTURE_H_
