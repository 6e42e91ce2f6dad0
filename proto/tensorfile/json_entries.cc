// SPDX-License-Identifier: Apache-2.0
#include "proto/tensorfile/json_entries.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace lossd::formats {
namespace {

using nlohmann::json;

constexpr int64_t kBlockBytes = int64_t{64} << 10;

// A range of a file's bytes, read block by block. It ends early after an error and after kMaxJsonTokenBytes
// without a quotation mark: no token is longer than what lies between two of them.
class Bytes {
 public:
  Bytes(const InputFile& file, int64_t begin, int64_t bytes) : file_(file), at_(begin), end_(begin + bytes) {
    Fill();
  }

  const absl::Status& status() const { return status_; }
  bool at_end() const { return next_ == block_.size(); }
  char front() const { return static_cast<char>(block_[next_]); }
  // Whether there was a 0 among the bytes so far, which the parser takes for the end of the text.
  bool has_nul() const { return has_nul_; }
  void Advance() {
    has_nul_ |= block_[next_] == 0;
    since_quote_ = block_[next_] == '"' ? 0 : since_quote_ + 1;
    ++next_;
    if (since_quote_ > kMaxJsonTokenBytes) {
      block_.clear();
      next_ = 0;
    } else if (next_ == block_.size()) {
      Fill();
    }
  }

 private:
  void Fill() {
    block_.resize(static_cast<size_t>(std::min(kBlockBytes, end_ - at_)));
    next_ = 0;
    status_ = file_.ReadAt(at_, absl::MakeSpan(block_));
    if (!status_.ok()) block_.clear();
    at_ += static_cast<int64_t>(block_.size());
  }

  const InputFile& file_;
  int64_t at_;  // of the next block
  const int64_t end_;
  std::vector<uint8_t> block_;
  size_t next_ = 0;
  int64_t since_quote_ = 0;
  bool has_nul_ = false;
  absl::Status status_;
};

// Bytes as an input iterator; the end has none.
class ByteIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  explicit ByteIterator(Bytes* bytes = nullptr) : bytes_(bytes) {}
  char operator*() const { return bytes_->front(); }
  ByteIterator& operator++() {
    bytes_->Advance();
    return *this;
  }
  ByteIterator operator++(int) { return ++*this; }
  friend bool operator==(const ByteIterator& a, const ByteIterator& b) { return a.ends() == b.ends(); }
  friend bool operator!=(const ByteIterator& a, const ByteIterator& b) { return !(a == b); }

 private:
  bool ends() const { return bytes_ == nullptr || bytes_->at_end(); }
  Bytes* bytes_;
};

// Builds the value of one entry at a time. A member that returns false ends the parsing.
class EntrySax final : public nlohmann::json_sax<json> {
 public:
  EntrySax(const JsonEntryRules& rules, absl::FunctionRef<absl::Status(JsonEntry entry)> take)
      : rules_(rules), take_(take) {}

  const absl::Status& status() const { return status_; }

  bool null() override { return Put(nullptr); }
  bool boolean(bool value) override { return Put(value); }
  bool number_integer(number_integer_t value) override { return Put(value); }
  bool number_unsigned(number_unsigned_t value) override { return Put(value); }
  bool number_float(number_float_t value, const string_t&) override { return Put(value); }
  bool string(string_t& value) override { return Put(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(size_t) override {
    if (!began_) return began_ = true;
    if (open_.empty() && !entry_.spread && entry_.name == rules_.spread && !rules_.spread.empty()) {
      entry_.value = json::object();
      if (!Take()) return false;
      return entry_.spread = true;
    }
    return Open(json::object());
  }
  bool end_object() override {
    if (!open_.empty()) return Close();
    entry_.spread = false;  // or the outermost object has ended
    return true;
  }
  bool start_array(size_t) override { return began_ && Open(json::array()); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    if (open_.empty()) {
      entry_.name = std::move(name);
      return true;
    }
    if (!Count() || open_.back()->contains(name)) return false;
    slot_ = &(*open_.back())[name];
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  bool Count() { return ++values_ <= rules_.max_values; }

  // Where the next value belongs.
  json* Place() {
    if (open_.empty()) return &entry_.value;
    if (open_.back()->is_object()) return slot_;
    open_.back()->push_back(nullptr);
    return &open_.back()->back();
  }

  bool Put(json value) {
    if (!began_ || !Count()) return false;
    *Place() = std::move(value);
    return !open_.empty() || Take();
  }

  bool Open(json value) {
    const int depth = static_cast<int>(open_.size()) + 1 + (entry_.spread ? 1 : 0);
    if (depth > rules_.max_depth || !Count()) return false;
    json* const place = Place();
    *place = std::move(value);
    open_.push_back(place);
    return true;
  }

  bool Close() {
    open_.pop_back();
    return !open_.empty() || Take();
  }

  bool Take() {
    JsonEntry next{.spread = entry_.spread};
    std::swap(next, entry_);
    values_ = 0;
    status_ = take_(std::move(next));
    return status_.ok();
  }

  const JsonEntryRules& rules_;
  const absl::FunctionRef<absl::Status(JsonEntry entry)> take_;
  absl::Status status_;
  bool began_ = false;  // the outermost object
  JsonEntry entry_;
  std::vector<json*> open_;  // objects and arrays of the entry, outermost first
  json* slot_ = nullptr;     // of the innermost, if it is an object
  int64_t values_ = 0;       // in the entry
};

}  // namespace

absl::Status ReadJsonEntries(const InputFile& file, int64_t begin, int64_t bytes, const JsonEntryRules& rules,
                             absl::FunctionRef<absl::Status(JsonEntry entry)> take) {
  Bytes text(file, begin, bytes);
  EntrySax sax(rules, take);
  const bool whole = json::sax_parse(ByteIterator(&text), ByteIterator(), &sax);
  if (!text.status().ok()) return text.status();
  if (!sax.status().ok()) return sax.status();
  return whole && !text.has_nul() ? absl::OkStatus() : rules.malformed;
}

}  // namespace lossd::formats
