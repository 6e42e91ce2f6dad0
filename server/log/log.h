// SPDX-License-Identifier: Apache-2.0
// Structured logs on stderr: one event a line, with named fields, as text or JSON.
//
//   Log(LogLevel::kInfo, "head created", {{"head", name}, {"vocab_size", 8192}});
//   2026-01-02T03:04:05.678Z INFO head created head=main vocab_size=8192
//   {"time":"2026-01-02T03:04:05.678Z","level":"INFO","message":"head created","head":"main",...}
//
// All functions are thread-safe; lines of concurrent events never mix.
#ifndef LOSSD_SERVER_LOG_LOG_H_
#define LOSSD_SERVER_LOG_LOG_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

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

}  // namespace lossd::log

#endif  // LOSSD_SERVER_LOG_LOG_H_
