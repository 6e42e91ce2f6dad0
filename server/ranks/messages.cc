// SPDX-License-Identifier: Apache-2.0
// Converts between the messages of the ranks' protocol and the types of the kernels (messages.h).
//
// Arrays of values of rows travel as bytes. Put writes an array of the leader into a message, and Get points
// to it in the worker. Room makes space for a result in the worker's answer, and Take copies the result to
// the leader's array.
#include "server/ranks/messages.h"

#include <cstring>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::ranks {
namespace {

using kernels::DType;

// The enumerator with this value. `last` is the largest enumerator.
template <typename Enum>
absl::StatusOr<Enum> EnumOf(const char* name, uint32_t value, Enum last) {
  if (value <= static_cast<uint32_t>(last)) return static_cast<Enum>(value);
  return errors::FieldError(name, absl::StrCat("be in [0, ", static_cast<uint32_t>(last), "]"), value);
}

template <typename Enum>
uint32_t ValueOf(Enum value) {
  return static_cast<uint32_t>(value);
}

}  // namespace

v1::Status ToProto(const absl::Status& status) {
  v1::Status out;
  out.set_code(static_cast<int32_t>(status.code()));
  out.set_message(std::string(status.message()));
  status.ForEachPayload([&out](absl::string_view url, const absl::Cord& value) {
    v1::Payload* const payload = out.add_payloads();
    payload->set_url(std::string(url));
    payload->set_value(std::string(value));
  });
  return out;
}

absl::Status FromProto(const v1::Status& status) {
  absl::Status out(static_cast<absl::StatusCode>(status.code()), status.message());
  for (const v1::Payload& payload : status.payloads())
    out.SetPayload(payload.url(), absl::Cord(payload.value()));
  return out;
}

v1::HeadConfig ToProto(const kernels::HeadConfig& config) {
  v1::HeadConfig out;
  out.set_hidden_size(config.hidden_size);
  out.set_vocab_size(config.vocab_size);
  out.set_has_bias(config.has_bias);
  out.set_has_class_weights(config.has_class_weights);
  out.set_norm(ValueOf(config.norm));
  out.set_norm_epsilon(config.norm_epsilon);
  out.set_compute_dtype(ValueOf(config.compute_dtype));
  out.set_optimizer_state(ValueOf(config.optimizer_state));
  out.set_trainable(config.trainable);
  out.set_logits(ValueOf(config.logits));
  out.set_gradients(ValueOf(config.gradients));
  out.set_workspace_bytes(config.workspace_bytes);
  out.set_split(ValueOf(config.split));
  out.mutable_shares()->Add(config.shares.begin(), config.shares.end());
  out.set_replicas(config.replicas);
  return out;
}

absl::StatusOr<kernels::HeadConfig> FromProto(const v1::HeadConfig& config) {
  LOSSD_TRY(const auto norm, EnumOf("norm", config.norm(), kernels::Norm::kRmsNorm));
  LOSSD_TRY(const auto dtype, DTypeOf(config.compute_dtype()));
  LOSSD_TRY(const auto state,
            EnumOf("optimizer_state", config.optimizer_state(), kernels::OptimizerState::kAdam));
  LOSSD_TRY(const auto logits, EnumOf("logits", config.logits(), kernels::Logits::kNone));
  LOSSD_TRY(const auto gradients, GradientsOf(config.gradients()));
  LOSSD_TRY(const auto split, EnumOf("split", config.split(), kernels::Split::kVocabulary));
  return kernels::HeadConfig{.hidden_size = config.hidden_size(),
                             .vocab_size = config.vocab_size(),
                             .has_bias = config.has_bias(),
                             .has_class_weights = config.has_class_weights(),
                             .norm = norm,
                             .norm_epsilon = config.norm_epsilon(),
                             .compute_dtype = dtype,
                             .optimizer_state = state,
                             .trainable = config.trainable(),
                             .logits = logits,
                             .gradients = gradients,
                             .workspace_bytes = config.workspace_bytes(),
                             .split = split,
                             .shares = {config.shares().begin(), config.shares().end()},
                             .replicas = config.replicas()};
}

v1::Step ToProto(const kernels::OptimizerOptions& options, int64_t update) {
  v1::Step out;
  out.set_kind(ValueOf(options.kind));
  out.set_learning_rate(options.learning_rate);
  out.set_weight_decay(options.weight_decay);
  out.set_decay_vectors(options.decay_vectors);
  out.set_grad_multiplier(options.grad_multiplier);
  out.set_beta1(options.beta1);
  out.set_beta2(options.beta2);
  out.set_epsilon(options.epsilon);
  out.set_momentum(options.momentum);
  out.set_dampening(options.dampening);
  out.set_nesterov(options.nesterov);
  out.set_lazy_rows(options.lazy_rows);
  out.set_update(update);
  return out;
}

absl::StatusOr<kernels::OptimizerOptions> FromProto(const v1::Step& step) {
  LOSSD_TRY(const auto kind, EnumOf("kind", step.kind(), kernels::OptimizerOptions::Kind::kAdamW));
  return kernels::OptimizerOptions{.kind = kind,
                                   .learning_rate = step.learning_rate(),
                                   .weight_decay = step.weight_decay(),
                                   .decay_vectors = step.decay_vectors(),
                                   .grad_multiplier = step.grad_multiplier(),
                                   .beta1 = step.beta1(),
                                   .beta2 = step.beta2(),
                                   .epsilon = step.epsilon(),
                                   .momentum = step.momentum(),
                                   .dampening = step.dampening(),
                                   .nesterov = step.nesterov(),
                                   .lazy_rows = step.lazy_rows()};
}

v1::Distillation ToProto(const kernels::Distillation& distillation) {
  v1::Distillation out;
  out.set_divergence(ValueOf(distillation.divergence));
  out.set_beta(distillation.beta);
  out.set_temperature(distillation.temperature);
  out.set_weight(distillation.weight);
  out.set_target_weight(distillation.target_weight);
  out.set_teacher_logit_scale(distillation.teacher_logit_scale);
  out.set_teacher_softcap(distillation.teacher_softcap);
  out.set_teacher(distillation.teacher);
  return out;
}

absl::StatusOr<kernels::Distillation> FromProto(const v1::Distillation& distillation) {
  LOSSD_TRY(const auto divergence,
            EnumOf("divergence", distillation.divergence(), kernels::Divergence::kTotalVariation));
  return kernels::Distillation{.divergence = divergence,
                               .beta = distillation.beta(),
                               .temperature = distillation.temperature(),
                               .weight = distillation.weight(),
                               .target_weight = distillation.target_weight(),
                               .teacher_logit_scale = distillation.teacher_logit_scale(),
                               .teacher_softcap = distillation.teacher_softcap(),
                               .teacher = distillation.teacher()};
}

v1::LossOptions ToProto(const kernels::LossOptions& options) {
  v1::LossOptions out;
  out.set_logit_scale(options.logit_scale);
  out.set_softcap(options.softcap);
  out.set_label_smoothing(options.label_smoothing);
  out.set_z_loss(options.z_loss);
  out.set_use_class_weights(options.use_class_weights);
  out.set_gradients(ValueOf(options.gradients));
  out.set_filter_epsilon(options.filter_epsilon);
  out.set_sample_threshold(options.sample_threshold);
  out.set_max_gradient_error(options.max_gradient_error);
  const kernels::Objective& objective = options.objective;
  v1::Objective& sent = *out.mutable_objective();
  sent.set_kind(ValueOf(objective.kind));
  sent.set_clip_low(objective.clip_low);
  sent.set_clip_high(objective.clip_high);
  sent.set_dual_clip(objective.dual_clip);
  sent.set_kl(ValueOf(objective.kl));
  sent.set_kl_coef(objective.kl_coef);
  sent.set_entropy_bonus(objective.entropy_bonus);
  *out.mutable_distillation() = ToProto(options.distillation);
  out.set_rest(ValueOf(options.rest));
  out.set_embedding(ValueOf(options.embedding));
  return out;
}

absl::StatusOr<kernels::LossOptions> FromProto(const v1::LossOptions& options) {
  LOSSD_TRY(const auto gradients, GradientsOf(options.gradients()));
  const v1::Objective& objective = options.objective();
  LOSSD_TRY(const auto kind, EnumOf("objective.kind", objective.kind(), kernels::kLastObjective));
  LOSSD_TRY(const auto kl, EnumOf("objective.kl", objective.kl(), kernels::KlEstimator::kK3));
  LOSSD_TRY(const auto distillation, FromProto(options.distillation()));
  LOSSD_TRY(const auto rest, EnumOf("rest", options.rest(), kernels::kLastRest));
  LOSSD_TRY(const auto embedding, EnumOf("embedding", options.embedding(), kernels::Embedding::kGradients));
  return kernels::LossOptions{.logit_scale = options.logit_scale(),
                              .softcap = options.softcap(),
                              .label_smoothing = options.label_smoothing(),
                              .z_loss = options.z_loss(),
                              .use_class_weights = options.use_class_weights(),
                              .gradients = gradients,
                              .filter_epsilon = options.filter_epsilon(),
                              .sample_threshold = options.sample_threshold(),
                              .max_gradient_error = options.max_gradient_error(),
                              .objective = {.kind = kind,
                                            .clip_low = objective.clip_low(),
                                            .clip_high = objective.clip_high(),
                                            .dual_clip = objective.dual_clip(),
                                            .kl = kl,
                                            .kl_coef = objective.kl_coef(),
                                            .entropy_bonus = objective.entropy_bonus()},
                              .distillation = distillation,
                              .rest = rest,
                              .embedding = embedding};
}

void SetBytes(const kernels::MemoryBytes& bytes, google::protobuf::RepeatedField<int64_t>* out) {
  out->Clear();
  for (const int64_t value : bytes.by_kind) out->Add(value);
}

kernels::MemoryBytes BytesOf(const google::protobuf::RepeatedField<int64_t>& values) {
  kernels::MemoryBytes bytes;
  for (size_t kind = 0; kind < kernels::kMemoryKinds && kind < static_cast<size_t>(values.size()); ++kind) {
    bytes.by_kind[kind] = values.Get(static_cast<int>(kind));
  }
  return bytes;
}

v1::Memory ToProto(const kernels::MemoryStats& stats) {
  v1::Memory out;
  SetBytes(stats.current, out.mutable_current());
  SetBytes(stats.peak, out.mutable_peak());
  out.set_peak_total(stats.peak_total);
  out.set_limit(stats.limit);
  return out;
}

kernels::MemoryStats FromProto(const v1::Memory& memory) {
  return {.current = BytesOf(memory.current()),
          .peak = BytesOf(memory.peak()),
          .peak_total = memory.peak_total(),
          .limit = memory.limit()};
}

v1::BackendInfo ToProto(const kernels::BackendInfo& info, int max_chunks_in_flight) {
  v1::BackendInfo out;
  out.set_name(info.name);
  out.set_device(info.device);
  out.set_default_compute_dtype(ValueOf(info.default_compute_dtype));
  out.set_max_chunks_in_flight(max_chunks_in_flight);
  return out;
}

absl::StatusOr<kernels::BackendInfo> FromProto(const v1::BackendInfo& info) {
  LOSSD_TRY(const auto dtype, DTypeOf(info.default_compute_dtype()));
  return kernels::BackendInfo{.name = info.name(), .device = info.device(), .default_compute_dtype = dtype};
}

v1::TensorAccess ToProto(kernels::TensorId id, int64_t row_begin, int64_t rows, DType dtype) {
  v1::TensorAccess out;
  out.set_param(ValueOf(id.param));
  out.set_role(ValueOf(id.role));
  out.set_row_begin(row_begin);
  out.set_rows(rows);
  out.set_dtype(ValueOf(dtype));
  return out;
}

absl::StatusOr<kernels::TensorId> TensorOf(const v1::TensorAccess& access) {
  LOSSD_TRY(const auto param, EnumOf("param", access.param(), kernels::Param::kClassWeights));
  LOSSD_TRY(const auto role, EnumOf("role", access.role(), kernels::Role::kMoment2));
  return kernels::TensorId{param, role};
}

absl::StatusOr<DType> DTypeOf(uint32_t value) { return EnumOf("dtype", value, DType::kBFloat16); }

absl::StatusOr<kernels::Gradients> GradientsOf(uint32_t value) {
  return EnumOf("gradients", value, kernels::Gradients::kAuto);
}

void SetChoices(const std::vector<kernels::Choice>& choices,
                google::protobuf::RepeatedPtrField<v1::Choice>* out) {
  for (const kernels::Choice& choice : choices) {
    v1::Choice* const one = out->Add();
    one->set_what(choice.what);
    one->set_choice(choice.choice);
    one->set_reason(choice.reason);
    one->set_workspace_bytes(choice.workspace_bytes);
  }
}

std::vector<kernels::Choice> ChoicesOf(const google::protobuf::RepeatedPtrField<v1::Choice>& choices) {
  std::vector<kernels::Choice> out;
  for (const v1::Choice& choice : choices) {
    out.push_back({.what = choice.what(),
                   .choice = choice.choice(),
                   .reason = choice.reason(),
                   .workspace_bytes = choice.workspace_bytes()});
  }
  return out;
}

v1::SliceSums ToProto(const kernels::LossSums& sums) {
  v1::SliceSums out;
  out.set_loss(sums.loss);
  out.set_z_loss(sums.z_loss);
  out.set_entropy(sums.entropy);
  out.set_dropped_mass(sums.dropped_mass);
  out.set_sampling_variance(sums.sampling_variance);
  out.set_squared_gradient(sums.squared_gradient);
  out.set_valid_rows(sums.valid_rows);
  out.set_correct_rows(sums.correct_rows);
  out.set_objective_rows(sums.objective.rows);
  out.set_clipped_rows(sums.objective.clipped_rows);
  out.set_ratio(sums.objective.ratio);
  out.set_old_kl(sums.objective.old_kl);
  out.set_ref_kl(sums.objective.ref_kl);
  out.set_divergence(sums.divergence);
  out.set_target_loss(sums.target_loss);
  return out;
}

kernels::LossSums FromProto(const v1::SliceSums& sums) {
  return {
      .loss = sums.loss(),
      .z_loss = sums.z_loss(),
      .entropy = sums.entropy(),
      .dropped_mass = sums.dropped_mass(),
      .sampling_variance = sums.sampling_variance(),
      .squared_gradient = sums.squared_gradient(),
      .valid_rows = sums.valid_rows(),
      .correct_rows = sums.correct_rows(),
      .objective = {sums.objective_rows(), sums.clipped_rows(), sums.ratio(), sums.old_kl(), sums.ref_kl()},
      .divergence = sums.divergence(),
      .target_loss = sums.target_loss()};
}

v1::FileLine ToProto(const head::ManifestShard& shard) {
  v1::FileLine line;
  line.set_file_bytes(shard.file_bytes);
  for (const head::ManifestTensor& tensor : shard.tensors) {
    v1::TensorLine* const out = line.add_tensors();
    out->set_name(tensor.name);
    out->set_bytes(tensor.bytes);
    out->set_checksum(tensor.checksum);
  }
  return line;
}

head::ManifestShard FromProto(const v1::FileLine& line) {
  head::ManifestShard shard{.file_bytes = line.file_bytes()};
  for (const v1::TensorLine& tensor : line.tensors()) {
    shard.tensors.push_back({tensor.name(), tensor.bytes(), tensor.checksum()});
  }
  return shard;
}

// ---- Chunks and their slices ----

namespace {

using kernels::Slice;

// Copies an array into a message. A null array stays absent.
template <typename T>
void Put(const T* values, int64_t rows, std::string* bytes) {
  if (values == nullptr) return;
  bytes->assign(reinterpret_cast<const char*>(values), static_cast<size_t>(rows) * sizeof(T));
}

absl::Status WrongLength(const char* what, size_t want, size_t got) {
  return absl::InternalError(
      absl::StrCat("it sent ", errors::ExactBytes(got), " of ", what, " instead of ", want));
}

// Points `values` to an array of the message. Does not change `values` if the message has no such array.
template <typename T>
absl::Status Get(const char* what, const std::string& bytes, int64_t rows, const T*& values) {
  if (bytes.empty()) return absl::OkStatus();
  const size_t want = static_cast<size_t>(rows) * sizeof(T);
  if (bytes.size() != want) return WrongLength(what, want, bytes.size());
  values = reinterpret_cast<const T*>(bytes.data());
  return absl::OkStatus();
}

// Allocates `rows` values in `bytes` for a result. Null if the result is not wanted.
template <typename T>
T* Room(bool wanted, int64_t rows, std::string* bytes) {
  if (!wanted) return nullptr;
  bytes->resize(static_cast<size_t>(rows) * sizeof(T));
  return reinterpret_cast<T*>(bytes->data());
}

// Copies a result from a message to `out`. Null: the result is not wanted.
absl::Status Take(const char* what, const std::string& bytes, size_t want, void* out) {
  if (out == nullptr) return absl::OkStatus();
  if (bytes.size() != want) return WrongLength(what, want, bytes.size());
  std::memcpy(out, bytes.data(), want);
  return absl::OkStatus();
}

// The length of Slice::classes.
int64_t ClassesIn(int64_t rows, bool shared, int32_t class_count) {
  return (shared ? std::min<int64_t>(rows, 1) : rows) * class_count;
}

// Names the place of the gradients, if they have one. A part of a head split by vocabulary gets no place: the
// leader's part writes the gradients, perhaps while other parts still read the hidden states there.
void PlaceGradients(const Slice& slice, size_t length, bool is_part, FindPlace find,
                    v1::ChunkSlice* message) {
  if (slice.grad_hidden == nullptr || length == 0 || is_part) return;
  if (std::optional<v1::RowsPlace> place = find(slice.grad_hidden, length)) {
    *message->mutable_grad_hidden_at() = *std::move(place);
  }
}

// Reads hidden states from the retained memory for a backward: to the place of the gradients if the message
// names one, otherwise into the message. The worker may write the gradients over its hidden states, so one
// place serves for both.
absl::Status PutRetained(const kernels::Chunk& chunk, const Slice& slice, size_t length,
                         v1::ChunkSlice* message) {
  auto* bytes = static_cast<uint8_t*>(slice.grad_hidden);
  if (message->has_grad_hidden_at()) {
    *message->mutable_hidden_at() = message->grad_hidden_at();
  } else {
    message->mutable_hidden()->resize(length);
    bytes = reinterpret_cast<uint8_t*>(message->mutable_hidden()->data());
  }
  return chunk.retained->ReadBytes(slice.retained_offset, {bytes, length});
}

// Puts the hidden states of a slice into the message, or names their place. Also retains hidden states, in
// the leader's memory; for a head split by vocabulary, the first part of the head does this instead. Call
// after PlaceGradients.
absl::Status PutHidden(const kernels::Chunk& chunk, const Slice& slice, size_t length, bool is_part,
                       FindPlace find, v1::ChunkSlice* message) {
  if (length == 0 || message->without_hidden()) return absl::OkStatus();
  // No hidden states: they are in the retained memory already (a backward).
  if (slice.hidden == nullptr) return PutRetained(chunk, slice, length, message);
  // Hidden states and an offset: they are to be retained (a deferred microbatch).
  if (slice.retained_offset >= 0 && !is_part)
    LOSSD_RETURN_IF_ERROR(chunk.retained->WriteBytes(slice.retained_offset,
                                                     {static_cast<const uint8_t*>(slice.hidden), length}));
  if (std::optional<v1::RowsPlace> place = find(slice.hidden, length)) {
    *message->mutable_hidden_at() = *std::move(place);
  } else {
    message->mutable_hidden()->assign(static_cast<const char*>(slice.hidden), length);
  }
  return absl::OkStatus();
}

void PutTeacherHidden(const Slice& slice, size_t length, FindPlace find, v1::ChunkSlice* message) {
  if (length == 0) return;
  if (std::optional<v1::RowsPlace> place = find(slice.teacher_hidden, length)) {
    *message->mutable_teacher_hidden_at() = *std::move(place);
  } else {
    message->mutable_teacher_hidden()->assign(static_cast<const char*>(slice.teacher_hidden), length);
  }
}

// Checks that the message brings exactly the hidden states of its rows, or no bytes if it names their place.
absl::Status CheckHidden(const v1::ChunkSlice& message, size_t bytes) {
  const size_t want = message.has_hidden_at() || message.without_hidden() ? 0 : bytes;
  if (message.hidden().size() == want) return absl::OkStatus();
  return WrongLength("hidden states", want, message.hidden().size());
}

absl::Status CheckTeacherHidden(const v1::ChunkSlice& message, size_t bytes) {
  const size_t want = message.has_teacher_hidden_at() ? 0 : bytes;
  if (message.teacher_hidden().size() == want) return absl::OkStatus();
  return WrongLength("hidden states of the teacher", want, message.teacher_hidden().size());
}

}  // namespace

v1::ChunkStart StartOf(const kernels::Chunk& chunk, uint64_t id, uint64_t head, uint64_t teacher) {
  v1::ChunkStart start;
  start.set_chunk(id);
  start.set_head(head);
  start.set_teacher(teacher);
  *start.mutable_options() = ToProto(chunk.options);
  start.set_hidden_dtype(static_cast<uint32_t>(chunk.hidden_dtype));
  start.set_accumulate_gradients(chunk.accumulate_gradients);
  start.set_independent(chunk.independent);
  start.set_turn(chunk.turn);
  start.set_slices(static_cast<uint32_t>(chunk.slices.size()));
  int64_t rows = 0;
  for (const Slice& slice : chunk.slices) rows += slice.rows;
  start.set_rows(rows);
  return start;
}

absl::StatusOr<v1::ChunkSlice> MessageOf(const kernels::Chunk& chunk, const Slice& slice,
                                         const RowBytes& row_bytes, bool is_part, FindPlace find) {
  v1::ChunkSlice message;
  message.set_rows(slice.rows);
  const size_t length = static_cast<size_t>(slice.rows) * row_bytes.hidden;
  // Rows of an embedding go out, and no hidden states come in.
  message.set_without_hidden(chunk.options.embedding == kernels::Embedding::kRows);
  PlaceGradients(slice, length, is_part, find, &message);
  LOSSD_RETURN_IF_ERROR(PutHidden(chunk, slice, length, is_part, find, &message));
  PutTeacherHidden(slice, static_cast<size_t>(slice.rows) * row_bytes.teacher, find, &message);
  Put(slice.targets, slice.rows, message.mutable_targets());
  Put(slice.row_weights, slice.rows, message.mutable_row_weights());
  Put(slice.accumulate, slice.rows, message.mutable_accumulate());
  message.set_grad_scale(slice.grad_scale);
  message.set_sample_seed(slice.sample_seed);
  message.set_first_row(slice.first_row);
  message.set_stands_in(slice.stands_in);
  Put(slice.grad_loss, slice.rows, message.mutable_grad_loss());
  Put(slice.grad_lse, slice.rows, message.mutable_grad_lse());
  Put(slice.grad_entropy, slice.rows, message.mutable_grad_entropy());
  Put(slice.advantages, slice.rows, message.mutable_advantages());
  Put(slice.old_logprobs, slice.rows, message.mutable_old_logprobs());
  Put(slice.ref_logprobs, slice.rows, message.mutable_ref_logprobs());
  message.set_want_grad_hidden(slice.grad_hidden != nullptr);
  message.set_want_loss(slice.out.loss != nullptr);
  message.set_want_lse(slice.out.lse != nullptr);
  message.set_want_entropy(slice.out.entropy != nullptr);
  message.set_want_target_logprob(slice.out.target_logprob != nullptr);
  message.set_want_argmax(slice.out.argmax != nullptr);
  if (slice.class_count > 0) {
    Put(slice.classes, ClassesIn(slice.rows, slice.shared_classes, slice.class_count),
        message.mutable_classes());
  }
  message.set_class_count(slice.class_count);
  message.set_shared_classes(slice.shared_classes);
  message.set_top_k(slice.top_k);
  if (slice.target_count > 0) {
    Put(slice.target_classes, slice.rows * slice.target_count, message.mutable_target_classes());
    Put(slice.target_weights, slice.rows * slice.target_count, message.mutable_target_weights());
  }
  message.set_target_count(slice.target_count);
  return message;
}

absl::Status TakeResults(const v1::SliceResults& results, size_t row_bytes, bool in_place, Slice& slice) {
  slice.first_nonfinite_row = results.first_nonfinite_row();
  slice.sums = FromProto(results.sums());
  const size_t each = static_cast<size_t>(slice.rows) * sizeof(float);
  absl::Status status = Take("losses", results.loss(), each, slice.out.loss);
  status.Update(Take("lse", results.lse(), each, slice.out.lse));
  status.Update(Take("entropies", results.entropy(), each, slice.out.entropy));
  status.Update(Take("log-probabilities", results.target_logprob(), each, slice.out.target_logprob));
  status.Update(Take("argmax", results.argmax(), each, slice.out.argmax));
  if (slice.class_count > 0) {
    status.Update(Take("log-probabilities of classes", results.class_logprobs(),
                       each * static_cast<size_t>(slice.class_count), slice.out.class_logprobs));
  }
  if (slice.top_k > 0) {
    const size_t top = each * static_cast<size_t>(slice.top_k);
    status.Update(
        Take("log-probabilities of top classes", results.top_logprobs(), top, slice.out.top_logprobs));
    status.Update(Take("top classes", results.top_classes(), top, slice.out.top_classes));
  }
  if (results.grad_hidden_in_place() != in_place) {
    status.Update(absl::InternalError("it put gradients where they do not belong"));
  }
  if (!in_place) {
    status.Update(Take("gradients", results.grad_hidden(), static_cast<size_t>(slice.rows) * row_bytes,
                       slice.grad_hidden));
  }
  return status;
}

void TakePartResults(const v1::SliceResults& results, Slice& slice) {
  slice.first_nonfinite_row = results.first_nonfinite_row();
}

absl::StatusOr<kernels::Chunk> ChunkOf(const v1::ChunkStart& start) {
  LOSSD_TRY(const auto options, FromProto(start.options()));
  LOSSD_TRY(const auto dtype, DTypeOf(start.hidden_dtype()));
  kernels::Chunk chunk;
  chunk.options = options;
  chunk.hidden_dtype = dtype;
  chunk.accumulate_gradients = start.accumulate_gradients();
  chunk.independent = start.independent();
  chunk.turn = start.turn();
  return chunk;
}

bool NeedsOwnMemory(const v1::ChunkSlice& message) {
  const bool brings_hidden = !message.has_hidden_at() && !message.without_hidden();
  const bool writes_gradients = message.want_grad_hidden() && !message.has_grad_hidden_at();
  return message.rows() > 0 && (brings_hidden || writes_gradients);
}

absl::StatusOr<Slice> SliceOf(v1::ChunkSlice& message, const RowBytes& row_bytes, const SliceMemory& memory,
                              v1::SliceResults& results) {
  const int64_t rows = message.rows();
  const size_t bytes = static_cast<size_t>(rows) * row_bytes.hidden;
  LOSSD_RETURN_IF_ERROR(CheckHidden(message, bytes));
  LOSSD_RETURN_IF_ERROR(CheckTeacherHidden(message, static_cast<size_t>(rows) * row_bytes.teacher));
  Slice slice;
  slice.rows = rows;
  if (!message.without_hidden()) slice.hidden = memory.hidden == nullptr ? memory.own : memory.hidden;
  if (!message.hidden().empty()) std::memcpy(memory.own, message.hidden().data(), bytes);
  message.clear_hidden();  // frees the bytes, which have been copied
  if (row_bytes.teacher > 0) {
    slice.teacher_hidden =
        memory.teacher_hidden == nullptr ? message.teacher_hidden().data() : memory.teacher_hidden;
  }
  absl::Status status = Get("targets", message.targets(), rows, slice.targets);
  status.Update(Get("row weights", message.row_weights(), rows, slice.row_weights));
  status.Update(Get("accumulate", message.accumulate(), rows, slice.accumulate));
  status.Update(Get("grad_loss", message.grad_loss(), rows, slice.grad_loss));
  status.Update(Get("grad_lse", message.grad_lse(), rows, slice.grad_lse));
  status.Update(Get("grad_entropy", message.grad_entropy(), rows, slice.grad_entropy));
  status.Update(Get("advantages", message.advantages(), rows, slice.advantages));
  status.Update(Get("old_logprobs", message.old_logprobs(), rows, slice.old_logprobs));
  status.Update(Get("ref_logprobs", message.ref_logprobs(), rows, slice.ref_logprobs));
  slice.class_count = message.class_count();
  slice.shared_classes = message.shared_classes();
  slice.top_k = message.top_k();
  if (slice.class_count < 0 || slice.class_count > kernels::kMostGivenClasses || slice.top_k < 0 ||
      slice.top_k > kernels::kMostTopClasses) {
    status.Update(absl::InternalError("it wants more classes of a row than there may be"));
  }
  status.Update(Get("classes", message.classes(), ClassesIn(rows, slice.shared_classes, slice.class_count),
                    slice.classes));
  slice.target_count = message.target_count();
  if (slice.target_count < 0 || slice.target_count > kernels::kMostSoftTargets) {
    status.Update(absl::InternalError("it has more soft targets of a row than there may be"));
  }
  status.Update(
      Get("target_classes", message.target_classes(), rows * slice.target_count, slice.target_classes));
  status.Update(
      Get("target_weights", message.target_weights(), rows * slice.target_count, slice.target_weights));
  if (!status.ok()) return status;
  // A slice without rows also gets targets that are not null; the pointer is never read.
  if (rows == 0) slice.targets = reinterpret_cast<const int32_t*>(message.targets().data());
  slice.grad_scale = message.grad_scale();
  slice.sample_seed = message.sample_seed();
  slice.first_row = message.first_row();
  slice.stands_in = message.stands_in();
  if (message.want_grad_hidden()) {
    slice.grad_hidden = memory.grad_hidden == nullptr ? memory.own : memory.grad_hidden;
  }
  slice.out.loss = Room<float>(message.want_loss(), rows, results.mutable_loss());
  slice.out.lse = Room<float>(message.want_lse(), rows, results.mutable_lse());
  slice.out.entropy = Room<float>(message.want_entropy(), rows, results.mutable_entropy());
  slice.out.target_logprob =
      Room<float>(message.want_target_logprob(), rows, results.mutable_target_logprob());
  slice.out.argmax = Room<int32_t>(message.want_argmax(), rows, results.mutable_argmax());
  slice.out.class_logprobs =
      Room<float>(slice.class_count > 0, rows * slice.class_count, results.mutable_class_logprobs());
  slice.out.top_logprobs = Room<float>(slice.top_k > 0, rows * slice.top_k, results.mutable_top_logprobs());
  slice.out.top_classes = Room<int32_t>(slice.top_k > 0, rows * slice.top_k, results.mutable_top_classes());
  return slice;
}

void SetResults(const Slice& slice, size_t row_bytes, bool in_place, v1::SliceResults& results) {
  results.set_first_nonfinite_row(slice.first_nonfinite_row);
  *results.mutable_sums() = ToProto(slice.sums);
  results.set_grad_hidden_in_place(in_place);
  if (slice.grad_hidden == nullptr || in_place) return;
  results.set_grad_hidden(slice.grad_hidden, static_cast<size_t>(slice.rows) * row_bytes);
}

void SetPartResults(const Slice& slice, v1::SliceResults& results) {
  results = v1::SliceResults();  // only all parts together have the results of rows
  results.set_first_nonfinite_row(slice.first_nonfinite_row);
}

}  // namespace lossd::ranks
