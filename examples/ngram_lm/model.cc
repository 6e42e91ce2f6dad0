// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/model.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace lossd::ngram_lm {

// ---- Adam ----

Adam::Adam(size_t size, const Options& options)
    : options_(options), state_{0, std::vector<float>(size), std::vector<float>(size)} {}

void Adam::Step(float learning_rate, absl::Span<const float> gradients, absl::Span<float> parameters) {
  ++state_.steps;
  const auto correction1 = static_cast<float>(1 - std::pow(options_.beta1, state_.steps));
  const auto correction2 = static_cast<float>(1 - std::pow(options_.beta2, state_.steps));
  const float rate = learning_rate / correction1;
  const float root_correction2 = std::sqrt(correction2);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const float g = gradients[i];
    float& moment1 = state_.moment1[i];
    float& moment2 = state_.moment2[i];
    moment1 += (1 - options_.beta1) * (g - moment1);
    moment2 += (1 - options_.beta2) * (g * g - moment2);
    parameters[i] -= rate * moment1 / (std::sqrt(moment2) / root_correction2 + options_.epsilon);
  }
}

// ---- Rows ----

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

StageOne::StageOne(const StageOneShape& shape, uint64_t seed)
    : shape_(shape), layout_(LayoutOf(shape)), parameters_(layout_.size), gradients_(layout_.size) {
  Initialize(seed);
}

// Unit-variance embeddings; He initialization before the GELU, and an output of about unit variance.
void StageOne::Initialize(uint64_t seed) {
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

void StageOne::Forward(Activations* activations) const {
  const int64_t width = shape_.context * shape_.embedding;
  const int64_t n = static_cast<int64_t>(activations->contexts.size()) / shape_.context;
  activations->joined.resize(n * width);
  activations->inner.resize(n * shape_.hidden);
  activations->active.resize(n * shape_.hidden);
  activations->output.resize(n * shape_.output);
  const float* p = parameters_.data();
  for (int64_t i = 0; i < n * shape_.context; ++i) {
    const float* embedding = p + layout_.embeddings + activations->contexts[i] * shape_.embedding;
    std::copy(embedding, embedding + shape_.embedding, activations->joined.data() + i * shape_.embedding);
  }
  Linear(activations->joined.data(), p + layout_.hidden_weight, p + layout_.hidden_bias, n, width,
         shape_.hidden, activations->inner.data());
  std::transform(activations->inner.begin(), activations->inner.end(), activations->active.begin(), Gelu);
  Linear(activations->active.data(), p + layout_.output_weight, p + layout_.output_bias, n, shape_.hidden,
         shape_.output, activations->output.data());
}

void StageOne::Backward(const Activations& activations, absl::Span<const float> grad_output) {
  const int64_t width = shape_.context * shape_.embedding;
  const int64_t n = static_cast<int64_t>(activations.contexts.size()) / shape_.context;
  const float* p = parameters_.data();
  float* g = gradients_.data();
  std::vector<float> grad_inner(n * shape_.hidden);
  LinearBackward(activations.active.data(), p + layout_.output_weight, grad_output.data(), n, shape_.hidden,
                 shape_.output, g + layout_.output_weight, g + layout_.output_bias, grad_inner.data());
  for (int64_t i = 0; i < n * shape_.hidden; ++i) grad_inner[i] *= GeluDerivative(activations.inner[i]);
  std::vector<float> grad_joined(n * width);
  LinearBackward(activations.joined.data(), p + layout_.hidden_weight, grad_inner.data(), n, width,
                 shape_.hidden, g + layout_.hidden_weight, g + layout_.hidden_bias, grad_joined.data());
  ScatterEmbeddings(activations.contexts, grad_joined);
}

void StageOne::ScatterEmbeddings(absl::Span<const int32_t> contexts, absl::Span<const float> grad_joined) {
  for (size_t i = 0; i < contexts.size(); ++i) {
    float* grad = gradients_.data() + layout_.embeddings + contexts[i] * shape_.embedding;
    const float* from = grad_joined.data() + static_cast<int64_t>(i) * shape_.embedding;
    for (int64_t e = 0; e < shape_.embedding; ++e) grad[e] += from[e];
  }
}

void StageOne::ZeroGradients() { std::fill(gradients_.begin(), gradients_.end(), 0.0f); }

}  // namespace lossd::ngram_lm
