// SPDX-License-Identifier: Apache-2.0
// Checks of chunks, tensor accesses and steps (validation.h).
#include "kernels/validation.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels {
namespace {

// The path of a field, e.g. "slices[2].rows".
std::string SliceField(size_t slice, absl::string_view field) {
  return absl::StrCat("slices[", slice, "].", field);
}

absl::Status ValidateTargets(const HeadConfig& config, size_t index, const Slice& slice) {
  for (int64_t row = 0; row < slice.rows; ++row) {
    const int32_t target = slice.targets[row];
    if (target == kIgnoredTarget || (target >= 0 && target < config.vocab_size)) continue;
    return errors::FieldError(absl::StrCat(SliceField(index, "targets"), "[", row, "]"),
                              absl::StrCat("be in [0, ", config.vocab_size, ") or ", kIgnoredTarget), target);
  }
  return absl::OkStatus();
}

absl::Status ValidateWantedClasses(const HeadConfig& config, size_t index, const Slice& slice) {
  const int64_t most_top = std::min<int64_t>(config.vocab_size, kMostTopClasses);
  if (slice.top_k < 0 || slice.top_k > most_top) {
    return errors::FieldError(SliceField(index, "top_k"), absl::StrCat("be in [0, ", most_top, "]"),
                              slice.top_k);
  }
  if (slice.class_count < 0 || slice.class_count > kMostGivenClasses) {
    return errors::FieldError(SliceField(index, "class_count"),
                              absl::StrCat("be in [0, ", kMostGivenClasses, "]"), slice.class_count);
  }
  if (slice.rows == 0) return absl::OkStatus();
  if (slice.top_k > 0 && (slice.out.top_logprobs == nullptr || slice.out.top_classes == nullptr)) {
    return errors::FieldError(SliceField(index, "out.top_logprobs"), "not be null with top_k", "null");
  }
  if (slice.class_count == 0) return absl::OkStatus();
  if (slice.classes == nullptr || slice.out.class_logprobs == nullptr) {
    return errors::FieldError(SliceField(index, slice.classes == nullptr ? "classes" : "out.class_logprobs"),
                              "not be null with class_count", "null");
  }
  const int64_t count = (slice.shared_classes ? 1 : slice.rows) * slice.class_count;
  for (int64_t i = 0; i < count; ++i) {
    if (slice.classes[i] >= 0 && slice.classes[i] < config.vocab_size) continue;
    return errors::FieldError(absl::StrCat(SliceField(index, "classes"), "[", i, "]"),
                              absl::StrCat("be in [0, ", config.vocab_size, ")"), slice.classes[i]);
  }
  return absl::OkStatus();
}

// Checks soft targets: required with options.rest, and refused without it.
absl::Status ValidateSoftTargets(const HeadConfig& config, size_t index, const Slice& slice,
                                 const LossOptions& options) {
  if (!options.has_soft_targets()) {
    if (slice.target_count == 0) return absl::OkStatus();
    return errors::FieldError(SliceField(index, "target_count"), "be 0 without options.rest",
                              slice.target_count);
  }
  if (slice.class_count > 0 || slice.top_k > 0) {
    return errors::FieldError(SliceField(index, slice.class_count > 0 ? "class_count" : "top_k"),
                              "be 0 with soft targets",
                              slice.class_count > 0 ? slice.class_count : slice.top_k);
  }
  if (slice.rows == 0) return absl::OkStatus();
  if (slice.target_classes == nullptr || slice.target_weights == nullptr) {
    return errors::FieldError(
        SliceField(index, slice.target_classes == nullptr ? "target_classes" : "target_weights"),
        "not be null with soft targets", "null");
  }
  const auto rows = static_cast<size_t>(slice.rows);
  const auto entries = rows * static_cast<size_t>(std::max(slice.target_count, 0));
  return CheckSoftTargets(SliceField(index, ""), options.rest, config.vocab_size, slice.target_count,
                          {slice.target_classes, entries}, {slice.target_weights, entries},
                          {slice.targets, rows}, kIgnoredTarget);
}

absl::Status ValidateRetained(const HeadConfig& config, size_t index, const Slice& slice,
                              const Chunk& chunk) {
  const int64_t size = chunk.retained == nullptr ? 0 : chunk.retained->size();
  const auto element = static_cast<int64_t>(SizeOf(chunk.hidden_dtype));
  const int64_t bytes = slice.rows * config.hidden_size * element;
  const int64_t offset = slice.retained_offset;
  if (offset >= 0 && offset % element == 0 && offset <= size && bytes <= size - offset) {
    return absl::OkStatus();
  }
  return errors::FieldError(SliceField(index, "retained_offset"),
                            absl::StrCat("be a multiple of ", element, " with ", errors::ExactBytes(bytes),
                                         " behind it within the ", errors::ExactBytes(size), " retained"),
                            offset);
}

// Checks a slice of a chunk with embedding rows.
absl::Status ValidateEmbeddingSlice(const HeadConfig& config, size_t index, const Slice& slice,
                                    const Chunk& chunk) {
  const bool gradients = chunk.options.embedding == Embedding::kGradients;
  if (slice.rows > 0 && (slice.hidden == nullptr) == gradients) {
    return errors::FieldError(SliceField(index, "hidden"),
                              gradients ? "not be null" : "be null for rows of an embedding",
                              gradients ? "null" : "an array");
  }
  if (slice.rows > 0 && (slice.grad_hidden != nullptr) == gradients) {
    return errors::FieldError(SliceField(index, "grad_hidden"),
                              gradients ? "be null for gradients of an embedding" : "not be null",
                              gradients ? "an array" : "null");
  }
  const RowOutputs& out = slice.out;
  const std::pair<absl::string_view, bool> given[] = {
      {"retained_offset", slice.retained_offset != -1},
      {"row_weights", slice.row_weights != nullptr},
      {"class_count", slice.class_count != 0},
      {"top_k", slice.top_k != 0},
      {"out", out.loss != nullptr || out.lse != nullptr || out.entropy != nullptr ||
                  out.target_logprob != nullptr || out.argmax != nullptr}};
  for (const auto& [name, is_given] : given) {
    if (is_given) {
      return errors::FieldError(SliceField(index, name), "be absent for rows of an embedding", "given");
    }
  }
  if (slice.rows > 0 && slice.targets == nullptr) {
    return errors::FieldError(SliceField(index, "targets"), "not be null", "null");
  }
  if (!std::isfinite(slice.grad_scale)) {
    return errors::FieldError(SliceField(index, "grad_scale"), "be finite", slice.grad_scale);
  }
  return ValidateTargets(config, index, slice);
}

absl::Status ValidateSlice(const HeadConfig& config, size_t index, const Slice& slice, const Chunk& chunk) {
  if (chunk.options.is_embedding()) return ValidateEmbeddingSlice(config, index, slice, chunk);
  if (slice.rows > 0 && slice.hidden == nullptr && slice.retained_offset == -1) {
    return errors::FieldError(SliceField(index, "hidden"), "not be null", "null");
  }
  if (slice.retained_offset != -1) {
    if (absl::Status status = ValidateRetained(config, index, slice, chunk); !status.ok()) return status;
  }
  if (slice.rows > 0 && slice.targets == nullptr) {
    return errors::FieldError(SliceField(index, "targets"), "not be null", "null");
  }
  if (!std::isfinite(slice.grad_scale)) {
    return errors::FieldError(SliceField(index, "grad_scale"), "be finite", slice.grad_scale);
  }
  const Objective& objective = chunk.options.objective;
  const std::tuple<absl::string_view, bool, const float*> numbers[] = {
      {"advantages", NeedsAdvantage(objective.kind), slice.advantages},
      {"old_logprobs", NeedsOldLogprob(objective.kind), slice.old_logprobs},
      {"ref_logprobs", objective.needs_reference(), slice.ref_logprobs}};
  for (const auto& [name, needed, values] : numbers) {
    if (needed && values == nullptr && slice.rows > 0) {
      return errors::FieldError(SliceField(index, name),
                                absl::StrCat("not be null with ", Name(objective.kind)), "null");
    }
  }
  LOSSD_RETURN_IF_ERROR(ValidateWantedClasses(config, index, slice));
  LOSSD_RETURN_IF_ERROR(ValidateSoftTargets(config, index, slice, chunk.options));
  return ValidateTargets(config, index, slice);
}

// Checks that a chunk has a teacher if and only if it is distilled. The slices of a distilled chunk must have
// hidden states for the teacher, and neither retained rows nor upstream gradients of lse or entropy.
absl::Status ValidateDistillation(const HeadConfig& config, const Chunk& chunk) {
  const bool distilled = chunk.options.distillation.used();
  if (distilled != (chunk.teacher != nullptr)) {
    return errors::FieldError("teacher", "come with options.distillation, and only with it",
                              distilled ? "null" : "a head");
  }
  if (!distilled) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(ValidateTeacher(config, chunk.teacher->config(), "distillation.teacher"));
  for (size_t i = 0; i < chunk.slices.size(); ++i) {
    const Slice& slice = chunk.slices[i];
    if (slice.rows > 0 && slice.teacher_hidden == nullptr) {
      return errors::FieldError(SliceField(i, "teacher_hidden"), "not be null", "null");
    }
    if (slice.retained_offset != -1) {
      return errors::FieldError(SliceField(i, "retained_offset"), "be -1 with a teacher",
                                slice.retained_offset);
    }
    if (slice.grad_lse != nullptr || slice.grad_entropy != nullptr) {
      return errors::FieldError(SliceField(i, slice.grad_lse != nullptr ? "grad_lse" : "grad_entropy"),
                                "be null with a teacher", "an array");
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateRowCount(int64_t chunk_rows, const Chunk& chunk) {
  int64_t left = chunk_rows;
  for (size_t i = 0; i < chunk.slices.size(); ++i) {
    const int64_t rows = chunk.slices[i].rows;
    if (rows < 0) {
      return errors::FieldError(SliceField(i, "rows"), "be >= 0", rows);
    }
    if (rows > left) {
      return errors::WithViolation(
          absl::InvalidArgumentError(absl::StrCat("a chunk holds at most ", chunk_rows, " rows; slices[", i,
                                                  "] brings ", rows, " with ", left, " left")),
          {SliceField(i, "rows"), absl::StrCat("must be at most ", left), absl::StrCat(rows)});
    }
    left -= rows;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateChunk(const HeadConfig& config, int64_t chunk_rows, const Chunk& chunk) {
  LOSSD_RETURN_IF_ERROR(Validate(chunk.options));
  if (chunk.options.use_class_weights && !config.has_class_weights) {
    return errors::FieldError("use_class_weights", "be false: the head has no class weights", "true");
  }
  if (config.logits == Logits::kNone && !chunk.options.is_embedding()) {
    return errors::FieldError("embedding", "be rows or gradients: the head has no logits", "none");
  }
  if (chunk.accumulate_gradients && chunk.options.embedding == Embedding::kRows) {
    return errors::FieldError("accumulate_gradients", "be false for rows of an embedding", "true");
  }
  if (chunk.accumulate_gradients && !config.trainable) {
    return errors::FieldError("accumulate_gradients", "be false: the head is not trainable", "true");
  }
  if (chunk.hidden_dtype > DType::kBFloat16) {
    return errors::FieldError("hidden_dtype", "be fp32, fp16 or bf16", static_cast<int>(chunk.hidden_dtype));
  }
  LOSSD_RETURN_IF_ERROR(ValidateRowCount(chunk_rows, chunk));
  LOSSD_RETURN_IF_ERROR(ValidateDistillation(config, chunk));
  for (size_t i = 0; i < chunk.slices.size(); ++i) {
    if (absl::Status status = ValidateSlice(config, i, chunk.slices[i], chunk); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ValidateTensorAccess(const HeadConfig& config, TensorId id, int64_t row_begin, int64_t rows,
                                  DType dtype, size_t bytes) {
  if (!HasTensor(config, id)) {
    return absl::NotFoundError(absl::StrCat("the head has no ", Name(id.role), " of ", Name(id.param)));
  }
  const TensorShape shape = ShapeOf(config, id.param);
  if (row_begin < 0 || rows < 0 || row_begin > shape.rows || rows > shape.rows - row_begin) {
    return errors::FieldError("rows", absl::StrCat("lie in [0, ", shape.rows, ") of ", Name(id.param)),
                              absl::StrCat("[", row_begin, ", ", row_begin, " + ", rows, ")"));
  }
  if (dtype > DType::kBFloat16) {
    return errors::FieldError("dtype", "be fp32, fp16 or bf16", static_cast<int>(dtype));
  }
  const size_t want = static_cast<size_t>(rows * shape.cols) * SizeOf(dtype);
  if (bytes != want) {
    return errors::WithViolation(absl::InvalidArgumentError(absl::StrCat(
                                     rows, " rows of ", Name(id.param), " in ", Name(dtype), " are ",
                                     errors::ExactBytes(want), ", got ", errors::ExactBytes(bytes))),
                                 {"bytes", absl::StrCat("must be ", want), absl::StrCat(bytes)});
  }
  return absl::OkStatus();
}

absl::Status ValidateReplicaAccess(const HeadConfig& config, Replica replica, TensorId id, int64_t row_begin,
                                   int64_t rows, DType dtype, size_t bytes) {
  absl::Status status = ValidateTensorAccess(config, id, row_begin, rows, dtype, bytes);
  if (!status.ok() || rows == 0) return status;
  const ShardRows own = StoredRowsOf(config, id, replica);
  if (own.rows == 0) {
    return absl::NotFoundError(absl::StrCat("replica ", replica.index, " of ", replica.count, " has no ",
                                            Name(id.role), " of ", Name(id.param)));
  }
  if (row_begin >= own.first && row_begin + rows <= own.end()) return absl::OkStatus();
  return errors::FieldError(
      "rows",
      absl::StrCat("lie in [", own.first, ", ", own.end(), ") of ", Name(id.role), " of ", Name(id.param),
                   ", which replica ", replica.index, " of ", replica.count, " has"),
      absl::StrCat("[", row_begin, ", ", row_begin, " + ", rows, ")"));
}

absl::Status CheckTrainedBy(const HeadConfig& config, const OptimizerOptions& options) {
  if (!config.trainable) return absl::FailedPreconditionError("the head is not trainable");
  if (RequiredState(options) > config.optimizer_state) {
    return absl::FailedPreconditionError(absl::StrCat("the step needs optimizer state ",
                                                      Name(RequiredState(options)), ", the head reserved ",
                                                      Name(config.optimizer_state)));
  }
  return absl::OkStatus();
}

absl::Status ValidateStep(const HeadConfig& config, const OptimizerOptions& options, int64_t update) {
  LOSSD_RETURN_IF_ERROR(Validate(options));
  if (update < 1) return errors::FieldError("update", "be >= 1", update);
  return CheckTrainedBy(config, options);
}

absl::Status ValidateTeacherPart(const HeadPart& student, const HeadPart& teacher, bool same_device) {
  constexpr absl::string_view kField = "distillation.teacher";
  LOSSD_RETURN_IF_ERROR(ValidateTeacher(student.config, teacher.config, kField));
  if (!same_device) return errors::FieldError(kField, "be a head of the same device", "another one");
  const auto range = [](const ShardRows& rows) {
    return absl::StrCat("[", rows.first, ", ", rows.end(), ")");
  };
  if (student.classes.first == teacher.classes.first && student.classes.rows == teacher.classes.rows) {
    return absl::OkStatus();
  }
  return errors::FieldError(kField,
                            absl::StrCat("have the same classes on each device as the student, ",
                                         range(student.classes), " (HeadSpec.split, SetShares)"),
                            range(teacher.classes), absl::StatusCode::kUnimplemented);
}

}  // namespace lossd::kernels
