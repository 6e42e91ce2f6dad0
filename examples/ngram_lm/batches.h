// SPDX-License-Identifier: Apache-2.0
// Rows of an n-gram model out of a sequence of tokens.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_BATCHES_H_
#define LOSSD_EXAMPLES_NGRAM_LM_BATCHES_H_

#include <cstdint>
#include <random>
#include <vector>

#include "absl/types/span.h"

namespace lossd::ngram_lm {

// For each position t: the `context` tokens before it (`padding` before the first one) and token t.
// contexts becomes [positions, context], targets [positions].
void GatherRows(absl::Span<const int32_t> tokens, absl::Span<const int64_t> positions, int64_t context,
                int32_t padding, std::vector<int32_t>* contexts, std::vector<int32_t>* targets);

// All positions of a sequence in random order, without end: every epoch has each once. Not thread-safe.
class Shuffler {
 public:
  // size >= 1.
  Shuffler(int64_t size, uint64_t seed);
  std::vector<int64_t> Next(int64_t count);
  // As Next, for positions that the caller does not want to know.
  void Skip(int64_t count);
  double epochs() const;

 private:
  std::mt19937_64 random_;
  std::vector<int64_t> order_;
  int64_t taken_ = 0;
};

// At most `count` positions in [0, size), evenly spaced.
std::vector<int64_t> EvenlySpaced(int64_t size, int64_t count);

// Mean negative log-likelihood (nats a token) of `text` under the frequencies of `train`, one added to every
// count so that tokens absent from `train` have a probability.
double UnigramEntropy(absl::Span<const int32_t> train, absl::Span<const int32_t> text, int64_t vocab_size);

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_BATCHES_H_
