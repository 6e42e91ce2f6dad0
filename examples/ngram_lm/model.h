// SPDX-License-Identifier: Apache-2.0
// Stage one of the demo (StageOne): a neural n-gram model up to the hidden state (Bengio et al., 2003), its
// optimizer (Adam), and the rows that it learns from (GatherRows, Shuffler).
//
// Not thread-safe unless a comment says otherwise.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_MODEL_H_
#define LOSSD_EXAMPLES_NGRAM_LM_MODEL_H_

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace lossd::ngram_lm {

// Adam (Kingma and Ba, 2015, algorithm 1) over a flat array of parameters, with bias correction.
class Adam {
 public:
  struct Options {
    float beta1 = 0.9f;
    float beta2 = 0.99f;
    float epsilon = 1e-8f;
  };

  // What it remembers between steps.
  struct State {
    int64_t steps = 0;
    std::vector<float> moment1;  // [size]
    std::vector<float> moment2;  // [size]
  };

  Adam(size_t size, const Options& options);

  const State& state() const { return state_; }
  // Goes on from a state of an optimizer of the same size.
  void Restore(State state) { state_ = std::move(state); }

  // One step: parameters [size] move against gradients [size].
  void Step(float learning_rate, absl::Span<const float> gradients, absl::Span<float> parameters);

 private:
  const Options options_;
  State state_;
};

// Makes rows of an n-gram model out of a sequence of tokens. For each position t: the `context` tokens before
// it (`padding` before the first one) and token t. contexts becomes [positions, context], targets
// [positions].
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

// The n-gram model:
//
//   c = [e(t-k), ..., e(t-1)]      embeddings of the last k tokens, concatenated   [k E]
//   u = A c + a,  h = gelu(u)      hidden layer (tanh form of GELU)                 [H]
//   x = B h + b                    hidden state handed to the loss head             [D]
//
// Parameters and gradients live in one flat array each, for the optimizer. Backward adds to the gradients.
// One thread at a time, except that Forward is const.
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
