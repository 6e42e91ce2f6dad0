// SPDX-License-Identifier: Apache-2.0
// Drives one stream of the engine from slices to its end, as a call of LossService does.
#ifndef LOSSD_TESTS_FUZZ_LOSS_STREAMS_H_
#define LOSSD_TESTS_FUZZ_LOSS_STREAMS_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/payload_codec.h"
#include "server/engine/stream.h"
#include "server/rpc/compute_loss_call.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {

// Takes what a stream reports, and makes messages of it. Thread-safe.
class StreamResults final : public engine::StreamObserver {
 public:
  // `places`: of the call's slices; outlives the stream.
  explicit StreamResults(rpc::SlicePlaces* places) : places_(places) {}

  void OnMemory(absl::AnyInvocable<void()> receive) override { receive(); }
  void OnSlice(engine::SliceOutput output) override {
    FUZZ_CHECK(!finished_.HasBeenNotified(), "a slice after the end");
    const int64_t rows = output.rows.size(), bytes = output.grad_hidden ? output.grad_bytes : 0;
    v1::ComputeLossResponse answer;
    const auto payload = wire::Decode(places_->Answer(std::move(output)), &answer);
    FUZZ_CHECK(payload.ok(), payload.status().ToString());
    FUZZ_CHECK(static_cast<int64_t>(payload->size()) == (answer.slice().in_region() ? 0 : bytes),
               absl::StrCat(payload->size(), " bytes of gradients in the message"));
    absl::MutexLock lock(&mutex_);
    rows_ += rows;
  }
  void OnFinished(absl::Status status, const engine::StreamSummary& summary) override {
    status_ = std::move(status);
    summary_ = summary;
    finished_.Notify();  // aborts if called twice
  }

  const absl::Status& Wait() {
    finished_.WaitForNotification();
    return status_;
  }
  const engine::StreamSummary& summary() const { return summary_; }
  int64_t rows() {
    absl::MutexLock lock(&mutex_);
    return rows_;
  }

 private:
  rpc::SlicePlaces* const places_;
  absl::Mutex mutex_;
  int64_t rows_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_;
  engine::StreamSummary summary_;
  absl::Notification finished_;
};

// Hands a slice over and waits until it is queued or the stream has ended. Its hidden states may have any
// size.
inline void SendSlice(engine::Stream& stream, engine::IncomingSlice slice) {
  struct Sent {
    ~Sent() { over->Notify(); }
    std::shared_ptr<absl::Notification> over;
  };
  auto over = std::make_shared<absl::Notification>();
  auto sent = std::make_unique<Sent>();
  sent->over = over;
  slice.on_queued = [sent = std::move(sent)](int64_t) mutable { sent.reset(); };
  stream.Receive(std::move(slice));
  over->WaitForNotification();
}

inline engine::IncomingSlice SliceOf(engine::RowRange rows, std::string hidden) {
  engine::IncomingSlice slice;
  slice.rows = rows;
  slice.bytes = static_cast<int64_t>(hidden.size());
  slice.copy = [hidden = std::move(hidden)](uint8_t* to) { std::memcpy(to, hidden.data(), hidden.size()); };
  return slice;
}

}  // namespace lossd::fuzz

#endif  // LOSSD_TESTS_FUZZ_LOSS_STREAMS_H_
