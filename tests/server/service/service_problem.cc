// SPDX-License-Identifier: Apache-2.0
#include "tests/server/service/service_problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "tests/kernels/comparison.h"

namespace lossd::app::testing {
namespace {

using kernels::DType;
using kernels::Param;
using kernels::Role;
using kernels::testing::Problem;
using kernels::testing::Rng;
using kernels::testing::SliceData;
namespace reference = kernels::reference;

constexpr int32_t kIgnoreIndex = -100;

v1::DType WireType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return v1::DTYPE_FP32;
    case DType::kFloat16:
      return v1::DTYPE_FP16;
    case DType::kBFloat16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

v1::Gradients WireGradients(kernels::Gradients gradients) {
  return static_cast<v1::Gradients>(static_cast<int>(gradients) + 1);
}

v1::Param WireParam(Param param) { return static_cast<v1::Param>(static_cast<int>(param) + 1); }

// Row ranges that cover [begin, end), in random order.
std::vector<std::pair<int64_t, int64_t>> Cut(int64_t begin, int64_t end, Rng& rng) {
  std::vector<std::pair<int64_t, int64_t>> pieces;
  while (begin < end) {
    const int64_t next = kernels::testing::UniformInt(rng, begin + 1, end);
    pieces.emplace_back(begin, next);
    begin = next;
  }
  std::shuffle(pieces.begin(), pieces.end(), rng);
  return pieces;
}

double Norm(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

// As tests/kernels/comparison.h says, for fp32 accumulators.
void ExpectGradient(TestClient& client, const std::string& head, Param param, const reference::Gradient& want,
                    double max_abs_logit) {
  const auto got = client.Read(head, WireParam(param), v1::ROLE_GRADIENT);
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_EQ(got->size(), want.value.size());
  std::vector<double> error(got->size());
  for (size_t i = 0; i < error.size(); ++i) error[i] = double{(*got)[i]} - want.value[i];
  const double limit =
      Norm(want.value) * kernels::testing::ToleranceFor(DType::kFloat32).Gradient(max_abs_logit) +
      Norm(want.magnitude) * kernels::testing::ToleranceFor(DType::kFloat32).Magnitude(max_abs_logit) +
      kernels::testing::UndecidedError(want);
  EXPECT_LE(Norm(error), limit + 1e-30) << kernels::Name(param) << ", norm " << Norm(want.value);
}

}  // namespace

void CreateHead(TestClient& client, const std::string& name, const Problem& problem) {
  v1::CreateHeadRequest request;
  request.mutable_zeros();
  v1::HeadSpec& spec = *request.mutable_spec();
  spec.set_name(name);
  spec.set_hidden_size(static_cast<uint64_t>(problem.config.hidden_size));
  spec.set_vocab_size(static_cast<uint64_t>(problem.config.vocab_size));
  spec.set_bias(problem.config.has_bias);
  spec.set_class_weights(problem.config.has_class_weights);
  spec.set_norm(static_cast<v1::Norm>(static_cast<int>(problem.config.norm) + 1));
  spec.set_norm_epsilon(problem.config.norm_epsilon);
  spec.set_compute_dtype(v1::DTYPE_FP32);
  spec.set_frozen(!problem.config.trainable);
  if (problem.config.split == kernels::Split::kVocabulary) spec.set_split(v1::SPLIT_VOCABULARY);
  for (const int32_t share : problem.config.shares) spec.add_shares(static_cast<uint32_t>(share));
  spec.set_gradients(WireGradients(problem.config.gradients));
  if (problem.config.residency == kernels::Residency::kHost) spec.set_residency(v1::RESIDENCY_HOST);
  const auto created = client.CreateHead(request);
  ASSERT_TRUE(created.ok()) << created.status();
  for (const Param param : kernels::kAllParams) {
    if (!kernels::HasTensor(problem.config, {param, Role::kValue})) continue;
    const absl::Status written = client.Write(name, WireParam(param), problem.Values(param));
    ASSERT_TRUE(written.ok()) << written;
  }
}

v1::OpenMicrobatch OpenFor(const std::string& head, const Problem& problem, const SliceData& data,
                           uint64_t id) {
  v1::OpenMicrobatch open;
  open.set_head(head);
  open.set_step(0);
  open.set_microbatch_id(id);
  open.set_microbatch_rows(static_cast<uint64_t>(data.rows()));
  open.mutable_rows()->set_end(static_cast<uint64_t>(data.rows()));
  open.set_hidden_dtype(WireType(problem.hidden_dtype));
  v1::LossOptions& options = *open.mutable_options();
  options.set_label_smoothing(problem.options.label_smoothing);
  options.set_z_loss(problem.options.z_loss);
  options.set_softcap(problem.options.softcap);
  options.set_logit_scale(problem.options.logit_scale);
  options.set_use_class_weights(problem.options.use_class_weights);
  options.set_gradients(WireGradients(problem.options.gradients));
  options.set_filter_epsilon(problem.options.filter_epsilon);
  options.set_sample_threshold(problem.options.sample_threshold);
  options.set_max_gradient_error(problem.options.max_gradient_error);
  if (const kernels::Objective& objective = problem.options.objective; objective.active()) {
    v1::Objective& sent = *options.mutable_objective();
    sent.set_kind(static_cast<v1::ObjectiveKind>(objective.kind));
    if (kernels::HasClip(objective.kind)) {
      sent.set_clip_low(objective.clip_low);
      sent.set_clip_high(objective.clip_high);
    }
    sent.set_dual_clip(objective.dual_clip);
    sent.set_kl(static_cast<v1::KlEstimator>(v1::KL_K1 + static_cast<int>(objective.kl)));
    sent.set_kl_coef(objective.kl_coef);
    sent.set_entropy_bonus(objective.entropy_bonus);
  }
  options.set_rest(static_cast<v1::Rest>(problem.options.rest));
  open.set_target_count(static_cast<uint32_t>(data.target_count));
  open.mutable_target_classes()->Assign(data.target_classes.begin(), data.target_classes.end());
  open.mutable_target_weights()->Assign(data.target_weights.begin(), data.target_weights.end());
  open.mutable_advantages()->Assign(data.advantages.begin(), data.advantages.end());
  open.mutable_old_logprobs()->Assign(data.old_logprobs.begin(), data.old_logprobs.end());
  open.mutable_ref_logprobs()->Assign(data.ref_logprobs.begin(), data.ref_logprobs.end());
  if (const kernels::Distillation& from = problem.options.distillation; from.used()) {
    v1::Distillation& distillation = *options.mutable_distillation();
    distillation.set_teacher(kTeacherName);
    distillation.set_divergence(static_cast<v1::Divergence>(from.divergence));
    distillation.set_beta(from.beta);
    distillation.set_temperature(from.temperature);
    distillation.set_weight(from.weight);
    distillation.set_target_weight(from.target_weight);
    distillation.set_teacher_logit_scale(from.teacher_logit_scale);
    distillation.set_teacher_softcap(from.teacher_softcap);
  }
  open.set_reduction(v1::REDUCTION_SUM);
  open.set_grad_output(data.grad_scale);
  open.set_want_grad_hidden(true);
  open.set_accumulate_gradients(true);
  open.set_want_row_loss(true);
  open.set_want_row_lse(true);
  open.set_want_row_entropy(true);
  open.set_want_row_logprob(true);
  open.set_want_row_argmax(true);
  for (const int32_t target : data.targets) {
    open.add_targets(target == kernels::kIgnoredTarget ? kIgnoreIndex : target);
  }
  for (const float weight : data.row_weights) open.add_row_weights(weight);
  open.set_class_count(static_cast<uint32_t>(data.class_count));
  open.mutable_classes()->Assign(data.classes.begin(), data.classes.end());
  open.set_top_k(static_cast<uint32_t>(data.top_k));
  return open;
}

std::string PayloadOf(const Problem& problem, const SliceData& data, int64_t begin, int64_t end) {
  const auto rows = [&](const std::vector<float>& of, int64_t width) {
    return Bytes(kernels::testing::Encode(
        problem.hidden_dtype, absl::MakeConstSpan(of).subspan(static_cast<size_t>(begin * width),
                                                              static_cast<size_t>((end - begin) * width))));
  };
  std::string payload = rows(data.hidden, problem.config.hidden_size);
  for (const Problem& teacher : problem.teacher) {
    payload += rows(data.teacher_hidden, teacher.config.hidden_size);
  }
  return payload;
}

LossAnswers Stream(TestClient& client, v1::OpenMicrobatch open, const Problem& problem, const SliceData& data,
                   int64_t begin, int64_t end, Rng rng) {
  open.mutable_rows()->set_begin(static_cast<uint64_t>(begin));
  open.mutable_rows()->set_end(static_cast<uint64_t>(end));
  const std::vector<int32_t> targets(open.targets().begin() + begin, open.targets().begin() + end);
  open.mutable_targets()->Assign(targets.begin(), targets.end());
  for (auto* floats : {open.mutable_row_weights(), open.mutable_advantages(), open.mutable_old_logprobs(),
                       open.mutable_ref_logprobs()}) {
    if (floats->empty()) continue;
    const std::vector<float> part(floats->begin() + begin, floats->begin() + end);
    floats->Assign(part.begin(), part.end());
  }
  if (!data.shared_classes) {
    const std::vector<int32_t> classes(open.classes().begin() + begin * data.class_count,
                                       open.classes().begin() + end * data.class_count);
    open.mutable_classes()->Assign(classes.begin(), classes.end());
  }
  const auto cut = [&](auto* entries, auto example) {
    const std::vector<decltype(example)> part(entries->begin() + begin * data.target_count,
                                              entries->begin() + end * data.target_count);
    entries->Assign(part.begin(), part.end());
  };
  cut(open.mutable_target_classes(), int32_t{});
  cut(open.mutable_target_weights(), float{});
  const auto stream = client.OpenLoss();
  stream->SendOpen(open);
  for (const auto& [from, to] : Cut(begin, end, rng)) {
    stream->SendSlice(from, to, PayloadOf(problem, data, from, to));
  }
  return stream->Finish();
}

kernels::testing::SliceOutputs Collect(const Problem& problem, const SliceData& data,
                                       const std::vector<LossAnswers>& calls) {
  const auto rows = static_cast<size_t>(data.rows());
  const auto width = static_cast<size_t>(problem.config.hidden_size);
  kernels::testing::SliceOutputs out;
  for (auto* values : {&out.loss, &out.lse, &out.entropy, &out.target_logprob}) values->assign(rows, NAN);
  out.argmax.assign(rows, -7);
  const auto class_count = static_cast<size_t>(data.class_count), top_k = static_cast<size_t>(data.top_k);
  out.class_logprobs.assign(rows * class_count, NAN);
  out.top_logprobs.assign(rows * top_k, NAN);
  out.top_classes.assign(rows * top_k, -7);
  out.grad_hidden.assign(rows * width, NAN);
  size_t answered = 0;
  for (const LossAnswers& call : calls) {
    EXPECT_TRUE(call.status.ok()) << call.status;
    EXPECT_TRUE(call.accepted.has_value() && call.summary.has_value());
    if (!call.summary.has_value()) continue;
    EXPECT_EQ(call.order.front(), "accepted");
    EXPECT_EQ(call.order.back(), "summary");
    for (const LossAnswers::Slice& slice : call.slices) {
      const size_t begin = slice.result.rows().begin();
      answered += slice.result.rows().end() - begin;
      std::copy(slice.result.row_loss().begin(), slice.result.row_loss().end(), out.loss.begin() + begin);
      std::copy(slice.result.row_lse().begin(), slice.result.row_lse().end(), out.lse.begin() + begin);
      std::copy(slice.result.row_entropy().begin(), slice.result.row_entropy().end(),
                out.entropy.begin() + begin);
      std::copy(slice.result.row_logprob().begin(), slice.result.row_logprob().end(),
                out.target_logprob.begin() + begin);
      std::copy(slice.result.row_argmax().begin(), slice.result.row_argmax().end(),
                out.argmax.begin() + begin);
      std::copy(slice.result.class_logprobs().begin(), slice.result.class_logprobs().end(),
                out.class_logprobs.begin() + begin * class_count);
      std::copy(slice.result.top_logprobs().begin(), slice.result.top_logprobs().end(),
                out.top_logprobs.begin() + begin * top_k);
      std::copy(slice.result.top_classes().begin(), slice.result.top_classes().end(),
                out.top_classes.begin() + begin * top_k);
      const absl::Span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(slice.payload.data()),
                                            slice.payload.size());
      const std::vector<float> grad = kernels::testing::Decode(problem.hidden_dtype, bytes);
      std::copy(grad.begin(), grad.end(), out.grad_hidden.begin() + begin * width);
    }
    out.sums.loss += call.summary->loss_sum();
    out.sums.z_loss += call.summary->z_loss_sum();
    out.sums.entropy += call.summary->entropy_sum();
    out.sums.dropped_mass += call.summary->dropped_mass();
    out.sums.sampling_variance += call.summary->sampling_variance();
    out.sums.squared_gradient += call.summary->squared_gradient();
    out.sums.divergence += call.summary->divergence_sum();
    out.sums.target_loss += call.summary->target_loss_sum();
    out.sums.valid_rows += static_cast<int64_t>(call.summary->valid_rows());
    out.sums.correct_rows += static_cast<int64_t>(call.summary->correct_rows());
    const v1::ObjectiveSums& objective = call.summary->objective();
    out.sums.objective +=
        {static_cast<int64_t>(objective.rows()), static_cast<int64_t>(objective.clipped_rows()),
         objective.ratio(), objective.old_kl(), objective.ref_kl()};
    EXPECT_EQ(call.summary->accumulated_rows(), call.summary->valid_rows());
    EXPECT_EQ(call.summary->repeated_rows(), 0u);
  }
  EXPECT_EQ(answered, rows);
  return out;
}

void ExpectGradients(TestClient& client, const std::string& head, const kernels::HeadConfig& config,
                     const reference::ParamGradients& want, double max_abs_logit) {
  ExpectGradient(client, head, Param::kWeight, want.weight, max_abs_logit);
  if (config.has_bias) ExpectGradient(client, head, Param::kBias, want.bias, max_abs_logit);
  if (config.norm != kernels::Norm::kNone) {
    ExpectGradient(client, head, Param::kNormGain, want.norm_gain, max_abs_logit);
  }
  if (config.norm == kernels::Norm::kLayerNorm) {
    ExpectGradient(client, head, Param::kNormShift, want.norm_shift, max_abs_logit);
  }
}

}  // namespace lossd::app::testing
