// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/problem.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <utility>

#include "Eigen/Core"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/backend.h"

namespace lossd::kernels::testing {
namespace {

template <typename T>
std::vector<uint8_t> EncodeAs(absl::Span<const float> values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = static_cast<T>(values[i]);
    std::memcpy(&bytes[i * sizeof(T)], &value, sizeof(T));
  }
  return bytes;
}

template <typename T>
std::vector<float> DecodeAs(absl::Span<const uint8_t> bytes) {
  std::vector<float> values(bytes.size() / sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    T value;
    std::memcpy(&value, &bytes[i * sizeof(T)], sizeof(T));
    values[i] = static_cast<float>(value);
  }
  return values;
}

std::vector<float> Normal(Rng& rng, int64_t n, float mean, float deviation, DType dtype) {
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = RoundTo(dtype, normal(rng));
  return values;
}

std::vector<float> UniformVector(Rng& rng, int64_t n, float low, float high) {
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = Uniform(rng, low, high);
  return values;
}

}  // namespace

Rng FreshRng() {
  const char* fixed = std::getenv("LOSSD_TEST_SEED");
  const uint64_t seed = fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
  std::cout << "LOSSD_TEST_SEED=" << seed << std::endl;
  return Rng(seed);
}

float Uniform(Rng& rng, float low, float high) {
  return std::uniform_real_distribution<float>(low, high)(rng);
}

int64_t UniformInt(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

bool Chance(Rng& rng, double probability) { return std::bernoulli_distribution(probability)(rng); }

float RoundTo(DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat32:
      return value;
    case DType::kFloat16:
      return static_cast<float>(Eigen::half(value));
    case DType::kBFloat16:
      return static_cast<float>(Eigen::bfloat16(value));
  }
  return value;
}

std::vector<uint8_t> Encode(DType dtype, absl::Span<const float> values) {
  switch (dtype) {
    case DType::kFloat32:
      return EncodeAs<float>(values);
    case DType::kFloat16:
      return EncodeAs<Eigen::half>(values);
    case DType::kBFloat16:
      return EncodeAs<Eigen::bfloat16>(values);
  }
  return {};
}

std::vector<float> Decode(DType dtype, absl::Span<const uint8_t> bytes) {
  switch (dtype) {
    case DType::kFloat32:
      return DecodeAs<float>(bytes);
    case DType::kFloat16:
      return DecodeAs<Eigen::half>(bytes);
    case DType::kBFloat16:
      return DecodeAs<Eigen::bfloat16>(bytes);
  }
  return {};
}

int64_t Problem::rows() const {
  int64_t total = 0;
  for (const SliceData& slice : slices) total += slice.rows();
  return total;
}

std::vector<float>& Problem::Values(Param param) {
  return const_cast<std::vector<float>&>(std::as_const(*this).Values(param));
}

const std::vector<float>& Problem::Values(Param param) const {
  switch (param) {
    case Param::kBias:
      return bias;
    case Param::kNormGain:
      return norm_gain;
    case Param::kNormShift:
      return norm_shift;
    case Param::kClassWeights:
      return class_weights;
    default:
      return weight;
  }
}

namespace {

// Weights as of a softmax, whose sum is in (0, 1) but for what some rows have all of.
void DrawTargets(const ProblemSpec& spec, int64_t rows, Rng& rng, SliceData& slice) {
  const int64_t vocab = spec.config.vocab_size;
  slice.target_count = static_cast<int32_t>(std::min<int64_t>(spec.target_count, vocab));
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<float> weights;
    float sum = 0.0f;
    for (int32_t i = 0; i < slice.target_count; ++i) {
      const bool filler = i > 0 && Chance(rng, 0.1);
      const bool again = i > 0 && !filler && Chance(rng, 0.2);
      const auto fresh = static_cast<int32_t>(UniformInt(rng, 0, vocab - 1));
      const int32_t before = i > 0 ? slice.target_classes.back() : kNoClass;
      slice.target_classes.push_back(filler ? kNoClass : again && before != kNoClass ? before : fresh);
      weights.push_back(filler || (i > 0 && Chance(rng, 0.1)) ? 0.0f : std::exp(Uniform(rng, -4.0f, 2.0f)));
      sum += weights.back();
    }
    const bool whole = spec.options.rest != Rest::kOneClass && Chance(rng, 0.2);
    const float share = whole ? 1.0f : Uniform(rng, 0.05f, 0.95f);
    for (const float weight : weights) slice.target_weights.push_back(weight * share / sum);
  }
}

}  // namespace

SliceData MakeSlice(const ProblemSpec& spec, int64_t rows, Rng& rng) {
  SliceData slice;
  slice.hidden = Normal(rng, rows * spec.config.hidden_size, 0.1f, 1.0f, spec.hidden_dtype);
  for (const ProblemSpec& teacher : spec.teacher) {
    slice.teacher_hidden = Normal(rng, rows * teacher.config.hidden_size, 0.1f, 1.0f, spec.hidden_dtype);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t target = UniformInt(rng, 0, spec.config.vocab_size - 1);
    slice.targets.push_back(Chance(rng, spec.ignored) ? kIgnoredTarget : static_cast<int32_t>(target));
  }
  slice.grad_scale = spec.grad_scale;
  slice.sample_seed = rng();
  slice.first_row = UniformInt(rng, 0, 1000);
  if (spec.row_weights) slice.row_weights = UniformVector(rng, rows, 0.0f, 2.0f);
  if (spec.grad_loss) slice.grad_loss = UniformVector(rng, rows, -1.0f, 1.0f);
  if (spec.grad_lse) slice.grad_lse = UniformVector(rng, rows, -1.0f, 1.0f);
  if (spec.grad_entropy) slice.grad_entropy = UniformVector(rng, rows, -1.0f, 1.0f);
  slice.class_count = spec.class_count;
  slice.shared_classes = spec.shared_classes;
  slice.top_k = static_cast<int32_t>(std::min<int64_t>(spec.top_k, spec.config.vocab_size));
  for (int64_t i = 0; i < (spec.shared_classes ? 1 : rows) * spec.class_count; ++i) {
    const bool again = i % spec.class_count > 0 && Chance(rng, 0.2);
    const auto fresh = static_cast<int32_t>(UniformInt(rng, 0, spec.config.vocab_size - 1));
    slice.classes.push_back(again ? slice.classes.back() : fresh);
  }
  if (spec.options.has_soft_targets()) DrawTargets(spec, rows, rng, slice);
  if (spec.accumulate_mask) {
    for (int64_t i = 0; i < rows; ++i) slice.accumulate.push_back(Chance(rng, 0.6) ? 1 : 0);
  }
  return slice;
}

Problem MakeProblem(const ProblemSpec& spec, Rng& rng) {
  Problem problem;
  problem.config = spec.config;
  problem.options = spec.options;
  problem.hidden_dtype = spec.hidden_dtype;
  problem.auto_samples_uniform = spec.auto_samples_uniform;
  problem.exact_distilled = spec.exact_distilled;
  problem.class_parts = spec.class_parts;
  const int64_t d = spec.config.hidden_size;
  const int64_t v = spec.config.vocab_size;
  const float deviation = spec.logit_deviation / std::sqrt(static_cast<float>(d));
  problem.weight = Normal(rng, v * d, 0.0f, deviation, spec.config.compute_dtype);
  if (spec.config.has_bias) problem.bias = UniformVector(rng, v, -1.0f, 1.0f);
  if (spec.config.has_class_weights) problem.class_weights = UniformVector(rng, v, 0.25f, 2.0f);
  if (spec.config.norm != Norm::kNone) problem.norm_gain = UniformVector(rng, d, 0.5f, 1.5f);
  if (spec.config.norm == Norm::kLayerNorm) problem.norm_shift = UniformVector(rng, d, -0.5f, 0.5f);
  for (const ProblemSpec& teacher : spec.teacher) {
    problem.teacher.push_back(MakeProblem(teacher, rng));
    problem.teacher.back().slices.clear();
  }
  for (int64_t rows : spec.slice_rows) problem.slices.push_back(MakeSlice(spec, rows, rng));
  return problem;
}

ProblemSpec RandomSpec(int64_t rows, int64_t hidden_size, int64_t vocab_size, DType hidden_dtype,
                       DType compute, Rng& rng) {
  ProblemSpec spec;
  spec.hidden_dtype = hidden_dtype;
  spec.config.hidden_size = hidden_size;
  spec.config.vocab_size = vocab_size;
  spec.config.compute_dtype = compute;
  spec.config.has_bias = Chance(rng, 0.5);
  spec.config.has_class_weights = Chance(rng, 0.5);
  spec.config.norm = static_cast<Norm>(UniformInt(rng, 0, 2));
  spec.config.norm_epsilon = 1e-3f;
  spec.config.optimizer_state = OptimizerState::kNone;
  if (Chance(rng, 0.5)) spec.options.logit_scale = Uniform(rng, 0.3f, 1.5f);
  if (Chance(rng, 0.5)) spec.options.softcap = Uniform(rng, 5.0f, 30.0f);
  if (Chance(rng, 0.5)) spec.options.label_smoothing = Uniform(rng, 0.0f, 0.3f);
  if (Chance(rng, 0.5)) spec.options.z_loss = Uniform(rng, 0.0f, 1e-2f);
  spec.options.use_class_weights = spec.config.has_class_weights && Chance(rng, 0.7);
  if (Chance(rng, 0.5)) {
    spec.options.gradients = static_cast<Gradients>(UniformInt(rng, 1, 3));
    spec.options.filter_epsilon = Chance(rng, 0.2) ? 0.0f : Uniform(rng, 1e-4f, 1e-2f);
    spec.options.sample_threshold = Uniform(rng, 1e-4f, 3e-2f);
    spec.options.max_gradient_error = Chance(rng, 0.5) ? 1e6f : 0.0f;
  }
  spec.row_weights = Chance(rng, 0.5);
  spec.accumulate_mask = Chance(rng, 0.5);
  spec.grad_loss = Chance(rng, 0.5);
  spec.grad_lse = Chance(rng, 0.3);
  spec.grad_entropy = Chance(rng, 0.3);
  spec.grad_scale = Uniform(rng, 0.1f, 2.0f);
  if (Chance(rng, 0.3)) spec.class_count = static_cast<int32_t>(UniformInt(rng, 1, 9));
  spec.shared_classes = Chance(rng, 0.3);
  if (Chance(rng, 0.3)) spec.top_k = static_cast<int32_t>(UniformInt(rng, 1, 70));
  spec.slice_rows.clear();
  for (int64_t left = rows; left > 0;) {
    const int64_t take = UniformInt(rng, 1, left);
    spec.slice_rows.push_back(take);
    left -= take;
  }
  return spec;
}

std::vector<ProblemSpec> EachOptionAlone(const ProblemSpec& plain) {
  std::vector<ProblemSpec> specs(17, plain);
  specs[1].config.has_bias = true;
  specs[2].config.norm = Norm::kLayerNorm;
  specs[3].config.norm = Norm::kRmsNorm;
  specs[4].options.logit_scale = 0.125f;
  specs[5].options.softcap = 6.0f;
  specs[6].options.label_smoothing = 0.1f;
  specs[7].options.z_loss = 0.02f;
  specs[8].config.has_class_weights = specs[8].options.use_class_weights = true;
  specs[9].row_weights = true;
  specs[10].grad_loss = true;
  specs[11].grad_lse = true;
  specs[12].grad_entropy = true;
  specs[13].grad_scale = -0.37f;
  specs[14].top_k = 5;
  specs[15].class_count = 7;
  specs[16].class_count = 3;
  specs[16].shared_classes = true;
  specs[16].top_k = 64;
  return specs;
}

std::string Describe(const Problem& problem) {
  const HeadConfig& config = problem.config;
  const LossOptions& options = problem.options;
  std::vector<int64_t> rows;
  for (const SliceData& slice : problem.slices) rows.push_back(slice.rows());
  std::string text = absl::StrCat(
      "slices [", absl::StrJoin(rows, " "), "] D ", config.hidden_size, " V ", config.vocab_size, " hidden ",
      Name(problem.hidden_dtype), " compute ", Name(config.compute_dtype), " logits ", Name(config.logits),
      " norm ", Name(config.norm), " bias ", config.has_bias, " scale ", options.logit_scale, " softcap ",
      options.softcap, " smoothing ", options.label_smoothing, " z_loss ", options.z_loss, " class weights ",
      options.use_class_weights, " gradients ", Name(options.gradients), " epsilon ", options.filter_epsilon,
      " threshold ", options.sample_threshold, " error at most ", options.max_gradient_error);
  if (const Objective& objective = options.objective; objective.active()) {
    absl::StrAppend(&text, " objective ", Name(objective.kind), " clip ", objective.clip_low, " ",
                    objective.clip_high, " dual ", objective.dual_clip, " ", Name(objective.kl), " ",
                    objective.kl_coef, " entropy bonus ", objective.entropy_bonus);
  }
  if (options.has_soft_targets()) absl::StrAppend(&text, " rest ", Name(options.rest));
  if (options.distillation.used()) {
    const Distillation& distillation = options.distillation;
    absl::StrAppend(&text, " ", Name(distillation.divergence), " beta ", distillation.beta, " temperature ",
                    distillation.temperature, " weight ", distillation.weight, " target weight ",
                    distillation.target_weight, " teacher scale ", distillation.teacher_logit_scale,
                    " softcap ", distillation.teacher_softcap, " of {", Describe(problem.teacher.front()),
                    "}");
  }
  if (problem.slices.empty()) return text;
  const SliceData& first = problem.slices.front();
  absl::StrAppend(&text, " row weights ", !first.row_weights.empty(), " mask ", !first.accumulate.empty(),
                  " grad_loss ", !first.grad_loss.empty(), " grad_lse ", !first.grad_lse.empty(),
                  " grad_entropy ", !first.grad_entropy.empty(), " grad_scale ", first.grad_scale,
                  " classes ", first.class_count, first.shared_classes ? " shared" : "", " top_k ",
                  first.top_k, " soft targets ", first.target_count);
  return text;
}

}  // namespace lossd::kernels::testing
