// SPDX-License-Identifier: Apache-2.0
// Test helper: a slice that has been handed to a stream, and what became of it.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SENT_SLICE_H_
#define LOSSD_TESTS_SERVER_ENGINE_SENT_SLICE_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/head_session.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// Thread-safe.
class SentSlice {
 public:
  // Hands over rows with their hidden states. `extra_bytes`: how many more the caller claims to have.
  SentSlice(Stream& stream, RowRange rows, std::vector<float> hidden, int64_t extra_bytes = 0) {
    const auto bytes = static_cast<int64_t>(hidden.size() * sizeof(float));
    stream.Receive({.rows = rows,
                    .bytes = bytes + extra_bytes,
                    .copy =
                        [state = state_, hidden = std::move(hidden)](uint8_t* to) {
                          std::memcpy(to, hidden.data(), hidden.size() * sizeof(float));
                          absl::MutexLock lock(&state->mutex);
                          state->copied = true;
                        },
                    .on_queued = Queued()});
  }
  // Hands over rows that the engine holds.
  SentSlice(Stream& stream, RowRange rows) { stream.Receive({.rows = rows, .on_queued = Queued()}); }

  // True if there was memory for it.
  bool copied() const {
    absl::MutexLock lock(&state_->mutex);
    return state_->copied;
  }
  bool queued() const {
    absl::MutexLock lock(&state_->mutex);
    return state_->queued;
  }
  // Waits until it is queued; false if the stream ended first.
  bool Wait() const {
    absl::MutexLock lock(&state_->mutex);
    state_->mutex.Await(absl::Condition(state_.get(), &State::IsOver));
    return state_->queued;
  }

 private:
  struct State {
    absl::Mutex mutex;
    bool copied ABSL_GUARDED_BY(mutex) = false;
    bool queued ABSL_GUARDED_BY(mutex) = false;
    bool ended ABSL_GUARDED_BY(mutex) = false;
    bool IsOver() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return queued || ended; }
  };
  struct Ended {
    explicit Ended(std::shared_ptr<State> s) : state(std::move(s)) {}
    ~Ended() {
      absl::MutexLock lock(&state->mutex);
      state->ended = true;
    }
    std::shared_ptr<State> state;
  };
  // Its destruction tells that the slice went away.
  absl::AnyInvocable<void(int64_t)> Queued() {
    return [state = state_, ended = std::make_unique<Ended>(state_)](int64_t) {
      absl::MutexLock lock(&state->mutex);
      state->queued = true;
    };
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Sends rows as one slice and waits until it is queued. False if the stream ended.
inline bool SendSlice(Stream& stream, RowRange rows, const std::vector<float>& hidden) {
  return SentSlice(stream, rows, hidden).Wait();
}

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_SENT_SLICE_H_
