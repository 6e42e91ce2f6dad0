// SPDX-License-Identifier: Apache-2.0
#include "server/log/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::log {
namespace {

constexpr absl::string_view kLevelNames[] = {"debug", "info", "warning", "error", "off"};
constexpr absl::string_view kFormatNames[] = {"text", "json"};

std::atomic<LogLevel> g_least{LogLevel::kInfo};
std::atomic<LogFormat> g_format{LogFormat::kText};

// The pattern is only the message, because both formats add time and level themselves.
spdlog::logger& Logger() {
  static spdlog::logger* const logger = [] {
    auto* made = new spdlog::logger("lossd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%v");
    made->set_level(spdlog::level::trace);
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *logger;
}

spdlog::level::level_enum SpdlogLevel(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::err;
}

absl::string_view Upper(LogLevel level) {
  constexpr absl::string_view kNames[] = {"DEBUG", "INFO", "WARNING", "ERROR", "OFF"};
  return kNames[static_cast<size_t>(level)];
}

bool NeedsQuotes(absl::string_view text) {
  for (const char c : text) {
    if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c == '\x7f') return true;
  }
  return text.empty();
}

std::string Quoted(absl::string_view text) {
  return NeedsQuotes(text) ? absl::StrCat("\"", absl::Utf8SafeCEscape(text), "\"") : std::string(text);
}

struct TextVisitor {
  std::string operator()(const std::string& text) const { return Quoted(text); }
  std::string operator()(bool flag) const { return flag ? "true" : "false"; }
  std::string operator()(double number) const { return absl::StrCat(number); }
  std::string operator()(int64_t number) const { return absl::StrCat(number); }
  std::string operator()(uint64_t number) const { return absl::StrCat(number); }
};

std::string Now() { return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", clocks::WallNow(), absl::UTCTimeZone()); }

template <typename Enum, size_t kCount>
bool ParseName(absl::string_view text, const absl::string_view (&names)[kCount], Enum* value,
               std::string* error) {
  for (size_t i = 0; i < kCount; ++i) {
    if (text != names[i]) continue;
    *value = static_cast<Enum>(i);
    return true;
  }
  *error = "must be one of";
  for (const absl::string_view name : names) absl::StrAppend(error, " ", name);
  return false;
}

}  // namespace

void Configure(LogLevel least, LogFormat format) {
  g_least = least;
  g_format = format;
}

void Log(LogLevel level, absl::string_view message, std::initializer_list<Field> fields) {
  if (level < g_least.load()) return;
  const std::string line = g_format.load() == LogFormat::kJson
                               ? FormatJson(Now(), Upper(level), message, fields)
                               : absl::StrCat(Now(), " ", Upper(level), " ", FormatText(message, fields));
  Logger().log(SpdlogLevel(level), spdlog::string_view_t(line.data(), line.size()));
}

std::string FormatText(absl::string_view message, std::initializer_list<Field> fields) {
  std::string line = absl::Utf8SafeCEscape(message);
  for (const Field& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=", std::visit(TextVisitor{}, field.value.get()));
  }
  return line;
}

std::string FormatJson(absl::string_view time, absl::string_view level, absl::string_view message,
                       std::initializer_list<Field> fields) {
  nlohmann::ordered_json object;
  object["time"] = std::string(time);
  object["level"] = std::string(level);
  object["message"] = std::string(message);
  for (const Field& field : fields) {
    std::visit([&](const auto& value) { object[std::string(field.key)] = value; }, field.value.get());
  }
  return object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

bool AbslParseFlag(absl::string_view text, LogLevel* level, std::string* error) {
  return ParseName(text, kLevelNames, level, error);
}

std::string AbslUnparseFlag(LogLevel level) { return std::string(kLevelNames[static_cast<size_t>(level)]); }

bool AbslParseFlag(absl::string_view text, LogFormat* format, std::string* error) {
  return ParseName(text, kFormatNames, format, error);
}

std::string AbslUnparseFlag(LogFormat format) {
  return std::string(kFormatNames[static_cast<size_t>(format)]);
}

std::optional<int64_t> LineBudget::Take() {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  if (refilled_ == absl::InfinitePast() || now < refilled_) refilled_ = now;
  const int64_t seconds = absl::ToInt64Seconds(now - refilled_);
  if (seconds > 0) {
    lines_ = std::min(at_once_, lines_ + std::min(at_once_, seconds));
    refilled_ += absl::Seconds(seconds);
  }
  if (lines_ == 0) {
    ++left_out_;
    return std::nullopt;
  }
  --lines_;
  return std::exchange(left_out_, 0);
}

std::optional<int64_t> LineBudgets::Take(const LineHolder& who) {
  absl::MutexLock lock(&mutex_);
  auto found = holders_.find(who.name);
  if (found == holders_.end()) {
    found = holders_.emplace(who.name, Holder{std::make_unique<LineBudget>(at_once_, now_)}).first;
    found->second.place = order_.insert(order_.end(), found->first);
    if (holders_.size() > kMostHolders) {
      holders_.erase(order_.front());
      order_.pop_front();
      forgets_ = true;
    }
  }
  Holder& holder = found->second;
  order_.splice(order_.end(), order_, holder.place);
  const std::optional<int64_t> own = holder.budget->Take();
  if (!own.has_value()) return std::nullopt;
  holder.left_out_by_all += *own;
  const absl::Time now = now_();
  // If the clock goes back, the holder does not count as quiet.
  const bool was_quiet = who.is_known && !forgets_ && now - holder.logged >= kQuiet;
  if (!all_.Take().has_value() && !was_quiet) {
    ++holder.left_out_by_all;
    return std::nullopt;
  }
  holder.logged = now;
  return std::exchange(holder.left_out_by_all, 0);
}

}  // namespace lossd::log
