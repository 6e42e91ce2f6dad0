// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/trace_recorder.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"

namespace lossd::metrics {
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

// Slices, and so the four spans of one, overlap: they are asynchronous events, which are shown by their id.
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
    if (heads_.size() >= kMostHeads) head = kOtherHeads;  // which is one more
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
