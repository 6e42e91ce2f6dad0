// Test helpers for streams whose slices wait for room.
#ifndef LOSSD_TESTS_SERVER_ENGINE_ROOM_CLIENT_H_
#define LOSSD_TESTS_SERVER_ENGINE_ROOM_CLIENT_H_

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"

namespace lossd::engine {

// A request for room. Thread-safe.
class Room {
 public:
  Room() : state_(std::make_shared<State>()) {}

  RoomWaiter Waiter() {
    return [state = state_, ended = std::make_unique<Ended>(state_)](StagingBuffer buffer) {
      absl::MutexLock lock(&state->mutex);
      state->buffer = std::move(buffer);
      state->granted = true;
    };
  }
  // The room; empty if the stream ended first.
  StagingBuffer Wait() {
    absl::MutexLock lock(&state_->mutex);
    state_->mutex.Await(absl::Condition(state_.get(), &State::IsOver));
    return std::move(state_->buffer);
  }
  bool granted() const {
    absl::MutexLock lock(&state_->mutex);
    return state_->granted;
  }

 private:
  struct State {
    absl::Mutex mutex;
    StagingBuffer buffer ABSL_GUARDED_BY(mutex);
    bool granted ABSL_GUARDED_BY(mutex) = false;
    bool ended ABSL_GUARDED_BY(mutex) = false;
    bool IsOver() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return granted || ended; }
  };
  struct Ended {
    explicit Ended(std::shared_ptr<State> s) : state(std::move(s)) {}
    ~Ended() {
      absl::MutexLock lock(&state->mutex);
      state->ended = true;
    }
    std::shared_ptr<State> state;
  };
  std::shared_ptr<State> state_;
};

// Sends rows as one slice, once there is room for them. False if the stream ended.
inline bool SendSlice(Stream& stream, RowRange rows, const std::vector<float>& hidden) {
  Room room;
  const auto bytes = static_cast<int64_t>(hidden.size() * sizeof(float));
  stream.RequestRoom(rows, bytes, room.Waiter());
  StagingBuffer buffer = room.Wait();
  if (!buffer) return false;
  std::memcpy(buffer.data(), hidden.data(), hidden.size() * sizeof(float));
  stream.Submit(rows, std::move(buffer), bytes);
  return true;
}

// Collects the results of a stream row by row.
class RowCollector : public StreamObserver {
 public:
  explicit RowCollector(int64_t hidden_size) : hidden_size_(static_cast<size_t>(hidden_size)) {}

  void OnSlice(SliceOutput output) override {
    absl::MutexLock lock(&mutex_);
    EXPECT_FALSE(finished_.HasBeenNotified()) << "a slice after the end";
    for (int64_t i = 0; i < output.rows.size(); ++i) {
      const int64_t row = output.rows.begin + i;
      EXPECT_FALSE(losses_.contains(row)) << "row " << row << " twice";
      losses_[row] = output.loss.empty() ? 0.0f : output.loss[static_cast<size_t>(i)];
      if (!output.grad_hidden) continue;
      const auto* grad =
          reinterpret_cast<const float*>(output.grad_hidden.data()) + static_cast<size_t>(i) * hidden_size_;
      grads_[row].assign(grad, grad + hidden_size_);
    }
  }
  void OnFinished(absl::Status status, const StreamSummary& summary) override {
    status_ = std::move(status);
    summary_ = summary;
    finished_.Notify();  // aborts if called twice
  }
  const absl::Status& Wait() {
    finished_.WaitForNotification();
    return status_;
  }
  bool finished() const { return finished_.HasBeenNotified(); }
  const StreamSummary& summary() const { return summary_; }
  std::map<int64_t, float> losses() {
    absl::MutexLock lock(&mutex_);
    return losses_;
  }
  std::map<int64_t, std::vector<float>> grads() {
    absl::MutexLock lock(&mutex_);
    return grads_;
  }

 private:
  const size_t hidden_size_;
  absl::Mutex mutex_;
  std::map<int64_t, float> losses_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, std::vector<float>> grads_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_;
  StreamSummary summary_;
  absl::Notification finished_;
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_ROOM_CLIENT_H_
