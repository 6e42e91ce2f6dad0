// Passes the engine's events on, logs how chunks are computed, and notices when the device is lost: a backend
// whose device is gone answers UNAVAILABLE from then on.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RPC_DEVICE_WATCH_H_
#define LOSSD_SERVER_RPC_DEVICE_WATCH_H_

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/engine/engine.h"
#include "server/rpc/choice_log.h"

namespace lossd::rpc {

class DeviceWatch final : public engine::EngineObserver {
 public:
  // `next` outlives this. `on_lost` is called once, on a thread of the engine's, and must not call into it.
  DeviceWatch(engine::EngineObserver* next, absl::AnyInvocable<void(const absl::Status&)> on_lost)
      : next_(next), on_lost_(std::move(on_lost)) {}

  bool lost() const { return lost_; }

  void OnChunk(absl::string_view head, int64_t slices, int64_t rows, int64_t valid_rows,
               kernels::Algorithm algorithm, double compute_seconds) override {
    next_->OnChunk(head, slices, rows, valid_rows, algorithm, compute_seconds);
  }
  void OnDroppedMass(absl::string_view head, double mass) override { next_->OnDroppedMass(head, mass); }
  void OnSlice(absl::string_view head, double queue_seconds) override { next_->OnSlice(head, queue_seconds); }
  void OnContribution(absl::string_view head, int64_t added_rows) override {
    next_->OnContribution(head, added_rows);
  }
  void OnStep(absl::string_view head, bool skipped) override { next_->OnStep(head, skipped); }
  void OnChoices(absl::string_view head, absl::Span<const kernels::Choice> choices) override {
    LogChoices("chunk computed otherwise than the last", head, choices);
    next_->OnChoices(head, choices);
  }
  void OnDeviceError(const absl::Status& status) override {
    next_->OnDeviceError(status);
    if (absl::IsUnavailable(status) && !lost_.exchange(true)) on_lost_(status);
  }

 private:
  engine::EngineObserver* const next_;
  absl::AnyInvocable<void(const absl::Status&)> on_lost_;
  std::atomic<bool> lost_{false};
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_DEVICE_WATCH_H_
