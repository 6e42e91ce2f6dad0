// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/save_metrics.h"

#include <utility>

#include "kernels/clocks/clock.h"
#include "server/metrics/families.h"

namespace lossd::metrics {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

prometheus::Histogram::BucketBoundaries SaveBuckets() {
  return {0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0};
}

}  // namespace

SaveMetrics::SaveMetrics(prometheus::Registry& registry)
    : by_result_(
          CounterFamily(registry, "lossd_checkpoint_saves_total",
                        "Checkpoints that were to be saved, by result: ok, failed, cancelled, exists.")),
      saved_(by_result_.Add({{"result", "ok"}})),
      failed_(by_result_.Add({{"result", "failed"}})),
      cancelled_(by_result_.Add({{"result", "cancelled"}})),
      existing_(by_result_.Add({{"result", "exists"}})),
      saved_bytes_(
          CounterFamily(registry, "lossd_checkpoint_saved_bytes_total", "Bytes of saved checkpoints.")
              .Add({})),
      seconds_(HistogramFamily(registry, "lossd_checkpoint_save_seconds",
                               "Time from the start of a save until it was on the disk.")
                   .Add({}, SaveBuckets())),
      buffered_(prometheus::BuildGauge()
                    .Name("lossd_checkpoint_buffered_bytes")
                    .Help("Bytes that the running save has read from the device and not yet written.")
                    .Register(registry)
                    .Add({})),
      removed_(CounterFamily(registry, "lossd_checkpoint_removals_total",
                             "Checkpoints that were removed, by cause: keep, client.")),
      pruned_(removed_.Add({{"cause", "keep"}})),
      deleted_(removed_.Add({{"cause", "client"}})) {}

void SaveMetrics::OnSaved(absl::string_view head, Save save) {
  saved_.Increment();
  saved_bytes_.Increment(static_cast<double>(save.bytes));
  seconds_.Observe(save.seconds);
  save.time = clocks::WallNow();
  absl::MutexLock lock(&mutex_);
  std::deque<Save>& saves = last_[std::string(head)];
  saves.push_front(std::move(save));
  if (saves.size() > kSaves) saves.pop_back();
}

std::vector<SaveMetrics::Save> SaveMetrics::Saves(absl::string_view head) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto saves = last_.find(head);
  if (saves == last_.end()) return {};
  return {saves->second.begin(), saves->second.end()};
}

void SaveMetrics::OnFailed(const absl::Status& status) {
  if (absl::IsCancelled(status)) {
    cancelled_.Increment();
  } else if (absl::IsAlreadyExists(status)) {
    existing_.Increment();
  } else {
    failed_.Increment();
  }
}

void SaveMetrics::OnRemoved(Cause cause, size_t count) {
  (cause == Cause::kPruned ? pruned_ : deleted_).Increment(static_cast<double>(count));
}

void SaveMetrics::ForgetHead(absl::string_view head) {
  absl::MutexLock lock(&mutex_);
  if (const auto save = last_.find(head); save != last_.end()) last_.erase(save);
}

void SaveMetrics::Collect(std::vector<MetricFamily>* families) const {
  MetricFamily step = MakeFamily("lossd_checkpoint_last_step",
                                 "Step of the head's last saved checkpoint, by head.", MetricType::Gauge);
  MetricFamily time = MakeFamily("lossd_checkpoint_last_success_timestamp_seconds",
                                 "When the head's last checkpoint was saved, by head.", MetricType::Gauge);
  absl::ReaderMutexLock lock(&mutex_);
  for (const auto& [head, saves] : last_) {
    const Save& last = saves.front();
    AddSample(&step, {{"head", head}}, static_cast<double>(last.step));
    AddSample(&time, {{"head", head}}, absl::ToDoubleSeconds(last.time - absl::UnixEpoch()));
  }
  families->push_back(std::move(step));
  families->push_back(std::move(time));
}

}  // namespace lossd::metrics
