// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/history.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::metrics {
namespace {

HeadValues NoValues() {
  HeadValues values;
  values.fill(std::numeric_limits<float>::quiet_NaN());
  return values;
}

// "name":[1,null,2.5], of the samples `first` to `last`.
void AppendArray(absl::string_view name, uint64_t first, uint64_t last,
                 absl::FunctionRef<double(uint64_t)> value, std::string* json) {
  absl::StrAppend(json, "\"", name, "\":[");
  for (uint64_t number = first; number <= last; ++number) {
    if (number > first) json->push_back(',');
    const double each = value(number);
    if (!std::isfinite(each)) {
      json->append("null");
    } else if (std::abs(each) >= 1e8) {
      absl::StrAppendFormat(json, "%.2f", each);  // times and bytes
    } else {
      absl::StrAppendFormat(json, "%.6g", each);
    }
  }
  json->push_back(']');
}

}  // namespace

absl::string_view SeriesName(size_t series) {
  constexpr absl::string_view kNames[kSeries] = {
      "rows_per_second",        "bytes_in_per_second",    "bytes_out_per_second", "errors_per_second",
      "device_busy_ratio",      "queued_slices",          "queued_rows",          "open_streams",
      "staging_used_bytes",     "planned_bytes",          "resident_bytes",       "microbatch_seconds_p50",
      "microbatch_seconds_p95", "microbatch_seconds_p99", "receive_seconds_p50",  "receive_seconds_p95",
      "receive_seconds_p99",    "queue_seconds_p50",      "queue_seconds_p95",    "queue_seconds_p99",
      "compute_seconds_p50",    "compute_seconds_p95",    "compute_seconds_p99",  "send_seconds_p50",
      "send_seconds_p95",       "send_seconds_p99"};
  return kNames[series];
}

absl::string_view HeadSeriesName(size_t series) {
  constexpr absl::string_view kNames[kHeadSeries] = {"rows_per_second", "loss", "gradient_norm",
                                                     "learning_rate"};
  return kNames[series];
}

void History::Add(absl::Time time, const Values& values, const std::map<std::string, HeadValues>& heads) {
  absl::MutexLock lock(&mutex_);
  if (samples_.empty()) samples_.resize(kSamples);
  const size_t slot = SlotOf(++last_);
  samples_[slot] = {time, values};
  for (auto track = heads_.begin(); track != heads_.end();) {
    track = heads.contains(track->first) ? std::next(track) : heads_.erase(track);
  }
  for (const auto& [name, of_head] : heads) {
    auto track = heads_.find(name);
    if (track == heads_.end()) {
      if (heads_.size() == kMostHeads) continue;
      track = heads_.emplace(name, Track(kSamples, NoValues())).first;
    }
    track->second[slot] = of_head;
  }
}

std::optional<Values> History::Last() const {
  absl::ReaderMutexLock lock(&mutex_);
  if (last_ == 0) return std::nullopt;
  return samples_[SlotOf(last_)].values;
}

std::string History::Json(uint64_t incarnation, uint64_t after, absl::string_view head) const {
  absl::ReaderMutexLock lock(&mutex_);
  const uint64_t oldest = last_ > kSamples ? last_ - kSamples + 1 : 1;
  const uint64_t first = std::max(oldest, std::min(after, last_) + 1);
  std::string json = absl::StrFormat("{\"incarnation\":\"%016x\",\"interval_seconds\":%g,\"last\":%d,",
                                     incarnation, absl::ToDoubleSeconds(kInterval), last_);
  const auto append = [&](absl::string_view name, absl::FunctionRef<double(uint64_t)> value) {
    mutex_.AssertReaderHeld();
    AppendArray(name, first, last_, value, &json);
  };
  const auto sample = [&](uint64_t number) -> const Sample& {
    mutex_.AssertReaderHeld();
    return samples_[SlotOf(number)];
  };
  append("times",
         [&](uint64_t number) { return absl::ToDoubleSeconds(sample(number).time - absl::UnixEpoch()); });
  json.append(",\"server\":{");
  for (size_t series = 0; series < kSeries; ++series) {
    if (series > 0) json.push_back(',');
    append(SeriesName(series), [&](uint64_t number) { return sample(number).values[series]; });
  }
  json.append("},\"heads\":{");
  bool another = false;
  for (const auto& [name, track] : heads_) {
    if (!head.empty() && name != head) continue;
    absl::StrAppend(&json, another ? "," : "", nlohmann::json(name).dump(), ":{");
    const Track& values = track;  // clang 14 captures no structured binding
    for (size_t series = 0; series < kHeadSeries; ++series) {
      if (series > 0) json.push_back(',');
      append(HeadSeriesName(series), [&](uint64_t number) { return values[SlotOf(number)][series]; });
    }
    json.push_back('}');
    another = true;
  }
  json.append("}}\n");
  return json;
}

}  // namespace lossd::metrics
