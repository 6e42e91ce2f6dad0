// SPDX-License-Identifier: Apache-2.0
// Stage one of the demo: a neural n-gram model up to the hidden state (Bengio et al., 2003).
//
//   c = [e(t-k), ..., e(t-1)]      embeddings of the last k tokens, concatenated   [k E]
//   u = A c + a,  h = gelu(u)      hidden layer (tanh form of GELU)                 [H]
//   x = B h + b                    hidden state handed to the loss head             [D]
//
// Parameters and gradients live in one flat array each, for the optimizer. Backward adds to the gradients.
// Not thread-safe: one thread at a time, except that Forward is const.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_MODEL_H_
#define LOSSD_EXAMPLES_NGRAM_LM_MODEL_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace lossd::ngram_lm {

struct StageOneShape {
  int64_t tokens = 0;      // embeddings; contexts hold tokens in [0, tokens)
  int64_t context = 8;     // k
  int64_t embedding = 64;  // E
  int64_t hidden = 256;    // H
  int64_t output = 128;    // D
};

// What Forward leaves for Backward: one microbatch of N rows.
struct Activations {
  std::vector<int32_t> contexts;  // [N, k]
  std::vector<float> joined;      // c [N, k E]
  std::vector<float> inner;       // u [N, H]
  std::vector<float> active;      // h [N, H]
  std::vector<float> output;      // x [N, D]
};

class StageOne {
 public:
  StageOne(const StageOneShape& shape, uint64_t seed);

  const StageOneShape& shape() const { return shape_; }
  absl::Span<float> parameters() { return absl::MakeSpan(parameters_); }
  absl::Span<float> gradients() { return absl::MakeSpan(gradients_); }

  // Reads activations->contexts [N, k] and fills the rest.
  void Forward(Activations* activations) const;

  // Adds the gradient of the parameters, given dL/dx [N, D].
  void Backward(const Activations& activations, absl::Span<const float> grad_output);

  void ZeroGradients();

 private:
  // Offsets in the flat arrays.
  struct Layout {
    int64_t embeddings, hidden_weight, hidden_bias, output_weight, output_bias, size;
  };
  static Layout LayoutOf(const StageOneShape& shape);

  void Initialize(uint64_t seed);
  void ScatterEmbeddings(absl::Span<const int32_t> contexts, absl::Span<const float> grad_joined);

  const StageOneShape shape_;
  const Layout layout_;
  std::vector<float> parameters_;
  std::vector<float> gradients_;
};

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_MODEL_H_
