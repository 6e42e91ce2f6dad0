// SPDX-License-Identifier: Apache-2.0
// Byte-level byte-pair encoding, learned from a text.
//
// The text is cut into pieces (a word, a number, a run of punctuation or of white space, each with the
// space before it); tokens never cross pieces. Every byte is a token, so any byte string can be encoded,
// and Decode(Encode(s)) == s for every s.
//
// Tokens are 0 .. vocab_size() - 1: the 256 bytes, then one token for each merge in the order learned.
// Deterministic: the same text gives the same tokens. Thread-safe once trained (all methods are const).
#ifndef LOSSD_EXAMPLES_NGRAM_LM_TOKENIZER_H_
#define LOSSD_EXAMPLES_NGRAM_LM_TOKENIZER_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::ngram_lm {

class Tokenizer {
 public:
  // Learns vocab_size - 256 merges, most frequent pair first. Stops early, with a smaller vocabulary, when
  // no pair occurs twice. INVALID_ARGUMENT if vocab_size < 256.
  static absl::StatusOr<Tokenizer> Train(absl::string_view text, int32_t vocab_size);

  std::vector<int32_t> Encode(absl::string_view text) const;

  // Tokens must be in [0, vocab_size()).
  std::string Decode(absl::Span<const int32_t> tokens) const;

  int32_t vocab_size() const { return static_cast<int32_t>(bytes_of_token_.size()); }

 private:
  using Pair = std::pair<int32_t, int32_t>;

  Tokenizer();
  void AddMerge(Pair pair);
  std::vector<int32_t> EncodePiece(absl::string_view piece) const;

  std::vector<std::string> bytes_of_token_;          // [vocab_size]
  absl::flat_hash_map<Pair, int32_t> merged_token_;  // a smaller token is an earlier merge
};

// The end of the piece that starts at `begin` < text.size(). Pieces have at most 33 bytes.
size_t PieceEnd(absl::string_view text, size_t begin);

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_TOKENIZER_H_
