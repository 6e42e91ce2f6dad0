// Test helpers for streams whose slices wait for room.
#ifndef LOSSD_TESTS_SERVER_ENGINE_ROOM_CLIENT_H_
#define LOSSD_TESTS_SERVER_ENGINE_ROOM_CLIENT_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
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

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_ROOM_CLIENT_H_
