// SPDX-License-Identifier: Apache-2.0
// The text, the model and its optimizer (model.h).
#include "examples/ngram_lm/model.h"

#include <cblas.h>
#include <glob.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <random>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace lossd::ngram_lm {

// ---- Text ----

std::vector<absl::string_view> SplitWords(absl::string_view text) {
  const auto in_word = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || static_cast<unsigned char>(c) >= 0x80;
  };
  std::vector<absl::string_view> words;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    if (text[end] == ' ' && end + 1 < text.size()) ++end;
    const bool word = in_word(text[end++]);
    while (word && end < text.size() && in_word(text[end])) ++end;
    words.push_back(text.substr(begin, end - begin));
  }
  return words;
}

absl::StatusOr<Text> Tokenize(absl::string_view text, int32_t vocab_size) {
  constexpr size_t kFewestWords = 1000, kBlocks = 200, kLargestBlock = 8192, kHoldOutEvery = 20;
  const std::vector<absl::string_view> words = SplitWords(text);
  if (words.size() < kFewestWords || vocab_size < 2) {
    return absl::InvalidArgumentError(absl::StrCat("the text has ", words.size(), " words (", kFewestWords,
                                                   " are needed), the vocabulary ", vocab_size, " (2)"));
  }
  const size_t block = std::min(words.size() / kBlocks, kLargestBlock);
  const auto held_out = [&](size_t i) { return i / block % kHoldOutEvery == kHoldOutEvery - 1; };

  absl::flat_hash_map<absl::string_view, int64_t> counts;
  for (size_t i = 0; i < words.size(); ++i)
    if (!held_out(i)) ++counts[words[i]];
  // (-count, word), so that sorting puts frequent words first.
  std::vector<std::pair<int64_t, absl::string_view>> frequent;
  for (const auto& [word, count] : counts) frequent.emplace_back(-count, word);
  std::sort(frequent.begin(), frequent.end());
  if (frequent.size() >= static_cast<size_t>(vocab_size)) frequent.resize(vocab_size - 1);

  absl::flat_hash_map<absl::string_view, int32_t> tokens;
  for (const auto& [count, word] : frequent) tokens.emplace(word, static_cast<int32_t>(tokens.size()) + 1);
  Text result;
  result.vocab_size = static_cast<int32_t>(tokens.size()) + 1;
  for (size_t i = 0; i < words.size(); ++i) {
    const auto token = tokens.find(words[i]);
    (held_out(i) ? result.held_out : result.train).push_back(token == tokens.end() ? 0 : token->second);
  }
  return result;
}

absl::StatusOr<Text> LoadText(const std::string& pattern, int32_t vocab_size) {
  glob_t found{};
  std::string text;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    for (size_t i = 0; i < found.gl_pathc; ++i) {
      std::ifstream file(found.gl_pathv[i], std::ios::binary);
      text.append(std::istreambuf_iterator<char>(file), {});
    }
  }
  globfree(&found);
  if (text.empty()) {
    return absl::NotFoundError(
        absl::StrCat("--text: no file at ", pattern, ": install the package perl-doc, or name another text"));
  }
  return Tokenize(text, vocab_size);
}

double UnigramEntropy(const Text& text) {
  std::vector<double> counts(text.vocab_size, 1.0);
  for (int32_t token : text.train) ++counts[token];
  const double total = std::log(static_cast<double>(text.train.size()) + text.vocab_size);
  double sum = 0;
  for (int32_t token : text.held_out) sum += total - std::log(counts[token]);
  return sum / static_cast<double>(text.held_out.size());
}

// ---- Adam ----

void Adam::Step(float learning_rate, absl::Span<const float> gradients, absl::Span<float> parameters) {
  constexpr float kBeta1 = 0.9f, kBeta2 = 0.99f, kEpsilon = 1e-8f;
  ++steps;
  const float rate = learning_rate / static_cast<float>(1 - std::pow(kBeta1, steps));
  const float root_correction2 = std::sqrt(static_cast<float>(1 - std::pow(kBeta2, steps)));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const float g = gradients[i];
    moment1[i] += (1 - kBeta1) * (g - moment1[i]);
    moment2[i] += (1 - kBeta2) * (g * g - moment2[i]);
    parameters[i] -= rate * moment1[i] / (std::sqrt(moment2[i]) / root_correction2 + kEpsilon);
  }
}

// ---- StageOne ----

namespace {

constexpr float kGeluRoot = 0.7978845608f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

float Gelu(float u) { return 0.5f * u * (1 + std::tanh(kGeluRoot * (u + kGeluCubic * u * u * u))); }

float GeluDerivative(float u) {
  const float t = std::tanh(kGeluRoot * (u + kGeluCubic * u * u * u));
  return 0.5f * (1 + t) + 0.5f * u * (1 - t * t) * kGeluRoot * (1 + 3 * kGeluCubic * u * u);
}

// out [N, M] = in [N, K] weight[M, K]^T + bias [M].
void Linear(const float* in, const float* weight, const float* bias, int64_t n, int64_t k, int64_t m,
            float* out) {
  for (int64_t row = 0; row < n; ++row) std::copy(bias, bias + m, out + row * m);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, m, k, 1, in, k, weight, k, 1, out, m);
}

// grad_weight [M, K] += grad_out[N, M]^T in [N, K]; grad_bias [M] += column sums of grad_out;
// grad_in [N, K] = grad_out weight [M, K].
void LinearBackward(const float* in, const float* weight, const float* grad_out, int64_t n, int64_t k,
                    int64_t m, float* grad_weight, float* grad_bias, float* grad_in) {
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, m, k, n, 1, grad_out, m, in, k, 1, grad_weight, k);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < m; ++i) grad_bias[i] += grad_out[row * m + i];
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, k, m, 1, grad_out, m, weight, k, 0, grad_in, k);
}

}  // namespace

StageOne::Layout StageOne::LayoutOf(const StageOneShape& shape) {
  Layout layout{};
  layout.hidden_weight = shape.tokens * shape.embedding;
  layout.hidden_bias = layout.hidden_weight + shape.hidden * shape.context * shape.embedding;
  layout.output_weight = layout.hidden_bias + shape.hidden;
  layout.output_bias = layout.output_weight + shape.output * shape.hidden;
  layout.size = layout.output_bias + shape.output;
  return layout;
}

// The initial values: embeddings of unit variance, He initialization before the GELU, and output weights that
// give x about unit variance.
StageOne::StageOne(const StageOneShape& shape, uint64_t seed)
    : shape_(shape), layout_(LayoutOf(shape)), parameters_(layout_.size), gradients_(layout_.size) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](int64_t begin, int64_t end, double fan_in_per_gain) {
    const auto scale = static_cast<float>(1 / std::sqrt(fan_in_per_gain));
    for (int64_t i = begin; i < end; ++i) parameters_[i] = scale * normal(random);
  };
  fill(layout_.embeddings, layout_.hidden_weight, 1);
  fill(layout_.hidden_weight, layout_.hidden_bias,
       0.5 * static_cast<double>(shape_.context * shape_.embedding));
  fill(layout_.output_weight, layout_.output_bias, 0.8 * static_cast<double>(shape_.hidden));
}

Activations StageOne::Forward(absl::Span<const int32_t> tokens, absl::Span<const int64_t> positions) const {
  const auto n = static_cast<int64_t>(positions.size());
  const int64_t width = shape_.context * shape_.embedding;
  const float* p = parameters_.data();
  Activations a;
  for (const int64_t t : positions) {
    a.contexts.insert(a.contexts.end(), tokens.begin() + (t - shape_.context), tokens.begin() + t);
    a.targets.push_back(tokens[t]);
  }
  for (const int32_t token : a.contexts) {
    const float* embedding = p + layout_.embeddings + token * shape_.embedding;
    a.joined.insert(a.joined.end(), embedding, embedding + shape_.embedding);
  }
  a.inner.resize(n * shape_.hidden);
  Linear(a.joined.data(), p + layout_.hidden_weight, p + layout_.hidden_bias, n, width, shape_.hidden,
         a.inner.data());
  a.active.resize(n * shape_.hidden);
  std::transform(a.inner.begin(), a.inner.end(), a.active.begin(), Gelu);
  a.output.resize(n * shape_.output);
  Linear(a.active.data(), p + layout_.output_weight, p + layout_.output_bias, n, shape_.hidden, shape_.output,
         a.output.data());
  return a;
}

void StageOne::Backward(const Activations& a, absl::Span<const float> grad_output) {
  const auto n = static_cast<int64_t>(a.targets.size());
  const int64_t width = shape_.context * shape_.embedding;
  const float* p = parameters_.data();
  float* g = gradients_.data();
  std::vector<float> grad_inner(n * shape_.hidden);
  LinearBackward(a.active.data(), p + layout_.output_weight, grad_output.data(), n, shape_.hidden,
                 shape_.output, g + layout_.output_weight, g + layout_.output_bias, grad_inner.data());
  for (size_t i = 0; i < grad_inner.size(); ++i) grad_inner[i] *= GeluDerivative(a.inner[i]);
  std::vector<float> grad_joined(n * width);
  LinearBackward(a.joined.data(), p + layout_.hidden_weight, grad_inner.data(), n, width, shape_.hidden,
                 g + layout_.hidden_weight, g + layout_.hidden_bias, grad_joined.data());
  for (size_t i = 0; i < a.contexts.size(); ++i) {
    float* grad = g + layout_.embeddings + a.contexts[i] * shape_.embedding;
    const float* from = grad_joined.data() + static_cast<int64_t>(i) * shape_.embedding;
    for (int64_t e = 0; e < shape_.embedding; ++e) grad[e] += from[e];
  }
}

void StageOne::ZeroGradients() { std::fill(gradients_.begin(), gradients_.end(), 0.0f); }

}  // namespace lossd::ngram_lm
