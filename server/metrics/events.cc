// SPDX-License-Identifier: Apache-2.0
// EventLog and TraceRecorder: recent events of the server, and traces of slices and chunks (events.h).
#include "server/metrics/events.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

namespace {

constexpr absl::string_view kOtherHeads = "other heads";

struct KindNames {
  absl::string_view category;
  absl::string_view name;
};
KindNames NamesOf(SpanKind kind) {
  constexpr KindNames kNames[] = {{"slice", "receive"}, {"slice", "queue"},   {"slice", "compute"},
                                  {"slice", "send"},    {"chunk", "results"}, {"chunk", "weight gradient"},
                                  {"step", "step"}};
  return kNames[static_cast<size_t>(kind)];
}

double Microseconds(absl::Duration duration) { return absl::ToDoubleMicroseconds(duration); }

// Spans of slices and chunks are asynchronous events, which viewers group by id, because they overlap each
// other.
void AppendAsync(const Span& span, size_t process, absl::Time origin, std::string* json) {
  const KindNames names = NamesOf(span.kind);
  const std::string id = names.category == "slice"
                             ? absl::StrCat("microbatch ", span.id, " row ", span.first_row)
                             : absl::StrCat("chunk ", span.id);
  const auto event = [&](char phase, absl::Time at, const std::string& more) {
    absl::StrAppendFormat(
        json,
        ",\n{\"ph\":\"%c\",\"cat\":\"%s\",\"name\":\"%s\",\"id\":\"%s\",\"pid\":%d,\"tid\":1,\"ts\":%.3f%s}",
        phase, names.category, names.name, id, process, Microseconds(at - origin), more);
  };
  event('b', span.begin, absl::StrFormat(",\"args\":{\"rows\":%d}", span.rows));
  event('e', span.end, "");
}

void AppendStep(const Span& span, size_t process, absl::Time origin, std::string* json) {
  absl::StrAppendFormat(
      json,
      ",\n{\"ph\":\"i\",\"cat\":\"step\",\"name\":\"step %d\",\"s\":\"p\",\"pid\":%d,\"tid\":1,\"ts\":%.3f}",
      span.id, process, Microseconds(span.end - origin));
}

}  // namespace

absl::StatusOr<uint64_t> TraceRecorder::Start(absl::Duration time) {
  if (time <= absl::ZeroDuration() || time > kMostTime) {
    return errors::FieldError("seconds",
                              absl::StrCat("be above 0 and at most ", absl::ToInt64Seconds(kMostTime)),
                              absl::ToDoubleSeconds(time));
  }
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  if (number_ != 0 && now < end_ + kKept) {
    return absl::FailedPreconditionError(UnderWay(now) ? "another trace is being recorded"
                                                       : "another trace waits to be taken");
  }
  Forget();
  number_ = ++last_number_;
  begin_ = now;
  end_ = now + time;
  recording_ = true;
  return number_;
}

void TraceRecorder::Add(absl::string_view head, const Span& span) {
  if (!recording()) return;
  absl::MutexLock lock(&mutex_);
  if (number_ == 0 || full_ || span.end < begin_) return;
  if (span.end > end_) {
    recording_ = false;
    return;
  }
  if (spans_.size() == kMostSpans) {
    full_ = true;
    end_ = span.end;
    recording_ = false;
    return;
  }
  spans_.push_back({HeadNumber(head), span});
  spans_.back().span.begin = std::max(span.begin, begin_);
}

size_t TraceRecorder::HeadNumber(absl::string_view head) {
  auto known = std::find(heads_.begin(), heads_.end(), head);
  if (known == heads_.end()) {
    if (heads_.size() >= kMostHeads) head = kOtherHeads;  // so that heads_ has at most kMostHeads + 1 names
    known = std::find(heads_.begin(), heads_.end(), head);
    if (known == heads_.end()) known = heads_.insert(heads_.end(), std::string(head));
  }
  return static_cast<size_t>(known - heads_.begin());
}

absl::StatusOr<std::string> TraceRecorder::Take(uint64_t number) {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  if (number == 0 || number != number_) {
    return errors::FieldError("recording", "be the number of a trace that waits to be taken", number,
                              absl::StatusCode::kNotFound);
  }
  if (UnderWay(now)) return absl::UnavailableError("the trace is being recorded");
  std::string json = Json();
  Forget();
  return json;
}

void TraceRecorder::Expire() {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  if (number_ != 0 && now >= end_) recording_ = false;
  if (number_ != 0 && now >= end_ + kKept) Forget();
}

void TraceRecorder::Forget() {
  recording_ = false;
  number_ = 0;
  full_ = false;
  heads_.clear();
  spans_ = {};
}

std::string TraceRecorder::Json() const {
  std::string json = absl::StrFormat(
      "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"begin\":\"%s\",\"seconds\":%g,\"ended_early\":%s},"
      "\n\"traceEvents\":[\n"
      "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":0,\"tid\":0,\"args\":{\"name\":\"lossd\"}}",
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", clocks::OnTheWall(begin_), absl::UTCTimeZone()),
      absl::ToDoubleSeconds(end_ - begin_), full_ ? "true" : "false");
  for (size_t i = 0; i < heads_.size(); ++i) {
    const std::string name = nlohmann::json(absl::StrCat("head ", heads_[i])).dump();
    absl::StrAppendFormat(
        &json, ",\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":%s}}",
        i + 1, name);
  }
  for (const Recorded& recorded : spans_) {
    if (recorded.span.kind == SpanKind::kStep) {
      AppendStep(recorded.span, recorded.head + 1, begin_, &json);
    } else {
      AppendAsync(recorded.span, recorded.head + 1, begin_, &json);
    }
  }
  return absl::StrCat(json, "\n]}\n");
}

}  // namespace lossd::metrics
