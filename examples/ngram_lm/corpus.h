// SPDX-License-Identifier: Apache-2.0
// The text the demo learns: found on the machine, stripped of markup, split into train and held-out parts.
// Functions without state; thread-safe.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_CORPUS_H_
#define LOSSD_EXAMPLES_NGRAM_LM_CORPUS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::ngram_lm {

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
