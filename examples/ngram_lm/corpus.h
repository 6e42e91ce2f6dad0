// SPDX-License-Identifier: Apache-2.0
// The text that the demo learns: found on the machine, stripped of markup, split into train and held-out
// parts; and the Tokenizer that turns text into tokens. Functions are stateless and thread-safe.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_CORPUS_H_
#define LOSSD_EXAMPLES_NGRAM_LM_CORPUS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::ngram_lm {

// Byte-level byte-pair encoding, learned from a text.
//
// The text is cut into pieces (a word, a number, a run of punctuation or of white space, each with the
// space before it); tokens never cross pieces. Every byte is a token, so any byte string can be encoded,
// and Decode(Encode(s)) == s for every s.
//
// Tokens are 0 .. vocab_size() - 1: the 256 bytes, then one token for each merge in the order learned.
// Deterministic: the same text gives the same tokens. Thread-safe once trained (all methods are const).
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

// The manual pages of Perl (package perl-doc) in the pattern's directories, one document a page, in the
// order of their paths, without markup. NOT_FOUND if there are none.
absl::StatusOr<std::vector<std::string>> LoadPerlManual(
    const std::string& pattern = "/usr/share/perl/*/pod/*.pod");

// A whole file as one document. NOT_FOUND if it cannot be read or is empty.
absl::StatusOr<std::string> LoadFile(const std::string& path);

// Plain text of a page in Perl's POD format (perlpod(1)): command words, formatting codes, index entries
// and =begin/=for blocks go, the words stay.
std::string StripPod(absl::string_view pod);

struct TextSplit {
  std::string train;
  std::string held_out;
};

// Joins the documents, cuts them at line ends into contiguous blocks of about block_bytes (0: a two-hundredth
// of the text, but not above 32 KiB), and holds out the last block of every `hold_out_every`. Both parts are
// non-empty if there are that many blocks.
TextSplit SplitBlocks(const std::vector<std::string>& documents, size_t block_bytes = 0,
                      size_t hold_out_every = 20);

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_CORPUS_H_
