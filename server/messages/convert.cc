// SPDX-License-Identifier: Apache-2.0
// Conversions between messages of lossd.v1 and structs of engine and kernels (convert.h). Both directions of
// each message stand side by side, so that a new field is not forgotten in one of them.
#include "server/messages/convert.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"
#include "server/engine/errors.h"

namespace lossd::messages {

// ---- Texts and errors ----

namespace {

struct CodePoints {
  uint32_t first;
  uint32_t last;
};
// Control characters, line and paragraph separators, characters without a width, and characters that change
// the direction of text.
constexpr CodePoints kNotPrintable[] = {
    {0x00, 0x1f},     {0x7f, 0x9f},     {0xad, 0xad},     {0x61c, 0x61c},   {0x200b, 0x200f},
    {0x2028, 0x202e}, {0x2060, 0x206f}, {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0xe0000, 0xe0fff}};

bool IsPrintable(uint32_t code) {
  return std::none_of(std::begin(kNotPrintable), std::end(kNotPrintable),
                      [&](const CodePoints& points) { return points.first <= code && code <= points.last; });
}

// The number of characters of valid UTF-8 text; -1 if one of them is not printable.
int CountPrintable(absl::string_view text) {
  int count = 0;
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const size_t bytes = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    uint32_t code = bytes == 1 ? byte : byte & (0x7fu >> bytes);
    for (size_t k = 1; k < bytes; ++k) code = code << 6 | (static_cast<uint8_t>(text[i + k]) & 0x3fu);
    if (!IsPrintable(code)) return -1;
    i += bytes;
    ++count;
  }
  return count;
}

}  // namespace

absl::Status CheckText(absl::string_view field, absl::string_view text, int least, int most) {
  const int count = errors::ValidUtf8(text) == text ? CountPrintable(text) : -1;
  if (least <= count && count <= most) return absl::OkStatus();
  const std::string range = least == 0 ? absl::StrCat("at most ", most) : absl::StrCat(least, " to ", most);
  const std::string got = count < 0    ? "a character that is not printable"
                          : count == 0 ? "nothing"
                                       : absl::StrCat(count, " characters");
  return errors::FieldError(field, absl::StrCat("be ", range, " printable characters"), got);
}

absl::Status CheckRun(absl::string_view field, absl::string_view run) {
  return CheckText(field, run, 0, 128);
}

absl::Status CheckCallId(absl::string_view field, absl::string_view id) {
  return CheckText(field, id, 1, 64);
}

absl::Status CheckIncarnation(absl::string_view field, uint64_t meant, uint64_t own) {
  if (meant == own) return absl::OkStatus();
  return errors::FieldError(
      field, absl::StrCat("be that of this server process, ", absl::Hex(own, absl::kZeroPad16)),
      absl::Hex(meant, absl::kZeroPad16), absl::StatusCode::kFailedPrecondition);
}

absl::Status WithDetail(absl::Status status, uint64_t incarnation) {
  v1::ErrorDetail detail;
  detail.set_incarnation(incarnation);
  if (std::optional<errors::FieldViolation> violation = errors::GetFieldViolation(status)) {
    detail.set_field(std::move(violation->field));
    detail.set_value(std::move(violation->value));
  }
  if (const std::optional<uint64_t> step = engine::GetCurrentStep(status)) detail.set_current_step(*step);
  for (std::string& line : engine::GetMissing(status)) detail.add_missing(std::move(line));
  wire::SetErrorDetail(detail, &status);
  return status;
}

// ---- Messages ----

namespace {

using errors::FieldError;

absl::StatusOr<int32_t> ToShare(uint32_t share, absl::string_view field) {
  if (share <= std::numeric_limits<int32_t>::max()) return static_cast<int32_t>(share);
  return FieldError(field, "be at most 2^31 - 1", share);
}

absl::StatusOr<int32_t> ToReplicas(uint32_t replicas, absl::string_view field) {
  if (replicas <= kernels::kMostReplicas) return static_cast<int32_t>(replicas);
  return FieldError(field, absl::StrCat("be in [0, ", kernels::kMostReplicas, "]"), replicas);
}

absl::StatusOr<kernels::Residency> ToResidency(v1::Residency residency, absl::string_view field) {
  switch (residency) {
    case v1::RESIDENCY_UNSPECIFIED:
    case v1::RESIDENCY_DEVICE:
      return kernels::Residency::kDevice;
    case v1::RESIDENCY_HOST:
      return kernels::Residency::kHost;
    default:
      return FieldError(field, "be a Residency", static_cast<int>(residency));
  }
}

constexpr int64_t kMaxMicrobatchRows = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxSize = std::numeric_limits<int64_t>::max();

// Converts a size, which is unsigned in messages and signed in the engine.
absl::StatusOr<int64_t> ToSize(uint64_t value, absl::string_view field) {
  if (value > static_cast<uint64_t>(kMaxSize)) return FieldError(field, "be below 2^63", value);
  return static_cast<int64_t>(value);
}

// The enums of kernels and of the protocol have the same values, so they are cast.
static_assert(static_cast<int>(kernels::kLastObjective) == v1::ObjectiveKind_MAX);
static_assert(static_cast<int>(kernels::kLastRest) == v1::Rest_MAX);

absl::StatusOr<kernels::Objective> ToObjective(const v1::Objective& objective) {
  if (!v1::ObjectiveKind_IsValid(objective.kind())) {
    return FieldError("objective.kind", "be an ObjectiveKind that the server knows",
                      static_cast<int>(objective.kind()));
  }
  if (!v1::KlEstimator_IsValid(objective.kl())) {
    return FieldError("objective.kl", "be a KlEstimator that the server knows",
                      static_cast<int>(objective.kl()));
  }
  kernels::Objective result;
  result.kind = static_cast<kernels::ObjectiveKind>(objective.kind());
  const kernels::ClipRange clip = kernels::DefaultClip(result.kind);
  result.clip_low = objective.has_clip_low() ? objective.clip_low() : clip.low;
  result.clip_high = objective.has_clip_high() ? objective.clip_high() : clip.high;
  result.dual_clip = objective.dual_clip();
  if (objective.kl() != v1::KL_UNSPECIFIED)
    result.kl = static_cast<kernels::KlEstimator>(objective.kl() - v1::KL_K1);
  result.kl_coef = objective.kl_coef();
  result.entropy_bonus = objective.entropy_bonus();
  return result;
}

absl::StatusOr<kernels::Distillation> ToDistillation(const v1::Distillation& distillation) {
  constexpr absl::string_view kField = "distillation.";
  LOSSD_RETURN_IF_ERROR(CheckName(absl::StrCat(kField, "teacher"), distillation.teacher()));
  kernels::Distillation result;
  LOSSD_TRY(result.divergence, ToDivergence(distillation.divergence(), absl::StrCat(kField, "divergence")));
  if (distillation.has_beta()) result.beta = distillation.beta();
  if (distillation.has_temperature()) result.temperature = distillation.temperature();
  if (distillation.has_weight()) result.weight = distillation.weight();
  result.target_weight = distillation.target_weight();
  if (distillation.has_teacher_logit_scale()) {
    result.teacher_logit_scale = distillation.teacher_logit_scale();
  }
  result.teacher_softcap = distillation.teacher_softcap();
  return result;
}

// Errors name fields as in the message, without a prefix.
absl::StatusOr<kernels::LossOptions> ToLossOptions(const v1::LossOptions& options) {
  const auto gradients = ToGradients(options.gradients(), "gradients");
  if (!gradients.ok()) return gradients.status();
  kernels::LossOptions result;
  result.gradients = *gradients;
  if (options.has_filter_epsilon()) result.filter_epsilon = options.filter_epsilon();
  if (options.has_sample_threshold()) result.sample_threshold = options.sample_threshold();
  if (options.has_max_gradient_error()) result.max_gradient_error = options.max_gradient_error();
  if (options.has_logit_scale()) result.logit_scale = options.logit_scale();
  result.softcap = options.softcap();
  result.label_smoothing = options.label_smoothing();
  result.z_loss = options.z_loss();
  result.use_class_weights = options.use_class_weights();
  if (!v1::Rest_IsValid(options.rest())) {
    return FieldError("rest", "be a Rest that the server knows", static_cast<int>(options.rest()));
  }
  result.rest = static_cast<kernels::Rest>(options.rest());
  LOSSD_TRY(result.objective, ToObjective(options.objective()));
  if (options.has_distillation()) {
    LOSSD_TRY(result.distillation, ToDistillation(options.distillation()));
  }
  LOSSD_RETURN_IF_ERROR(kernels::Validate(result));
  return result;
}

// Converts the classes of a draft vocabulary. kernels::Validate checks their order.
absl::StatusOr<kernels::ClassList> ToClassList(const v1::HeadSpec& spec, absl::string_view field_prefix) {
  const std::string full = absl::StrCat(field_prefix, "full_vocab_size");
  LOSSD_TRY(const int64_t full_size, ToSize(spec.full_vocab_size(), full));
  if (spec.class_list().empty()) {
    if (full_size > 0) return FieldError(full, "be 0 without class_list", full_size);
    return kernels::ClassList();
  }
  std::vector<int32_t> classes;
  classes.reserve(static_cast<size_t>(spec.class_list_size()));
  for (const uint32_t number : spec.class_list()) {
    if (number > static_cast<uint32_t>(std::numeric_limits<int32_t>::max())) {
      return FieldError(absl::StrCat(field_prefix, "class_list[", classes.size(), "]"), "be below 2^31",
                        number);
    }
    classes.push_back(static_cast<int32_t>(number));
  }
  return kernels::ClassList(std::move(classes), full_size);
}

// Checks that a field has one entry for each row, or none if `optional`.
absl::Status CheckCount(absl::string_view field, int64_t count, int64_t rows, bool optional) {
  if (count == rows || (optional && count == 0)) return absl::OkStatus();
  return FieldError(absl::StrCat(field, ".size"),
                    absl::StrCat(optional ? "be 0 or " : "be ", rows, ", the size of open.rows"), count);
}

// Converts a count to int32; the engine checks smaller bounds.
absl::StatusOr<int32_t> ToCount(absl::string_view field, uint32_t count) {
  if (count <= uint32_t{std::numeric_limits<int32_t>::max()}) return static_cast<int32_t>(count);
  return FieldError(field, "be below 2^31", count);
}

// Checks only the number of depths, so that no large vector is made; the engine checks their values.
absl::StatusOr<std::vector<engine::Depth>> ToDepths(
    const google::protobuf::RepeatedPtrField<v1::Depth>& messages) {
  if (messages.size() > engine::kMostDepths) {
    return FieldError("open.depths.size", absl::StrCat("be at most ", engine::kMostDepths), messages.size());
  }
  std::vector<engine::Depth> depths;
  for (const v1::Depth& message : messages) {
    engine::Depth& depth = depths.emplace_back();
    LOSSD_TRY(depth.rows, ToSize(message.rows(), absl::StrCat("open.depths[", depths.size() - 1, "].rows")));
    if (message.has_weight()) depth.weight = message.weight();
    if (message.has_normalizer()) depth.normalizer = message.normalizer();
  }
  return depths;
}

// Takes the generation that an opening message or a step names. It is required to come with the incarnation,
// because each process has its own numbers.
template <typename Message>
absl::Status TakeGeneration(const Message& message, absl::string_view prefix,
                            std::optional<uint64_t>* generation) {
  if (message.has_generation() && !message.has_incarnation()) {
    return FieldError(absl::StrCat(prefix, "generation"), absl::StrCat("come with ", prefix, "incarnation"),
                      message.generation());
  }
  if (message.has_generation()) *generation = message.generation();
  return absl::OkStatus();
}

// Takes the name of the training program's run.
template <typename Message>
absl::Status TakeRun(const Message& message, absl::string_view prefix, std::string* run) {
  *run = message.run();
  return CheckRun(absl::StrCat(prefix, "run"), *run);
}

kernels::OptimizerOptions FromAdamW(const v1::AdamW& adamw) {
  kernels::OptimizerOptions options;
  options.kind = kernels::OptimizerOptions::Kind::kAdamW;
  options.learning_rate = adamw.learning_rate();
  options.weight_decay = adamw.weight_decay();
  if (adamw.has_beta1()) options.beta1 = adamw.beta1();
  if (adamw.has_beta2()) options.beta2 = adamw.beta2();
  if (adamw.has_epsilon()) options.epsilon = adamw.epsilon();
  return options;
}

kernels::OptimizerOptions FromSgd(const v1::Sgd& sgd) {
  kernels::OptimizerOptions options;
  options.kind = kernels::OptimizerOptions::Kind::kSgd;
  options.learning_rate = sgd.learning_rate();
  options.weight_decay = sgd.weight_decay();
  options.momentum = sgd.momentum();
  options.dampening = sgd.dampening();
  options.nesterov = sgd.nesterov();
  return options;
}

v1::HeadHistory HistoryOf(const engine::HeadSnapshot& head) {
  v1::HeadHistory message;
  message.set_run(head.history.run);
  message.set_applied_unix_seconds(head.history.applied_unix_seconds);
  message.set_checkpoint(head.history.checkpoint);
  message.set_checkpoint_step(head.history.checkpoint_step);
  message.set_checkpoint_unix_seconds(head.history.checkpoint_unix_seconds);
  message.set_loaded(head.history.loaded);
  message.set_open_run(head.open_run);
  return message;
}

bool IsNameCharacter(char c) { return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-'; }

}  // namespace

absl::Status CheckName(absl::string_view field, absl::string_view name) {
  bool valid = !name.empty() && name.size() <= 64 && name.front() != '.';
  for (const char c : name) valid = valid && IsNameCharacter(c);
  if (valid) return absl::OkStatus();
  return FieldError(field, "be 1 to 64 characters out of A-Z a-z 0-9 . _ -, not starting with a dot", name);
}

absl::StatusOr<engine::RowRange> ToRowRange(const v1::RowRange& range, absl::string_view field,
                                            int64_t limit) {
  if (range.end() < range.begin()) {
    return FieldError(absl::StrCat(field, ".end"),
                      absl::StrCat("be at least ", field, ".begin, ", range.begin()), range.end());
  }
  if (range.end() > static_cast<uint64_t>(limit)) {
    return FieldError(absl::StrCat(field, ".end"), absl::StrCat("be at most ", limit), range.end());
  }
  return engine::RowRange{static_cast<int64_t>(range.begin()), static_cast<int64_t>(range.end())};
}

absl::StatusOr<kernels::TensorId> ToTensorId(v1::Param param, v1::Role role, absl::string_view field_prefix) {
  absl::StatusOr<kernels::Param> which = ToParam(param, absl::StrCat(field_prefix, "param"));
  if (!which.ok()) return which.status();
  absl::StatusOr<kernels::Role> what = ToRole(role, absl::StrCat(field_prefix, "role"));
  if (!what.ok()) return what.status();
  return kernels::TensorId{*which, *what};
}

absl::StatusOr<std::vector<int32_t>> ToShares(const google::protobuf::RepeatedField<uint32_t>& shares,
                                              absl::string_view field) {
  std::vector<int32_t> checked;
  for (int i = 0; i < shares.size(); ++i) {
    const auto share = ToShare(shares.Get(i), absl::StrCat(field, "[", i, "]"));
    if (!share.ok()) return share.status();
    checked.push_back(*share);
  }
  return checked;
}

absl::StatusOr<kernels::HeadConfig> ToHeadConfig(const v1::HeadSpec& spec, absl::string_view field_prefix,
                                                 kernels::DType default_compute_dtype) {
  const auto field = [&](absl::string_view name) { return absl::StrCat(field_prefix, name); };
  LOSSD_RETURN_IF_ERROR(CheckName(field("name"), spec.name()));
  const auto hidden_size = ToSize(spec.hidden_size(), field("hidden_size"));
  if (!hidden_size.ok()) return hidden_size.status();
  const auto vocab_size = ToSize(spec.vocab_size(), field("vocab_size"));
  if (!vocab_size.ok()) return vocab_size.status();
  const auto norm = ToNorm(spec.norm(), field("norm"));
  if (!norm.ok()) return norm.status();
  const auto dtype = ToDType(spec.compute_dtype(), field("compute_dtype"), default_compute_dtype);
  if (!dtype.ok()) return dtype.status();
  const auto state = ToOptimizerState(spec.optimizer_state(), field("optimizer_state"));
  if (!state.ok()) return state.status();
  const auto logits = ToLogits(spec.logits(), field("logits"));
  if (!logits.ok()) return logits.status();
  const auto split = ToSplit(spec.split(), field("split"));
  if (!split.ok()) return split.status();
  const auto gradients = ToGradients(spec.gradients(), field("gradients"));
  if (!gradients.ok()) return gradients.status();
  const auto workspace_bytes = ToSize(spec.workspace_bytes(), field("workspace_bytes"));
  if (!workspace_bytes.ok()) return workspace_bytes.status();

  kernels::HeadConfig config;
  config.hidden_size = *hidden_size;
  config.vocab_size = *vocab_size;
  config.has_bias = spec.bias();
  config.has_class_weights = spec.class_weights();
  config.norm = *norm;
  if (spec.has_norm_epsilon()) config.norm_epsilon = spec.norm_epsilon();
  config.compute_dtype = *dtype;
  config.optimizer_state = *state;
  config.trainable = !spec.frozen();
  config.logits = *logits;
  config.split = *split;
  auto shares = ToShares(spec.shares(), field("shares"));
  if (!shares.ok()) return shares.status();
  config.shares = *std::move(shares);
  const auto replicas = ToReplicas(spec.replicas(), field("replicas"));
  if (!replicas.ok()) return replicas.status();
  config.replicas = *replicas;
  const auto residency = ToResidency(spec.residency(), field("residency"));
  if (!residency.ok()) return residency.status();
  config.residency = *residency;
  LOSSD_TRY(config.class_list, ToClassList(spec, field_prefix));
  config.gradients = *gradients;
  config.workspace_bytes = *workspace_bytes;
  if (absl::Status status = kernels::Validate(config); !status.ok()) {
    return errors::Within(field_prefix, std::move(status));
  }
  return config;
}

absl::StatusOr<kernels::OptimizerOptions> ToOptimizerOptions(const v1::Optimizer& optimizer,
                                                             absl::string_view field_prefix) {
  kernels::OptimizerOptions options;
  absl::string_view kind;
  switch (optimizer.kind_case()) {
    case v1::Optimizer::kAdamw:
      options = FromAdamW(optimizer.adamw());
      kind = "adamw.";
      break;
    case v1::Optimizer::kSgd:
      options = FromSgd(optimizer.sgd());
      kind = "sgd.";
      break;
    case v1::Optimizer::KIND_NOT_SET:
      return FieldError(absl::StrCat(field_prefix, "kind"), "be adamw or sgd", "nothing");
  }
  if (optimizer.has_grad_multiplier()) options.grad_multiplier = optimizer.grad_multiplier();
  options.decay_vectors = optimizer.decay_vectors();
  options.lazy_rows = optimizer.lazy_rows();
  absl::Status status = kernels::Validate(options);
  if (status.ok()) return options;
  const std::optional<errors::FieldViolation> violation = errors::GetFieldViolation(status);
  const bool common = violation.has_value() && violation->field == "grad_multiplier";
  return errors::Within(absl::StrCat(field_prefix, common ? "" : kind), std::move(status));
}

absl::StatusOr<engine::StepRequest> ToStepRequest(const v1::ApplyStepRequest& request) {
  engine::StepRequest step;
  const auto optimizer = ToOptimizerOptions(request.optimizer(), "optimizer.");
  if (!optimizer.ok()) return optimizer.status();
  LOSSD_RETURN_IF_ERROR(TakeGeneration(request, "", &step.generation));
  LOSSD_RETURN_IF_ERROR(TakeRun(request, "", &step.run));
  step.step = request.step();
  step.optimizer = *optimizer;
  step.expected_microbatches.assign(request.expected_microbatches().begin(),
                                    request.expected_microbatches().end());
  if (request.expected_rows() > uint64_t{std::numeric_limits<int64_t>::max()}) {
    return FieldError("expected_rows", "be below 2^63", request.expected_rows());
  }
  if (request.has_expected_rows()) step.expected_rows = static_cast<int64_t>(request.expected_rows());
  step.skip_non_finite = request.skip_non_finite();
  if (request.has_incarnation()) step.incarnation = request.incarnation();
  step.begin_optimizer = request.begin_optimizer();
  return step;
}

absl::Status CheckLossOptions(const v1::LossOptions& options) { return ToLossOptions(options).status(); }

absl::StatusOr<engine::StreamSpec> ToStreamSpec(const v1::OpenMicrobatch& open) {
  engine::StreamSpec spec;
  spec.head = open.head();
  if (open.has_step()) spec.step = open.step();
  LOSSD_RETURN_IF_ERROR(TakeGeneration(open, "open.", &spec.generation));
  LOSSD_RETURN_IF_ERROR(TakeRun(open, "open.", &spec.run));
  spec.microbatch_id = open.microbatch_id();
  if (open.microbatch_rows() > static_cast<uint64_t>(kMaxMicrobatchRows)) {
    return FieldError("open.microbatch_rows", "be below 2^31", open.microbatch_rows());
  }
  spec.microbatch_rows = static_cast<int64_t>(open.microbatch_rows());
  const auto rows = ToRowRange(open.rows(), "open.rows", spec.microbatch_rows);
  if (!rows.ok()) return rows.status();
  spec.rows = *rows;
  spec.hidden_size = open.hidden_size();
  const auto dtype = ToDType(open.hidden_dtype(), "open.hidden_dtype");
  if (!dtype.ok()) return dtype.status();
  spec.hidden_dtype = *dtype;
  const auto options = ToLossOptions(open.options());
  if (!options.ok()) return errors::Within("open.options.", options.status());
  spec.options = *options;
  LOSSD_TRY(spec.options.embedding, ToEmbedding(open.embedding()));
  if (spec.options.is_embedding()) {
    if (absl::Status status = kernels::Validate(spec.options); !status.ok())
      return errors::Within("open.options.", std::move(status));
  }
  spec.teacher = open.options().distillation().teacher();
  spec.gradients_of_head = open.options().gradients() == v1::GRADIENTS_UNSPECIFIED;
  if (open.options().has_ignore_index()) spec.ignore_index = open.options().ignore_index();
  spec.refuse_unlisted = open.options().refuse_unlisted();
  const auto reduction = ToReduction(open.reduction(), "open.reduction");
  if (!reduction.ok()) return reduction.status();
  spec.reduction = *reduction;
  if (open.has_normalizer()) spec.normalizer = open.normalizer();
  if (open.has_grad_output()) spec.grad_output = open.grad_output();
  spec.want_grad_hidden = open.want_grad_hidden();
  spec.accumulate_gradients = open.accumulate_gradients();
  spec.retain = open.retain();
  spec.want_rows = {open.want_row_loss(), open.want_row_lse(), open.want_row_entropy(),
                    open.want_row_logprob(), open.want_row_argmax()};
  LOSSD_TRY(const int32_t class_count, ToCount("open.class_count", open.class_count()));
  LOSSD_TRY(const int32_t top_k, ToCount("open.top_k", open.top_k()));
  spec.want_rows.class_count = class_count;
  spec.want_rows.top_k = top_k;
  spec.classes.assign(open.classes().begin(), open.classes().end());
  LOSSD_TRY(spec.soft.count, ToCount("open.target_count", open.target_count()));
  spec.soft.classes.assign(open.target_classes().begin(), open.target_classes().end());
  spec.soft.weights.assign(open.target_weights().begin(), open.target_weights().end());
  LOSSD_TRY(spec.depths, ToDepths(open.depths()));
  absl::Status counts = CheckCount("open.targets", open.targets_size(), spec.rows.size(), /*optional=*/false);
  counts.Update(CheckCount("open.row_weights", open.row_weights_size(), spec.rows.size(), /*optional=*/true));
  counts.Update(CheckCount("open.advantages", open.advantages_size(), spec.rows.size(), /*optional=*/true));
  counts.Update(
      CheckCount("open.old_logprobs", open.old_logprobs_size(), spec.rows.size(), /*optional=*/true));
  counts.Update(
      CheckCount("open.ref_logprobs", open.ref_logprobs_size(), spec.rows.size(), /*optional=*/true));
  if (!counts.ok()) return counts;
  spec.targets.assign(open.targets().begin(), open.targets().end());
  spec.row_weights.assign(open.row_weights().begin(), open.row_weights().end());
  spec.numbers.advantages.assign(open.advantages().begin(), open.advantages().end());
  spec.numbers.old_logprobs.assign(open.old_logprobs().begin(), open.old_logprobs().end());
  spec.numbers.ref_logprobs.assign(open.ref_logprobs().begin(), open.ref_logprobs().end());
  return spec;
}

absl::StatusOr<engine::BackwardSpec> ToBackwardSpec(const v1::OpenBackward& backward) {
  engine::BackwardSpec spec;
  spec.head = backward.head();
  if (backward.has_step()) spec.step = backward.step();
  LOSSD_RETURN_IF_ERROR(TakeGeneration(backward, "backward.", &spec.generation));
  LOSSD_RETURN_IF_ERROR(TakeRun(backward, "backward.", &spec.run));
  spec.microbatch_id = backward.microbatch_id();
  const auto rows = ToRowRange(backward.rows(), "backward.rows", kMaxMicrobatchRows);
  if (!rows.ok()) return rows.status();
  spec.rows = *rows;
  spec.hidden_size = backward.hidden_size();
  if (backward.hidden_dtype() != v1::DTYPE_UNSPECIFIED) {
    const auto dtype = ToDType(backward.hidden_dtype(), "backward.hidden_dtype");
    if (!dtype.ok()) return dtype.status();
    spec.hidden_dtype = *dtype;
  }
  spec.want_grad_hidden = backward.want_grad_hidden();
  spec.accumulate_gradients = backward.accumulate_gradients();
  spec.grad_loss.assign(backward.grad_loss().begin(), backward.grad_loss().end());
  spec.grad_lse.assign(backward.grad_lse().begin(), backward.grad_lse().end());
  spec.grad_entropy.assign(backward.grad_entropy().begin(), backward.grad_entropy().end());
  return spec;
}

absl::StatusOr<engine::ContributionSpec> ToContributionSpec(const v1::OpenGradient& open) {
  constexpr int64_t kAnyRow = std::numeric_limits<int64_t>::max();  // the engine knows the parameter's rows
  engine::ContributionSpec spec;
  spec.head = open.head();
  spec.step = open.step();
  LOSSD_RETURN_IF_ERROR(TakeGeneration(open, "open.", &spec.generation));
  LOSSD_RETURN_IF_ERROR(TakeRun(open, "open.", &spec.run));
  spec.contribution_id = open.contribution_id();
  const auto param = ToParam(open.param(), "open.param");
  if (!param.ok()) return param.status();
  spec.param = *param;
  if (open.has_contribution_rows()) {
    const auto rows = ToRowRange(open.contribution_rows(), "open.contribution_rows", kAnyRow);
    if (!rows.ok()) return rows.status();
    spec.contribution_rows = *rows;
  }
  if (open.has_rows()) {
    const auto rows = ToRowRange(open.rows(), "open.rows", kAnyRow);
    if (!rows.ok()) return rows.status();
    spec.rows = *rows;
  }
  const auto dtype = ToDType(open.dtype(), "open.dtype", kernels::DType::kFloat32);
  if (!dtype.ok()) return dtype.status();
  spec.dtype = *dtype;
  if (open.has_scale()) spec.scale = open.scale();
  return spec;
}

v1::HeadState ToProto(const engine::HeadState& state) {
  v1::HeadState message;
  message.set_incarnation(state.incarnation);
  message.set_step(state.step);
  message.set_generation(state.generation);
  message.set_weights_version(state.weights_version);
  message.set_creation(state.creation);
  return message;
}

v1::RowRange ToProto(const engine::RowRange& rows) {
  v1::RowRange message;
  message.set_begin(static_cast<uint64_t>(rows.begin));
  message.set_end(static_cast<uint64_t>(rows.end));
  return message;
}

v1::SliceLimits ToProto(const engine::SliceLimits& limits) {
  v1::SliceLimits message;
  message.set_max_rows(static_cast<uint64_t>(limits.max_rows));
  message.set_max_bytes(static_cast<uint64_t>(limits.max_bytes));
  message.set_max_bytes_in_region(static_cast<uint64_t>(limits.max_bytes_in_place));
  message.set_row_grid(static_cast<uint64_t>(limits.row_grid));
  return message;
}

v1::MemoryUsage ToProto(const kernels::MemoryBytes& memory) {
  const auto bytes = [&](kernels::MemoryKind kind) { return static_cast<uint64_t>(memory[kind]); };
  v1::MemoryUsage message;
  message.set_weights(bytes(kernels::MemoryKind::kWeights));
  message.set_gradients(bytes(kernels::MemoryKind::kGradients));
  message.set_optimizer(bytes(kernels::MemoryKind::kOptimizer));
  message.set_workspace(bytes(kernels::MemoryKind::kWorkspace));
  message.set_slots(bytes(kernels::MemoryKind::kSlots));
  message.set_staging(bytes(kernels::MemoryKind::kStaging));
  message.set_retained(bytes(kernels::MemoryKind::kRetained));
  message.set_ledger(bytes(kernels::MemoryKind::kLedger));
  message.set_host_values(bytes(kernels::MemoryKind::kHostValues));
  message.set_teacher_pool(bytes(kernels::MemoryKind::kTeacherPool));
  return message;
}

v1::HeadSpec ToProto(const std::string& head, const kernels::HeadConfig& config) {
  v1::HeadSpec spec;
  spec.set_name(head);
  spec.set_hidden_size(static_cast<uint64_t>(config.hidden_size));
  spec.set_vocab_size(static_cast<uint64_t>(config.vocab_size));
  spec.set_bias(config.has_bias);
  spec.set_class_weights(config.has_class_weights);
  spec.set_norm(ToProto(config.norm));
  spec.set_norm_epsilon(config.norm_epsilon);
  spec.set_compute_dtype(ToProto(config.compute_dtype));
  spec.set_optimizer_state(ToProto(config.optimizer_state));
  spec.set_frozen(!config.trainable);
  spec.set_logits(ToProto(config.logits));
  spec.set_split(ToProto(config.split));
  spec.mutable_shares()->Add(config.shares.begin(), config.shares.end());
  spec.set_replicas(static_cast<uint32_t>(config.replicas));
  spec.set_residency(config.residency == kernels::Residency::kHost ? v1::RESIDENCY_HOST
                                                                   : v1::RESIDENCY_DEVICE);
  if (!config.class_list.empty()) {
    const std::vector<int32_t>& classes = config.class_list.classes();
    spec.mutable_class_list()->Add(classes.begin(), classes.end());
    spec.set_full_vocab_size(static_cast<uint64_t>(config.class_list.full_size()));
  }
  spec.set_gradients(ToProto(config.gradients));
  spec.set_workspace_bytes(static_cast<uint64_t>(config.workspace_bytes));
  return spec;
}

v1::Choice ToProto(const kernels::Choice& choice) {
  v1::Choice message;
  message.set_what(choice.what);
  message.set_choice(choice.choice);
  message.set_reason(choice.reason);
  message.set_workspace_bytes(static_cast<uint64_t>(choice.workspace_bytes));
  return message;
}

namespace {

v1::HeadDevice ToProto(const engine::HeadDevice& device) {
  v1::HeadDevice message;
  message.set_device(device.device);
  message.set_share(static_cast<uint32_t>(device.share));
  message.set_classes(static_cast<uint64_t>(device.classes));
  message.set_rows(static_cast<uint64_t>(device.rows));
  message.set_busy_seconds(absl::ToDoubleSeconds(device.busy));
  message.set_exchange_seconds(absl::ToDoubleSeconds(device.exchanging));
  return message;
}

v1::Paging ToProto(const kernels::PagingStats& paging) {
  v1::Paging message;
  message.set_on_device(paging.on_device);
  message.set_value_bytes(static_cast<uint64_t>(paging.value_bytes));
  message.set_hits(static_cast<uint64_t>(paging.hits));
  message.set_copies(static_cast<uint64_t>(paging.copies));
  message.set_evictions(static_cast<uint64_t>(paging.evictions));
  message.set_copied_bytes(static_cast<uint64_t>(paging.copied_bytes));
  message.set_copy_seconds(absl::ToDoubleSeconds(paging.copying));
  return message;
}

}  // namespace

v1::HeadDescription ToProto(const engine::HeadSnapshot& head) {
  v1::HeadDescription message;
  *message.mutable_spec() = ToProto(head.name, head.config);
  *message.mutable_state() = ToProto(head.state);
  message.set_compute_dtype(ToProto(head.compute_dtype));
  *message.mutable_slice_limits() = ToProto(head.limits);
  message.set_chunk_rows(static_cast<uint64_t>(head.chunk_rows));
  *message.mutable_memory() = ToProto(head.memory);
  message.set_open_streams(static_cast<uint64_t>(head.open_streams));
  message.set_queued_slices(static_cast<uint64_t>(head.queued_slices));
  message.set_step_microbatches(static_cast<uint64_t>(head.step_microbatches));
  message.set_step_rows(static_cast<uint64_t>(head.step_rows));
  message.set_retained_microbatches(static_cast<uint64_t>(head.retained_microbatches));
  message.set_total_rows(static_cast<uint64_t>(head.total_rows));
  message.set_updates(head.updates);
  message.set_step_contributions(static_cast<uint64_t>(head.step_contributions));
  message.set_waiting_slices(static_cast<uint64_t>(head.waiting_slices));
  message.set_waits_for(head.waits_for);
  if (head.paging.has_value()) *message.mutable_paging() = ToProto(*head.paging);
  for (const engine::HeadDevice& device : head.devices) *message.add_devices() = ToProto(device);
  for (const kernels::Choice& choice : head.choices) *message.add_choices() = ToProto(choice);
  for (const kernels::Choice& choice : head.last_chunk_choices) {
    *message.add_last_chunk_choices() = ToProto(choice);
  }
  message.set_gradient_error(head.gradient_error);
  *message.mutable_history() = HistoryOf(head);
  return message;
}

v1::DepthSummary ToProto(const engine::DepthSummary& depth) {
  v1::DepthSummary message;
  message.set_loss_sum(depth.sums.loss);
  message.set_z_loss_sum(depth.sums.z_loss);
  message.set_entropy_sum(depth.sums.entropy);
  message.set_valid_rows(static_cast<uint64_t>(depth.sums.valid_rows));
  message.set_correct_rows(static_cast<uint64_t>(depth.sums.correct_rows));
  message.set_accumulated_rows(static_cast<uint64_t>(depth.accumulated_rows));
  message.set_repeated_rows(static_cast<uint64_t>(depth.repeated_rows));
  message.set_normalizer(depth.normalizer);
  return message;
}

v1::MicrobatchSummary ToProto(const engine::StreamSummary& summary) {
  v1::MicrobatchSummary message;
  *message.mutable_state() = ToProto(summary.state);
  message.set_loss_sum(summary.sums.loss);
  message.set_z_loss_sum(summary.sums.z_loss);
  message.set_entropy_sum(summary.sums.entropy);
  message.set_valid_rows(static_cast<uint64_t>(summary.sums.valid_rows));
  message.set_correct_rows(static_cast<uint64_t>(summary.sums.correct_rows));
  message.set_accumulated_rows(static_cast<uint64_t>(summary.accumulated_rows));
  message.set_repeated_rows(static_cast<uint64_t>(summary.repeated_rows));
  message.set_normalizer(summary.normalizer);
  message.set_queue_seconds(summary.queue_seconds);
  message.set_compute_seconds(summary.compute_seconds);
  message.set_dropped_mass(summary.sums.dropped_mass);
  message.set_sampling_variance(summary.sums.sampling_variance);
  message.set_squared_gradient(summary.sums.squared_gradient);
  message.set_divergence_sum(summary.sums.divergence);
  message.set_target_loss_sum(summary.sums.target_loss);
  if (summary.sums.objective.rows > 0) {
    const kernels::ObjectiveSums& sums = summary.sums.objective;
    v1::ObjectiveSums& objective = *message.mutable_objective();
    objective.set_rows(static_cast<uint64_t>(sums.rows));
    objective.set_clipped_rows(static_cast<uint64_t>(sums.clipped_rows));
    objective.set_ratio(sums.ratio);
    objective.set_old_kl(sums.old_kl);
    objective.set_ref_kl(sums.ref_kl);
  }
  message.set_unlisted_rows(static_cast<uint64_t>(summary.unlisted_rows));
  for (const engine::DepthSummary& depth : summary.depths) *message.add_depths() = ToProto(depth);
  return message;
}

v1::SliceResult ToProto(const engine::SliceOutput& output) {
  v1::SliceResult message;
  *message.mutable_rows() = ToProto(output.rows);
  message.mutable_row_loss()->Add(output.loss.begin(), output.loss.end());
  message.mutable_row_lse()->Add(output.lse.begin(), output.lse.end());
  message.mutable_row_entropy()->Add(output.entropy.begin(), output.entropy.end());
  message.mutable_row_logprob()->Add(output.logprob.begin(), output.logprob.end());
  message.mutable_row_argmax()->Add(output.argmax.begin(), output.argmax.end());
  message.mutable_class_logprobs()->Add(output.class_logprobs.begin(), output.class_logprobs.end());
  message.mutable_top_logprobs()->Add(output.top_logprobs.begin(), output.top_logprobs.end());
  message.mutable_top_classes()->Add(output.top_classes.begin(), output.top_classes.end());
  return message;
}

using errors::FieldError;

// ---- Enums ----

absl::StatusOr<kernels::DType> ToDType(v1::DType dtype, absl::string_view field) {
  switch (dtype) {
    case v1::DTYPE_FP32:
      return kernels::DType::kFloat32;
    case v1::DTYPE_FP16:
      return kernels::DType::kFloat16;
    case v1::DTYPE_BF16:
      return kernels::DType::kBFloat16;
    default:
      return FieldError(field, "be DTYPE_FP32, DTYPE_FP16 or DTYPE_BF16", static_cast<int>(dtype));
  }
}

absl::StatusOr<kernels::DType> ToDType(v1::DType dtype, absl::string_view field, kernels::DType fallback) {
  if (dtype == v1::DTYPE_UNSPECIFIED) return fallback;
  return ToDType(dtype, field);
}

v1::DType ToProto(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kFloat32:
      return v1::DTYPE_FP32;
    case kernels::DType::kFloat16:
      return v1::DTYPE_FP16;
    case kernels::DType::kBFloat16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::StatusOr<kernels::Norm> ToNorm(v1::Norm norm, absl::string_view field) {
  switch (norm) {
    case v1::NORM_UNSPECIFIED:
    case v1::NORM_NONE:
      return kernels::Norm::kNone;
    case v1::NORM_LAYERNORM:
      return kernels::Norm::kLayerNorm;
    case v1::NORM_RMSNORM:
      return kernels::Norm::kRmsNorm;
    default:
      return FieldError(field, "be a known Norm", static_cast<int>(norm));
  }
}

v1::Norm ToProto(kernels::Norm norm) {
  switch (norm) {
    case kernels::Norm::kNone:
      return v1::NORM_NONE;
    case kernels::Norm::kLayerNorm:
      return v1::NORM_LAYERNORM;
    case kernels::Norm::kRmsNorm:
      return v1::NORM_RMSNORM;
  }
  return v1::NORM_UNSPECIFIED;
}

absl::StatusOr<kernels::OptimizerState> ToOptimizerState(v1::OptimizerState state, absl::string_view field) {
  switch (state) {
    case v1::OPTIMIZER_STATE_UNSPECIFIED:
    case v1::OPTIMIZER_STATE_ADAM:
      return kernels::OptimizerState::kAdam;
    case v1::OPTIMIZER_STATE_MOMENTUM:
      return kernels::OptimizerState::kMomentum;
    case v1::OPTIMIZER_STATE_NONE:
      return kernels::OptimizerState::kNone;
    default:
      return FieldError(field, "be a known OptimizerState", static_cast<int>(state));
  }
}

v1::OptimizerState ToProto(kernels::OptimizerState state) {
  switch (state) {
    case kernels::OptimizerState::kNone:
      return v1::OPTIMIZER_STATE_NONE;
    case kernels::OptimizerState::kMomentum:
      return v1::OPTIMIZER_STATE_MOMENTUM;
    case kernels::OptimizerState::kAdam:
      return v1::OPTIMIZER_STATE_ADAM;
  }
  return v1::OPTIMIZER_STATE_UNSPECIFIED;
}

absl::StatusOr<kernels::Logits> ToLogits(v1::Logits logits, absl::string_view field) {
  switch (logits) {
    case v1::LOGITS_UNSPECIFIED:
    case v1::LOGITS_STORED:
      return kernels::Logits::kStored;
    case v1::LOGITS_RECOMPUTED:
      return kernels::Logits::kRecomputed;
    case v1::LOGITS_NONE:
      return kernels::Logits::kNone;
    default:
      return FieldError(field, "be LOGITS_STORED, LOGITS_RECOMPUTED, LOGITS_NONE or unspecified",
                        static_cast<int>(logits));
  }
}

v1::Logits ToProto(kernels::Logits logits) {
  switch (logits) {
    case kernels::Logits::kStored:
      return v1::LOGITS_STORED;
    case kernels::Logits::kRecomputed:
      return v1::LOGITS_RECOMPUTED;
    case kernels::Logits::kNone:
      return v1::LOGITS_NONE;
  }
  return v1::LOGITS_UNSPECIFIED;
}

absl::StatusOr<kernels::Split> ToSplit(v1::Split split, absl::string_view field) {
  switch (split) {
    case v1::SPLIT_UNSPECIFIED:
      return kernels::Split::kAny;
    case v1::SPLIT_ROWS:
      return kernels::Split::kRows;
    case v1::SPLIT_VOCABULARY:
      return kernels::Split::kVocabulary;
    default:
      return FieldError(field, "be SPLIT_ROWS, SPLIT_VOCABULARY or unspecified", static_cast<int>(split));
  }
}

v1::Split ToProto(kernels::Split split) {
  switch (split) {
    case kernels::Split::kAny:
      return v1::SPLIT_UNSPECIFIED;
    case kernels::Split::kRows:
      return v1::SPLIT_ROWS;
    case kernels::Split::kVocabulary:
      return v1::SPLIT_VOCABULARY;
  }
  return v1::SPLIT_UNSPECIFIED;
}

absl::StatusOr<kernels::Gradients> ToGradients(v1::Gradients gradients, absl::string_view field) {
  switch (gradients) {
    case v1::GRADIENTS_UNSPECIFIED:
    case v1::GRADIENTS_EXACT:
      return kernels::Gradients::kExact;
    case v1::GRADIENTS_FILTERED:
      return kernels::Gradients::kFiltered;
    case v1::GRADIENTS_SAMPLED:
      return kernels::Gradients::kSampled;
    case v1::GRADIENTS_AUTO:
      return kernels::Gradients::kAuto;
    default:
      return FieldError(
          field, "be GRADIENTS_EXACT, GRADIENTS_FILTERED, GRADIENTS_SAMPLED, GRADIENTS_AUTO or unspecified",
          static_cast<int>(gradients));
  }
}

v1::Gradients ToProto(kernels::Gradients gradients) {
  switch (gradients) {
    case kernels::Gradients::kExact:
      return v1::GRADIENTS_EXACT;
    case kernels::Gradients::kFiltered:
      return v1::GRADIENTS_FILTERED;
    case kernels::Gradients::kSampled:
      return v1::GRADIENTS_SAMPLED;
    case kernels::Gradients::kAuto:
      return v1::GRADIENTS_AUTO;
  }
  return v1::GRADIENTS_UNSPECIFIED;
}

absl::StatusOr<kernels::Divergence> ToDivergence(v1::Divergence divergence, absl::string_view field) {
  switch (divergence) {
    case v1::DIVERGENCE_FORWARD_KL:
      return kernels::Divergence::kForwardKl;
    case v1::DIVERGENCE_REVERSE_KL:
      return kernels::Divergence::kReverseKl;
    case v1::DIVERGENCE_JENSEN_SHANNON:
      return kernels::Divergence::kJensenShannon;
    case v1::DIVERGENCE_TOTAL_VARIATION:
      return kernels::Divergence::kTotalVariation;
    default:
      return FieldError(field,
                        "be DIVERGENCE_FORWARD_KL, DIVERGENCE_REVERSE_KL, DIVERGENCE_JENSEN_SHANNON or "
                        "DIVERGENCE_TOTAL_VARIATION",
                        static_cast<int>(divergence));
  }
}

absl::StatusOr<kernels::Param> ToParam(v1::Param param, absl::string_view field) {
  switch (param) {
    case v1::PARAM_WEIGHT:
      return kernels::Param::kWeight;
    case v1::PARAM_BIAS:
      return kernels::Param::kBias;
    case v1::PARAM_NORM_GAIN:
      return kernels::Param::kNormGain;
    case v1::PARAM_NORM_SHIFT:
      return kernels::Param::kNormShift;
    case v1::PARAM_CLASS_WEIGHTS:
      return kernels::Param::kClassWeights;
    default:
      return FieldError(field, "be a known Param", static_cast<int>(param));
  }
}

absl::StatusOr<kernels::Role> ToRole(v1::Role role, absl::string_view field) {
  switch (role) {
    case v1::ROLE_UNSPECIFIED:
    case v1::ROLE_VALUE:
      return kernels::Role::kValue;
    case v1::ROLE_GRADIENT:
      return kernels::Role::kGradient;
    case v1::ROLE_MOMENT1:
      return kernels::Role::kMoment1;
    case v1::ROLE_MOMENT2:
      return kernels::Role::kMoment2;
    default:
      return FieldError(field, "be a known Role", static_cast<int>(role));
  }
}

absl::StatusOr<kernels::Embedding> ToEmbedding(v1::Embedding embedding) {
  switch (embedding) {
    case v1::EMBEDDING_UNSPECIFIED:
      return kernels::Embedding::kNone;
    case v1::EMBEDDING_ROWS:
      return kernels::Embedding::kRows;
    case v1::EMBEDDING_GRADIENTS:
      return kernels::Embedding::kGradients;
    default:
      return FieldError("open.embedding", "be absent, EMBEDDING_ROWS or EMBEDDING_GRADIENTS",
                        static_cast<int>(embedding));
  }
}

absl::StatusOr<engine::Reduction> ToReduction(v1::Reduction reduction, absl::string_view field) {
  switch (reduction) {
    case v1::REDUCTION_SUM:
      return engine::Reduction::kSum;
    case v1::REDUCTION_MEAN:
      return engine::Reduction::kMean;
    case v1::REDUCTION_NONE:
      return engine::Reduction::kNone;
    default:
      return FieldError(field, "be REDUCTION_SUM, REDUCTION_MEAN or REDUCTION_NONE",
                        static_cast<int>(reduction));
  }
}

}  // namespace lossd::messages
