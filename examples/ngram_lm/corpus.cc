// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/corpus.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <queue>
#include <set>
#include <sstream>
#include <system_error>
#include <tuple>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace lossd::ngram_lm {

// ---- Tokenizer ----

namespace {

constexpr size_t kLongestRun = 32;

enum class CharClass { kSpace, kLetter, kDigit, kOther };

CharClass ClassOf(char c) {
  const auto byte = static_cast<unsigned char>(c);
  if (absl::ascii_isspace(byte)) return CharClass::kSpace;
  if (absl::ascii_isalpha(byte) || byte >= 0x80) return CharClass::kLetter;
  if (absl::ascii_isdigit(byte)) return CharClass::kDigit;
  return CharClass::kOther;
}

// A distinct piece of the training text.
struct Word {
  std::vector<int32_t> tokens;
  int64_t count = 0;
};

std::vector<Word> CountWords(absl::string_view text) {
  absl::flat_hash_map<absl::string_view, size_t> index;
  std::vector<Word> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = PieceEnd(text, begin);
    const absl::string_view piece = text.substr(begin, end - begin);
    const auto [it, is_new] = index.try_emplace(piece, words.size());
    if (is_new) {
      Word& word = words.emplace_back();
      for (char c : piece) word.tokens.push_back(static_cast<unsigned char>(c));
    }
    ++words[it->second].count;
    begin = end;
  }
  return words;
}

// Replaces every `pair` in `tokens` by `merged`, left to right.
void Merge(std::pair<int32_t, int32_t> pair, int32_t merged, std::vector<int32_t>* tokens) {
  size_t out = 0;
  for (size_t in = 0; in < tokens->size(); ++out) {
    const bool match =
        in + 1 < tokens->size() && (*tokens)[in] == pair.first && (*tokens)[in + 1] == pair.second;
    (*tokens)[out] = match ? merged : (*tokens)[in];
    in += match ? 2 : 1;
  }
  tokens->resize(out);
}

// How often each pair of neighbouring tokens occurs, kept up to date while pairs are merged.
class PairCounts {
 public:
  using Pair = std::pair<int32_t, int32_t>;

  explicit PairCounts(std::vector<Word> words) : words_(std::move(words)) {
    for (size_t w = 0; w < words_.size(); ++w) Add(w, +1);
    for (const auto& [pair, info] : pairs_) heap_.push({info.count, pair.first, pair.second});
  }

  // The most frequent pair and its count; ties go to the larger token numbers. {pair, 0} if there is none.
  std::pair<Pair, int64_t> Top() {
    while (!heap_.empty()) {
      const auto [count, first, second] = heap_.top();
      if (pairs_[{first, second}].count == count) return {{first, second}, count};
      heap_.pop();  // an old count; the current one is in the heap as well
    }
    return {{0, 0}, 0};
  }

  void MergeEverywhere(Pair pair, int32_t merged) {
    touched_.clear();
    const absl::flat_hash_set<size_t> where = std::move(pairs_[pair].words);
    for (size_t w : where) {
      Add(w, -1);
      Merge(pair, merged, &words_[w].tokens);
      Add(w, +1);
    }
    for (const Pair& changed : touched_) {
      const int64_t count = pairs_[changed].count;
      if (count > 0) heap_.push({count, changed.first, changed.second});
    }
  }

 private:
  struct Info {
    int64_t count = 0;
    absl::flat_hash_set<size_t> words;  // may hold words that have lost the pair
  };

  void Add(size_t w, int64_t sign) {
    const Word& word = words_[w];
    for (size_t i = 0; i + 1 < word.tokens.size(); ++i) {
      const Pair pair{word.tokens[i], word.tokens[i + 1]};
      Info& info = pairs_[pair];
      info.count += sign * word.count;
      if (sign > 0) info.words.insert(w);
      touched_.insert(pair);
    }
  }

  std::vector<Word> words_;
  absl::flat_hash_map<Pair, Info> pairs_;
  absl::flat_hash_set<Pair> touched_;
  std::priority_queue<std::tuple<int64_t, int32_t, int32_t>> heap_;  // count, pair
};

}  // namespace

size_t PieceEnd(absl::string_view text, size_t begin) {
  size_t run = begin;
  if (text[begin] == ' ' && begin + 1 < text.size() && ClassOf(text[begin + 1]) != CharClass::kSpace) ++run;
  const CharClass wanted = ClassOf(text[run]);
  size_t end = run + 1;
  while (end < text.size() && end - run < kLongestRun && ClassOf(text[end]) == wanted) ++end;
  // A run of white space leaves its last blank to the word that follows.
  const bool before_word = end < text.size() && ClassOf(text[end]) != CharClass::kSpace;
  if (wanted == CharClass::kSpace && before_word && end - begin > 1 && text[end - 1] == ' ') --end;
  return end;
}

Tokenizer::Tokenizer() {
  for (int byte = 0; byte < 256; ++byte) bytes_of_token_.emplace_back(1, static_cast<char>(byte));
}

void Tokenizer::AddMerge(Pair pair) {
  merged_token_[pair] = vocab_size();
  bytes_of_token_.push_back(bytes_of_token_[pair.first] + bytes_of_token_[pair.second]);
}

absl::StatusOr<Tokenizer> Tokenizer::Train(absl::string_view text, int32_t vocab_size) {
  if (vocab_size < 256) {
    return absl::InvalidArgumentError(absl::StrCat("vocab_size: ", vocab_size, " is below 256, the bytes"));
  }
  Tokenizer tokenizer;
  PairCounts counts(CountWords(text));
  while (tokenizer.vocab_size() < vocab_size) {
    const auto [pair, count] = counts.Top();
    if (count < 2) break;
    counts.MergeEverywhere(pair, tokenizer.vocab_size());
    tokenizer.AddMerge(pair);
  }
  return tokenizer;
}

std::vector<int32_t> Tokenizer::EncodePiece(absl::string_view piece) const {
  std::vector<int32_t> tokens;
  for (char c : piece) tokens.push_back(static_cast<unsigned char>(c));
  while (tokens.size() > 1) {
    Pair best{};
    int32_t best_merged = vocab_size();
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto it = merged_token_.find({tokens[i], tokens[i + 1]});
      if (it != merged_token_.end() && it->second < best_merged) std::tie(best, best_merged) = *it;
    }
    if (best_merged == vocab_size()) break;
    Merge(best, best_merged, &tokens);
  }
  return tokens;
}

std::vector<int32_t> Tokenizer::Encode(absl::string_view text) const {
  absl::flat_hash_map<absl::string_view, std::vector<int32_t>> seen;
  std::vector<int32_t> tokens;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = PieceEnd(text, begin);
    const auto [it, is_new] = seen.try_emplace(text.substr(begin, end - begin));
    if (is_new) it->second = EncodePiece(it->first);
    tokens.insert(tokens.end(), it->second.begin(), it->second.end());
    begin = end;
  }
  return tokens;
}

std::string Tokenizer::Decode(absl::Span<const int32_t> tokens) const {
  std::string text;
  for (int32_t token : tokens) text += bytes_of_token_[token];
  return text;
}

// ---- The text ----

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
