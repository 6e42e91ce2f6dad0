// SPDX-License-Identifier: Apache-2.0
// Log writes structured logs to stderr: one event a line, with named fields, as text or JSON. LineBudget
// bounds the lines that a client without rights can cause.
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

// Before the first call: info and above, as text.
void Configure(LogLevel least, LogFormat format);

void Log(LogLevel level, absl::string_view message, std::initializer_list<Field> fields = {});

// The event without time and level, as Log writes it: "head created head=main". Text is quoted if it is
// empty or holds spaces, quotes, equal signs or control characters; no event spans two lines.
std::string FormatText(absl::string_view message, std::initializer_list<Field> fields);
// The event as one JSON object. Invalid UTF-8 is replaced.
std::string FormatJson(absl::string_view time, absl::string_view level, absl::string_view message,
                       std::initializer_list<Field> fields);

// For Abseil flags: "debug", "info", "warning", "error", "off"; "text", "json".
bool AbslParseFlag(absl::string_view text, LogLevel* level, std::string* error);
std::string AbslUnparseFlag(LogLevel level);
bool AbslParseFlag(absl::string_view text, LogFormat* format, std::string* error);
std::string AbslUnparseFlag(LogFormat format);

// How many lines of one kind may be logged: some at once, and one a second from then on. For lines that a
// client without rights can cause and could fill a disk with. Thread-safe.
class LineBudget {
 public:
  explicit LineBudget(int64_t at_once, std::function<absl::Time()> now = &clocks::SteadyNow)
      : at_once_(at_once), now_(std::move(now)), lines_(at_once) {}

  // Null: the line is to be left out. Else how many were left out since the last one.
  std::optional<int64_t> Take() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const int64_t at_once_;
  const std::function<absl::Time()> now_;
  absl::Mutex mutex_;
  int64_t lines_ ABSL_GUARDED_BY(mutex_);  // that may be logged at once
  absl::Time refilled_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Whose budget a line is taken from.
struct LineHolder {
  std::string name;
  // The holder is one of a bounded number, which no stranger can make grow: somebody gave it its name.
  bool is_known = false;
};

// One budget for each of several holders, and one budget for all holders together. A known holder that has
// logged nothing for kQuiet has a line all the same when the others have used up the budget of all, so that
// holders who log without end leave no first line of another one out. When there are more than kMostHolders,
// the holder that has been quiet longest is forgotten; the budget of all then bounds what the holders may
// log, without exception. Thread-safe.
class LineBudgets {
 public:
  static constexpr size_t kMostHolders = 1'000;
  static constexpr absl::Duration kQuiet = absl::Minutes(1);

  LineBudgets(int64_t at_once, int64_t at_once_of_all, std::function<absl::Time()> now = &clocks::SteadyNow)
      : at_once_(at_once), now_(now), all_(at_once_of_all, std::move(now)) {}

  // As LineBudget::Take, of the holder's lines.
  std::optional<int64_t> Take(const LineHolder& holder) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Holder {
    std::unique_ptr<LineBudget> budget;
    int64_t left_out_by_all = 0;
    absl::Time logged = absl::InfinitePast();  // its last line
    std::list<std::string>::iterator place;    // in order_
  };

  const int64_t at_once_;
  const std::function<absl::Time()> now_;
  LineBudget all_;
  absl::Mutex mutex_;
  bool forgets_ ABSL_GUARDED_BY(mutex_) = false;          // there have been more than kMostHolders
  std::list<std::string> order_ ABSL_GUARDED_BY(mutex_);  // last heard of last
  std::map<std::string, Holder, std::less<>> holders_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::log

#endif  // LOSSD_SERVER_LOG_LOG_H_
