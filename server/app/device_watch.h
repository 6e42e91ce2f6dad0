// SPDX-License-Identifier: Apache-2.0
// Logs how chunks are computed, and notices when the device is lost: a backend whose device is gone answers
// UNAVAILABLE from then on.
//
// Thread-safe.
#ifndef LOSSD_SERVER_APP_DEVICE_WATCH_H_
#define LOSSD_SERVER_APP_DEVICE_WATCH_H_

#include <atomic>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "server/admin/choice_log.h"
#include "server/engine/engine_observer.h"

namespace lossd::app {

class DeviceWatch final : public engine::EngineObserver {
 public:
  // `on_lost` is called once, on a thread of the engine's, and must not call into it.
  explicit DeviceWatch(absl::AnyInvocable<void(const absl::Status&)> on_lost)
      : on_lost_(std::move(on_lost)) {}

  bool lost() const { return lost_; }

  void OnChoices(const engine::ChoicesReport& report) override {
    admin::LogChoices("chunk computed otherwise than the last", report.head, report.choices);
  }
  // These are for the metrics.
  void OnChunk(const engine::ChunkReport&) override {}
  void OnChunkLeft(const engine::ChunkReport&) override {}
  void OnContribution(const engine::ContributionReport&) override {}
  void OnStep(const engine::StepReport&) override {}
  void OnDeviceError(const absl::Status& status) override {
    if (absl::IsUnavailable(status) && !lost_.exchange(true)) on_lost_(status);
  }

 private:
  absl::AnyInvocable<void(const absl::Status&)> on_lost_;
  std::atomic<bool> lost_{false};
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_DEVICE_WATCH_H_
