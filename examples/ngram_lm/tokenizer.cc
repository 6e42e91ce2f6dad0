// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/tokenizer.h"

#include <algorithm>
#include <queue>
#include <tuple>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace lossd::ngram_lm {
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

}  // namespace lossd::ngram_lm
