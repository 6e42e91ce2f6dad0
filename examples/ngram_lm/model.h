// SPDX-License-Identifier: Apache-2.0
// The part of the demo ngram_lm that needs no server: the text as tokens (Text), the model from tokens to
// hidden states (StageOne, a neural n-gram model; Bengio et al., 2003), and its optimizer (Adam). trainer.h
// trains them together with a loss head on a server.
//
// Classes are not thread-safe; functions are.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_MODEL_H_
#define LOSSD_EXAMPLES_NGRAM_LM_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::ngram_lm {

// A text as tokens in [0, vocab_size). Token 0 stands for every rare word.
struct Text {
  std::vector<int32_t> train;
  std::vector<int32_t> held_out;
  int32_t vocab_size = 0;
};

// Cuts a text into words. A word is a run of letters and digits, or one other character, with the space
// before it.
std::vector<absl::string_view> SplitWords(absl::string_view text);

// Turns a text into tokens. The vocab_size - 1 most frequent words of the training part get a token of their
// own; fewer words if the text has fewer. Every twentieth block of the text is held out. INVALID_ARGUMENT if
// the text has fewer than 1,000 words or vocab_size is below 2.
absl::StatusOr<Text> Tokenize(absl::string_view text, int32_t vocab_size);

// Calls Tokenize with the text of all files that match a pattern of glob(7), joined in the order of their
// paths. NOT_FOUND if no file matches.
absl::StatusOr<Text> LoadText(const std::string& pattern, int32_t vocab_size);

// The mean negative log-likelihood (nats a token) of the held-out text if tokens have the frequencies of the
// training text, with one added to every count. A model that learns only these frequencies reaches this loss.
double UnigramEntropy(const Text& text);

// Adam (Kingma and Ba, 2015, algorithm 1) with bias correction, beta1 = 0.9 and beta2 = 0.99.
struct Adam {
  explicit Adam(size_t parameters) : moment1(parameters), moment2(parameters) {}

  void Step(float learning_rate, absl::Span<const float> gradients, absl::Span<float> parameters);

  int64_t steps = 0;
  std::vector<float> moment1;  // [parameters]
  std::vector<float> moment2;  // [parameters]
};

struct StageOneShape {
  int64_t tokens = 0;      // V: contexts hold tokens in [0, V)
  int64_t context = 8;     // k
  int64_t embedding = 64;  // E
  int64_t hidden = 256;    // H
  int64_t output = 128;    // D
};

// The rows of a microbatch, and the intermediate values that Forward computes and Backward needs.
struct Activations {
  std::vector<int32_t> contexts;  // [N, k]
  std::vector<int32_t> targets;   // [N]
  std::vector<float> joined;      // c [N, k E]
  std::vector<float> inner;       // u [N, H]
  std::vector<float> active;      // h [N, H]
  std::vector<float> output;      // x [N, D]
};

// The model up to the hidden state:
//
//   c = [e(t-k), ..., e(t-1)]      embeddings of the last k tokens, concatenated   [k E]
//   u = A c + a,  h = gelu(u)      hidden layer (tanh form of GELU)                 [H]
//   x = B h + b                    hidden state, which the loss head classifies     [D]
//
// Parameters and gradients are one flat array each, so that the optimizer needs no structure.
class StageOne {
 public:
  StageOne(const StageOneShape& shape, uint64_t seed);

  const StageOneShape& shape() const { return shape_; }
  absl::Span<float> parameters() { return absl::MakeSpan(parameters_); }
  absl::Span<float> gradients() { return absl::MakeSpan(gradients_); }

  // Runs the model to predict the tokens at these positions. Each position is in [context, tokens.size()).
  Activations Forward(absl::Span<const int32_t> tokens, absl::Span<const int64_t> positions) const;
  // Adds the gradient with respect to the parameters to gradients(). grad_output is dL/dx [N, D].
  void Backward(const Activations& activations, absl::Span<const float> grad_output);
  void ZeroGradients();

 private:
  // Offsets of the parts in the flat arrays.
  struct Layout {
    int64_t embeddings, hidden_weight, hidden_bias, output_weight, output_bias, size;
  };
  static Layout LayoutOf(const StageOneShape& shape);

  const StageOneShape shape_;
  const Layout layout_;
  std::vector<float> parameters_;
  std::vector<float> gradients_;
};

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_MODEL_H_
