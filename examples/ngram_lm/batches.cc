// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/batches.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lossd::ngram_lm {

void GatherRows(absl::Span<const int32_t> tokens, absl::Span<const int64_t> positions, int64_t context,
                int32_t padding, std::vector<int32_t>* contexts, std::vector<int32_t>* targets) {
  contexts->clear();
  targets->clear();
  for (int64_t t : positions) {
    for (int64_t i = t - context; i < t; ++i) contexts->push_back(i < 0 ? padding : tokens[i]);
    targets->push_back(tokens[t]);
  }
}

Shuffler::Shuffler(int64_t size, uint64_t seed) : random_(seed), order_(size) {
  std::iota(order_.begin(), order_.end(), 0);
}

std::vector<int64_t> Shuffler::Next(int64_t count) {
  std::vector<int64_t> positions;
  const auto size = static_cast<int64_t>(order_.size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = taken_ % size;
    Skip(1);
    positions.push_back(order_[index]);
  }
  return positions;
}

void Shuffler::Skip(int64_t count) {
  const auto size = static_cast<int64_t>(order_.size());
  for (int64_t i = 0; i < count; ++i, ++taken_) {
    if (taken_ % size == 0) std::shuffle(order_.begin(), order_.end(), random_);
  }
}

double Shuffler::epochs() const { return static_cast<double>(taken_) / static_cast<double>(order_.size()); }

std::vector<int64_t> EvenlySpaced(int64_t size, int64_t count) {
  count = std::min(count, size);
  std::vector<int64_t> positions(count);
  for (int64_t i = 0; i < count; ++i) positions[i] = i * size / count;
  return positions;
}

double UnigramEntropy(absl::Span<const int32_t> train, absl::Span<const int32_t> text, int64_t vocab_size) {
  std::vector<double> counts(vocab_size, 1.0);
  for (int32_t token : train) ++counts[token];
  const double total = std::log(static_cast<double>(train.size()) + static_cast<double>(vocab_size));
  double sum = 0;
  for (int32_t token : text) sum += total - std::log(counts[token]);
  return sum / static_cast<double>(text.size());
}

}  // namespace lossd::ngram_lm
