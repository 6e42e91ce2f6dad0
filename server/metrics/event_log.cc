// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/event_log.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::metrics {
namespace {

Event MakeEvent(absl::Time now, EventLevel level, absl::string_view kind, absl::string_view head,
                absl::string_view text) {
  return {.first = now,
          .last = now,
          .level = level,
          .kind = std::string(kind),
          .head = errors::Shortened(errors::ValidUtf8(head), EventLog::kTextBytes),
          .text = errors::Shortened(errors::ValidUtf8(text), EventLog::kTextBytes)};
}

std::string TextOf(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone());
}

}  // namespace

absl::string_view Name(EventLevel level) {
  constexpr absl::string_view kNames[] = {"info", "warning", "error"};
  return kNames[static_cast<size_t>(level)];
}

void EventLog::Add(EventLevel level, absl::string_view kind, absl::string_view head, absl::string_view text) {
  Event event = MakeEvent(now_(), level, kind, head, text);
  absl::MutexLock lock(&mutex_);
  Append(std::move(event));
}

void EventLog::Count(EventLevel level, absl::string_view kind, absl::string_view head,
                     absl::string_view text) {
  Event event = MakeEvent(now_(), level, kind, head, text);
  absl::MutexLock lock(&mutex_);
  const auto same = std::find_if(events_.rbegin(), events_.rend(), [&](const Event& each) {
    return each.kind == event.kind && each.head == event.head && each.text == event.text &&
           each.level == event.level && event.last - each.first <= kRun;
  });
  if (same != events_.rend()) {
    event.first = same->first;
    event.count = same->count + 1;
    events_.erase(std::next(same).base());
  }
  Append(std::move(event));
}

void EventLog::Append(Event event) {
  event.id = ++last_id_;
  events_.push_back(std::move(event));
  if (events_.size() <= kMost) return;
  dropped_id_ = events_.front().id;
  events_.pop_front();
}

EventLog::Reading EventLog::After(uint64_t id, size_t most) const {
  absl::ReaderMutexLock lock(&mutex_);
  Reading reading{.last_id = last_id_, .missed = dropped_id_ > id};
  for (auto event = events_.rbegin(); event != events_.rend() && event->id > id; ++event) {
    if (reading.events.size() == most) {
      reading.missed = true;
      break;
    }
    reading.events.push_back(*event);
  }
  std::reverse(reading.events.begin(), reading.events.end());
  return reading;
}

std::string ToJson(const EventLog::Reading& reading, uint64_t incarnation) {
  using Json = nlohmann::ordered_json;
  Json events = Json::array();
  for (const Event& event : reading.events) {
    events.push_back({{"id", event.id},
                      {"time", TextOf(event.last)},
                      {"first_time", TextOf(event.first)},
                      {"count", event.count},
                      {"level", Name(event.level)},
                      {"kind", event.kind},
                      {"head", event.head},
                      {"text", event.text}});
  }
  const Json json = {{"incarnation", absl::StrCat(absl::Hex(incarnation, absl::kZeroPad16))},
                     {"last_id", reading.last_id},
                     {"missed", reading.missed},
                     {"events", std::move(events)}};
  return absl::StrCat(json.dump(-1, ' ', false, Json::error_handler_t::replace), "\n");
}

}  // namespace lossd::metrics
