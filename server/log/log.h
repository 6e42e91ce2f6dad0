// SPDX-License-Identifier: Apache-2.0
// Log writes structured logs to stderr: one event on each line, with named fields, as text or JSON.
// LineBudget and LineBudgets bound the lines that a client without rights can cause.
//
//   Log(LogLevel::kInfo, "head created", {{"head", name}, {"vocab_size", 8192}});
//   2026-01-02T03:04:05.678Z INFO head created head=main vocab_size=8192
//   {"time":"2026-01-02T03:04:05.678Z","level":"INFO","message":"head created","head":"main",...}
//
// All functions and classes are thread-safe; lines of concurrent events never mix.
#ifndef LOSSD_SERVER_LOG_LOG_H_
#define LOSSD_SERVER_LOG_LOG_H_

#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::log {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError, kOff };
enum class LogFormat : uint8_t { kText, kJson };

// A field's value: text, a number or a truth value.
class Value {
 public:
  Value(absl::string_view text) : value_(std::string(text)) {}  // NOLINT(google-explicit-constructor)
  Value(const char* text) : Value(absl::string_view(text)) {}   // NOLINT
  Value(const std::string& text) : value_(text) {}              // NOLINT
  Value(bool flag) : value_(flag) {}                            // NOLINT
  Value(double number) : value_(number) {}                      // NOLINT
  template <std::signed_integral T>
  Value(T number) : value_(int64_t{number}) {}  // NOLINT
  template <std::unsigned_integral T>
  Value(T number) : value_(uint64_t{number}) {}  // NOLINT

  const std::variant<std::string, bool, double, int64_t, uint64_t>& get() const { return value_; }

 private:
  std::variant<std::string, bool, double, int64_t, uint64_t> value_;
};

struct Field {
  absl::string_view key;
  Value value;
};

// Sets the least level that is logged, and the format. Before the first call: info and above, as text.
void Configure(LogLevel least, LogFormat format);

void Log(LogLevel level, absl::string_view message, std::initializer_list<Field> fields = {});

// The event as Log writes it in text form, without time and level: "head created head=main". A value is
// quoted if it is empty or has spaces, quotes, equal signs or control characters. No event spans two lines.
std::string FormatText(absl::string_view message, std::initializer_list<Field> fields);
// The event as one JSON object. Invalid UTF-8 is replaced.
std::string FormatJson(absl::string_view time, absl::string_view level, absl::string_view message,
                       std::initializer_list<Field> fields);

// Parse and print Abseil flags. Levels are "debug", "info", "warning", "error" and "off"; formats are "text"
// and "json".
bool AbslParseFlag(absl::string_view text, LogLevel* level, std::string* error);
std::string AbslUnparseFlag(LogLevel level);
bool AbslParseFlag(absl::string_view text, LogFormat* format, std::string* error);
std::string AbslUnparseFlag(LogFormat format);

// Limits how many lines of one kind are logged: `at_once` lines at once, and then one each second. Use it for
// lines that a client without rights can cause, because they could fill a disk. Thread-safe.
class LineBudget {
 public:
  explicit LineBudget(int64_t at_once, std::function<absl::Time()> now = &clocks::SteadyNow)
      : at_once_(at_once), now_(std::move(now)), lines_(at_once) {}

  // Asks to log a line. nullopt: leave the line out. Otherwise the number of lines left out since the last
  // logged line.
  std::optional<int64_t> Take() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const int64_t at_once_;
  const std::function<absl::Time()> now_;
  absl::Mutex mutex_;
  int64_t lines_ ABSL_GUARDED_BY(mutex_);  // lines that may be logged now
  absl::Time refilled_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The holder whose budget a line is taken from.
struct LineHolder {
  std::string name;
  // Whether the server knows this name. The number of known names is bounded, and strangers cannot increase
  // it.
  bool is_known = false;
};

// Limits lines by a budget for each of several holders, and a budget for all holders together. Thread-safe.
//
// A known holder that has logged nothing for kQuiet may log a line even if the budget of all is used up. So
// holders that log without end do not suppress the first line of another holder. If there are ever more than
// kMostHolders, the holder that has been quiet longest is forgotten, and from then on the budget of all has
// no exception.
class LineBudgets {
 public:
  static constexpr size_t kMostHolders = 1'000;
  static constexpr absl::Duration kQuiet = absl::Minutes(1);

  LineBudgets(int64_t at_once, int64_t at_once_of_all, std::function<absl::Time()> now = &clocks::SteadyNow)
      : at_once_(at_once), now_(now), all_(at_once_of_all, std::move(now)) {}

  // As LineBudget::Take, for a line of this holder.
  std::optional<int64_t> Take(const LineHolder& holder) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Holder {
    std::unique_ptr<LineBudget> budget;
    int64_t left_out_by_all = 0;
    absl::Time logged = absl::InfinitePast();  // time of its last line
    std::list<std::string>::iterator place;    // its place in order_
  };

  const int64_t at_once_;
  const std::function<absl::Time()> now_;
  LineBudget all_;
  absl::Mutex mutex_;
  bool forgets_ ABSL_GUARDED_BY(mutex_) = false;          // there have been more than kMostHolders holders
  std::list<std::string> order_ ABSL_GUARDED_BY(mutex_);  // the holder of the last call is last
  std::map<std::string, Holder, std::less<>> holders_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::log

#endif  // LOSSD_SERVER_LOG_LOG_H_
