// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/head_metrics.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/clocks/clock.h"
#include "server/metrics/families.h"

namespace lossd::metrics {

using prometheus::MetricFamily;
using prometheus::MetricType;

HeadMetrics::Head& HeadMetrics::At(absl::string_view head) {
  const auto it = heads_.find(head);
  return it != heads_.end() ? it->second : heads_.emplace(std::string(head), Head()).first->second;
}

void HeadMetrics::OnChunkLeft(const engine::ChunkReport& report) {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  Head& head = At(report.head);
  // The next chunk is formed while this one is computed, and no second counts twice.
  const absl::Time begin = std::max(busy_until_, now - absl::Seconds(report.device_seconds));
  head.device_seconds += std::max(0.0, absl::ToDoubleSeconds(now - begin));
  busy_until_ = std::max(busy_until_, now);
}

void HeadMetrics::OnChunk(const engine::ChunkReport& report) {
  absl::MutexLock lock(&mutex_);
  Head& head = At(report.head);
  head.rows += report.rows;
  head.valid_rows += report.valid_rows;
  if (report.loss_rows == 0) return;  // it takes no part in the step
  head.open.loss_sum += report.loss_sum;
  head.open.loss_rows += report.loss_rows;
  head.open.sampling_variance += report.sampling_variance;
  head.open.squared_gradient += report.squared_gradient;
  if (report.gradients != kernels::Gradients::kFiltered) return;
  head.open.dropped_mass += report.dropped_mass;
  head.open.filtered_rows += report.valid_rows;
}

void HeadMetrics::OnStep(const engine::StepReport& report) {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  Head& head = At(report.head);
  Step step = {.number = report.step,
               .closed = now,
               .grad_norm = report.grad_norm,
               .learning_rate = report.learning_rate,
               .rows = report.rows,
               .skipped = report.skipped};
  const OpenStep& sums = head.open;
  if (sums.loss_rows > 0) step.loss = sums.loss_sum / static_cast<double>(sums.loss_rows);
  if (sums.squared_gradient > 0.0)
    step.gradient_error = std::sqrt(sums.sampling_variance / sums.squared_gradient);
  if (sums.filtered_rows > 0)
    step.dropped_probability = sums.dropped_mass / static_cast<double>(sums.filtered_rows);
  if (!head.steps.empty()) step.seconds = absl::ToDoubleSeconds(now - head.steps.front().closed);
  head.open = {};
  head.steps.push_front(step);
  if (head.steps.size() > kSteps) head.steps.pop_back();
}

void HeadMetrics::Forget(absl::string_view head) {
  absl::MutexLock lock(&mutex_);
  const auto it = heads_.find(head);
  if (it == heads_.end()) return;
  rows_of_gone_heads_ += it->second.rows;
  heads_.erase(it);
}

std::map<std::string, HeadMetrics::Summary> HeadMetrics::Summaries() const {
  absl::ReaderMutexLock lock(&mutex_);
  std::map<std::string, Summary> summaries;
  for (const auto& [name, head] : heads_) {
    Summary& summary = summaries[name];
    summary.rows = head.rows;
    if (!head.steps.empty()) summary.last = head.steps.front();
  }
  return summaries;
}

std::vector<HeadMetrics::Step> HeadMetrics::Steps(absl::string_view head) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto it = heads_.find(head);
  if (it == heads_.end()) return {};
  return {it->second.steps.begin(), it->second.steps.end()};
}

int64_t HeadMetrics::total_rows() const {
  absl::ReaderMutexLock lock(&mutex_);
  int64_t rows = rows_of_gone_heads_;
  for (const auto& [name, head] : heads_) rows += head.rows;
  return rows;
}

void HeadMetrics::Collect(std::vector<MetricFamily>* families) const {
  const auto gauge = [](const char* name, const char* help) {
    return MakeFamily(name, help, MetricType::Gauge);
  };
  MetricFamily rows = MakeFamily("lossd_rows_total", "Rows computed, by head.", MetricType::Counter);
  MetricFamily device = MakeFamily(
      "lossd_head_device_seconds_total",
      "Time in which a chunk of the head was on the device; where chunks of several heads overlap, it "
      "counts for the first of them to leave.",
      MetricType::Counter);
  MetricFamily valid_rows = MakeFamily(
      "lossd_valid_rows_total", "Rows computed that have a target, by head: tokens as trainers count them.",
      MetricType::Counter);
  MetricFamily step = gauge("lossd_head_step", "Number of the head's last closed step.");
  MetricFamily step_rows = gauge("lossd_head_step_rows", "Rows in the gradients of the head's last step.");
  MetricFamily seconds = gauge("lossd_head_step_seconds",
                               "Time between the closing of the head's last step and of the one before it.");
  MetricFamily loss =
      gauge("lossd_head_loss",
            "Mean loss of the rows whose gradients were computed for the head's last step, in "
            "nats, row weights applied; rows that were sent twice count twice.");
  MetricFamily norm = gauge("lossd_head_gradient_norm",
                            "2-norm of the head's weight gradients in its last step, before clipping.");
  MetricFamily error = gauge("lossd_head_gradient_error_ratio",
                             "Predicted relative error of the sampled gradients of the head's last step.");
  MetricFamily dropped = gauge("lossd_head_dropped_probability",
                               "Probability left out of the filtered gradients of the head's last step, mean "
                               "per valid row.");
  MetricFamily rate = gauge("lossd_head_learning_rate", "Learning rate of the head's last step.");
  {
    absl::ReaderMutexLock lock(&mutex_);
    for (const auto& [name, head] : heads_) {
      const Labels labels = {{"head", name}};
      AddSample(&rows, labels, static_cast<double>(head.rows));
      AddSample(&device, labels, head.device_seconds);
      AddSample(&valid_rows, labels, static_cast<double>(head.valid_rows));
      if (head.steps.empty()) continue;
      const Step& last = head.steps.front();
      AddSample(&step, labels, static_cast<double>(last.number));
      AddSample(&step_rows, labels, static_cast<double>(last.rows));
      if (last.seconds.has_value()) AddSample(&seconds, labels, *last.seconds);
      if (last.loss.has_value()) AddSample(&loss, labels, *last.loss);
      if (last.gradient_error.has_value()) AddSample(&error, labels, *last.gradient_error);
      if (last.dropped_probability.has_value()) AddSample(&dropped, labels, *last.dropped_probability);
      AddSample(&norm, labels, last.grad_norm);
      AddSample(&rate, labels, last.learning_rate);
    }
  }
  for (MetricFamily* family :
       {&rows, &device, &valid_rows, &step, &step_rows, &seconds, &loss, &norm, &rate, &error, &dropped}) {
    families->push_back(std::move(*family));
  }
}

// ---- Saves ----

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
