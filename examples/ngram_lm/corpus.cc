// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/corpus.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace lossd::ngram_lm {
namespace {

// Distinct files that match, by path; links to one file count once.
std::set<std::string> Glob(const std::string& pattern) {
  glob_t found{};
  std::set<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    for (size_t i = 0; i < found.gl_pathc; ++i) {
      std::error_code error;
      const auto path = std::filesystem::canonical(found.gl_pathv[i], error);
      if (!error) paths.insert(path.string());
    }
  }
  globfree(&found);
  return paths;
}

void AppendUtf8(uint32_t code, std::string* out) {
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (code >> 6)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xE0 | ((code >> 12) & 0x0F)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  }
}

// The character an E<...> code names; unknown names stay as they are.
std::string Escape(absl::string_view name) {
  if (name == "lt") return "<";
  if (name == "gt") return ">";
  if (name == "sol") return "/";
  if (name == "verbar") return "|";
  uint32_t code = 0;
  std::string out;
  const bool hex = absl::StartsWith(name, "0x");
  if (hex ? absl::SimpleHexAtoi(name, &code) : absl::SimpleAtoi(name, &code)) {
    AppendUtf8(code, &out);
    return out;
  }
  return std::string(name);
}

// Formatting codes of one paragraph: X<...> and X<< ... >>, nested.
class FormattingCodes {
 public:
  explicit FormattingCodes(absl::string_view text) : text_(text) {}

  std::string Strip() { return Until(""); }

 private:
  // The text up to `close` (all of it if empty), which is consumed.
  std::string Until(absl::string_view close) {
    std::string out;
    while (at_ < text_.size()) {
      if (!close.empty() && absl::StartsWith(text_.substr(at_), close)) {
        at_ += close.size();
        break;
      }
      if (AtCode()) {
        out += Code();
      } else {
        out.push_back(text_[at_++]);
      }
    }
    return out;
  }

  bool AtCode() const {
    return at_ + 1 < text_.size() && text_[at_ + 1] == '<' &&
           absl::StrContains("BCEFILSXZ", text_.substr(at_, 1));
  }

  std::string Code() {
    const char letter = text_[at_++];
    size_t depth = 0;
    while (at_ < text_.size() && text_[at_] == '<') ++at_, ++depth;
    const std::string close = depth == 1 ? ">" : " " + std::string(depth, '>');
    if (depth > 1 && at_ < text_.size() && text_[at_] == ' ') ++at_;
    std::string inner = Until(close);
    if (letter == 'X' || letter == 'Z') return "";
    if (letter == 'E') return Escape(inner);
    if (letter == 'L') return inner.substr(0, inner.find('|'));
    return inner;
  }

  absl::string_view text_;
  size_t at_ = 0;
};

// A paragraph that starts with '='.
struct Command {
  absl::string_view name;
  absl::string_view rest;
};

Command ParseCommand(absl::string_view paragraph) {
  size_t end = 1;
  while (end < paragraph.size() && absl::ascii_isalnum(paragraph[end])) ++end;
  return {paragraph.substr(1, end - 1), absl::StripLeadingAsciiWhitespace(paragraph.substr(end))};
}

// The paragraphs of a page without their markup, one after the other.
class PodStripper {
 public:
  void Paragraph(absl::string_view paragraph) {
    if (paragraph[0] == '=') {
      OnCommand(ParseCommand(paragraph));
    } else if (!skipping_) {
      const bool verbatim = paragraph[0] == ' ' || paragraph[0] == '\t';
      Append(verbatim ? std::string(paragraph) : FormattingCodes(paragraph).Strip());
    }
  }

  std::string Take() { return std::move(out_); }

 private:
  void OnCommand(const Command& command) {
    if (command.name == "begin") skipping_ = true;
    if (command.name == "end") skipping_ = false;
    const bool has_text = absl::StartsWith(command.name, "head") || command.name == "item";
    if (has_text && !skipping_ && !command.rest.empty()) Append(FormattingCodes(command.rest).Strip());
  }

  void Append(absl::string_view text) {
    const absl::string_view stripped = absl::StripTrailingAsciiWhitespace(text);
    if (!stripped.empty()) absl::StrAppend(&out_, stripped, "\n\n");
  }

  bool skipping_ = false;
  std::string out_;
};

}  // namespace

std::string StripPod(absl::string_view pod) {
  PodStripper stripper;
  for (size_t begin = 0; begin < pod.size();) {
    if (pod[begin] == '\n') {
      ++begin;
      continue;
    }
    const size_t end = std::min(pod.find("\n\n", begin), pod.size());
    stripper.Paragraph(pod.substr(begin, end - begin));
    begin = end;
  }
  return stripper.Take();
}

absl::StatusOr<std::string> LoadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  if (!file || !(content << file.rdbuf())) {
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read, or is empty"));
  }
  return content.str();
}

absl::StatusOr<std::vector<std::string>> LoadPerlManual(const std::string& pattern) {
  std::vector<std::string> documents;
  for (const std::string& path : Glob(pattern)) {
    absl::StatusOr<std::string> pod = LoadFile(path);
    if (!pod.ok()) return pod.status();
    documents.push_back(StripPod(*pod));
  }
  if (documents.empty()) {
    return absl::NotFoundError(absl::StrCat("no file matches ", pattern,
                                            ": install the package perl-doc, or name a text with --text"));
  }
  return documents;
}

TextSplit SplitBlocks(const std::vector<std::string>& documents, size_t block_bytes, size_t hold_out_every) {
  const std::string text = absl::StrJoin(documents, "\n");
  if (block_bytes == 0) block_bytes = std::clamp<size_t>(text.size() / 200, 1, 32768);
  TextSplit split;
  size_t block = 0;
  for (size_t begin = 0; begin < text.size(); ++block) {
    const size_t line_end = text.find('\n', std::min(begin + block_bytes, text.size()));
    const size_t end = line_end == std::string::npos ? text.size() : line_end + 1;
    std::string* part = block % hold_out_every == hold_out_every - 1 ? &split.held_out : &split.train;
    part->append(text, begin, end - begin);
    begin = end;
  }
  return split;
}

}  // namespace lossd::ngram_lm
