// SPDX-License-Identifier: Apache-2.0
// WatchHistory: samples and what has changed between them. Its picture is in watch_view.cc.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "client/cli/describe.h"
#include "client/cli/watch_samples.h"
#include "client/cli/watch_view.h"
#include "kernels/clocks/clock.h"

namespace lossd::cli {
namespace {

std::map<std::string, uint64_t> RowsByHead(const WatchSample& sample) {
  std::map<std::string, uint64_t> rows;
  for (const v1::HeadDescription& head : sample.heads) rows[head.spec().name()] = head.total_rows();
  return rows;
}

void Push(double value, size_t length, std::deque<double>* values) {
  values->push_back(value);
  while (values->size() > length) values->pop_front();
}

}  // namespace

std::optional<double> ValueOf(const std::vector<MetricSample>& metrics, const std::string& name,
                              const std::string& label, const std::string& value) {
  std::optional<double> sum;
  for (const MetricSample& sample : metrics) {
    if (sample.name != name) continue;
    if (!label.empty()) {
      const auto found = sample.labels.find(label);
      if (found == sample.labels.end() || found->second != value) continue;
    }
    sum = sum.value_or(0) + sample.value;
  }
  return sum;
}

uint64_t QueuedSlices(const WatchSample& sample) {
  uint64_t slices = 0;
  for (const v1::HeadDescription& head : sample.heads) slices += head.queued_slices();
  return slices;
}

void WatchHistory::Add(WatchSample sample) {
  last_ = sample;
  if (!sample.status.ok()) return Push(0, length_, &rows_per_second_);
  previous_ = std::nullopt;
  if (good_.has_value() && good_->server.incarnation() == sample.server.incarnation())
    previous_ = std::move(good_);
  good_ = std::move(sample);
  const std::map<std::string, uint64_t> present = RowsByHead(*good_);
  for (auto it = heads_.begin(); it != heads_.end();)
    it = present.count(it->first) > 0 ? ++it : heads_.erase(it);
  AddRates();
  AddLosses();
}

void WatchHistory::AddRates() {
  for (auto& [name, head] : heads_) {
    head.rows_per_second = 0;
    head.device_share = std::nullopt;
  }
  if (!previous_.has_value()) return;
  const std::map<std::string, uint64_t> before = RowsByHead(*previous_);
  double total = 0;
  for (const auto& [name, rows] : RowsByHead(*good_)) {
    HeadHistory& head = heads_[name];
    if (const auto busy = Growth(kHeadDeviceSeconds, "head", name); busy.has_value() && Seconds() > 0) {
      head.device_share = std::max(0.0, *busy / Seconds());
    }
    const auto it = before.find(name);
    if (it == before.end() || it->second > rows || Seconds() <= 0) continue;
    head.rows_per_second = static_cast<double>(rows - it->second) / Seconds();
    total += head.rows_per_second;
    if (rows > it->second) head.active = good_->time;
  }
  Push(total, length_, &rows_per_second_);
  if (const auto share = DeviceShare(); share.has_value()) Push(*share, length_, &device_share_);
}

void WatchHistory::AddLosses() {
  if (!good_->metrics.has_value()) return;
  for (const v1::HeadDescription& each : good_->heads) {
    const std::string& name = each.spec().name();
    const std::optional<double> step = ValueOf(*good_->metrics, kHeadStep, "head", name);
    const std::optional<double> loss = ValueOf(*good_->metrics, kHeadLoss, "head", name);
    HeadHistory& head = heads_[name];
    if (!step.has_value() || !loss.has_value() || head.step == step) continue;
    head.step = step;
    Push(*loss, length_, &head.losses);
  }
}

double WatchHistory::Seconds() const {
  return previous_.has_value() ? absl::ToDoubleSeconds(good_->time - previous_->time) : 0;
}

std::optional<double> WatchHistory::Growth(const std::string& metric, const std::string& label,
                                           const std::string& value) const {
  if (!previous_.has_value() || !previous_->metrics.has_value() || !good_->metrics.has_value())
    return std::nullopt;
  const std::optional<double> now = ValueOf(*good_->metrics, metric, label, value);
  if (!now.has_value()) return std::nullopt;
  return *now - ValueOf(*previous_->metrics, metric, label, value).value_or(0);
}

double WatchHistory::RowsPerSecond(const std::string& head) const {
  const auto it = heads_.find(head);
  return it == heads_.end() ? 0 : it->second.rows_per_second;
}

std::optional<double> WatchHistory::DeviceShare() const {
  const std::optional<double> busy = good_.has_value() ? Growth(kBusySeconds) : std::nullopt;
  if (!busy.has_value() || Seconds() <= 0) return std::nullopt;
  return std::clamp(*busy / Seconds(), 0.0, 1.0);
}

nlohmann::ordered_json WatchHistory::Json() const {
  nlohmann::ordered_json json;
  json["time"] =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", clocks::OnTheWall(last_->time), absl::UTCTimeZone());
  if (!last_->status.ok()) {
    json["error"] = last_->status.message();
    return json;
  }
  json["server"] = ToJson(good_->server);
  json["rows_per_second"] = RowsPerSecond();
  if (const auto share = DeviceShare(); share.has_value()) json["device_share"] = *share;
  json["round_trip_seconds"] = good_->round_trip_seconds;
  json["heads"] = nlohmann::ordered_json::array();
  for (const v1::HeadDescription& head : good_->heads) {
    nlohmann::ordered_json& entry = json["heads"].emplace_back(ToJson(head));
    entry["rows_per_second"] = RowsPerSecond(head.spec().name());
    const auto found = heads_.find(head.spec().name());
    if (found == heads_.end()) continue;
    if (!found->second.losses.empty()) entry["loss"] = found->second.losses.back();
    if (found->second.device_share.has_value()) entry["device_share"] = *found->second.device_share;
  }
  return json;
}

}  // namespace lossd::cli
