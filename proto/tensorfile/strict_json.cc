// SPDX-License-Identifier: Apache-2.0
#include "proto/tensorfile/strict_json.h"

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lossd::formats {
namespace {

using nlohmann::json;

// A member that returns false ends the parsing.
class StrictSax final : public nlohmann::json_sax<json> {
 public:
  explicit StrictSax(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return Count(); }
  bool boolean(bool) override { return Count(); }
  bool number_integer(number_integer_t) override { return Count(); }
  bool number_unsigned(number_unsigned_t) override { return Count(); }
  bool number_float(number_float_t, const string_t&) override { return Count(); }
  bool string(string_t&) override { return Count(); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return Open(); }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override { return Count() && open_.back().insert(std::move(name)).second; }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  bool Count() { return ++values_ <= limits_.values; }
  bool Open() {
    open_.emplace_back();
    return Count() && static_cast<int>(open_.size()) <= limits_.depth + 1;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  const JsonLimits& limits_;
  std::vector<std::set<std::string>> open_;  // the names so far; of an array, none
  int64_t values_ = 0;
};

}  // namespace

bool IsStrictJson(absl::string_view text, const JsonLimits& limits) {
  if (static_cast<int64_t>(text.size()) > limits.bytes) return false;
  StrictSax sax(limits);
  // The parser takes a 0 for the end of the text.
  const bool has_nul = text.find('\0') != absl::string_view::npos;
  return !has_nul && json::sax_parse(text.begin(), text.end(), &sax);
}

}  // namespace lossd::formats
