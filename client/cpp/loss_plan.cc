// SPDX-License-Identifier: Apache-2.0
// The plan of a loss computation (loss_plan.h): checks of its arguments, and how rows become streams and
// slices.
#include "client/cpp/loss_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::client::internal {

// ---- The checks of a call ----

namespace {

constexpr uint64_t kMessageBytes = 1 << 20;  // the rows of a slice in a message, if the caller sets no size
constexpr uint64_t kCallsPerRegion = 4;      // a call may have this part of a region at a time

// For rows that are copied into a region of host memory. A slice has about kHostSliceBytes, so that the
// server computes one slice while the client copies the next one. Each of several streams copies at least
// kHostStreamBytes: four streams copied 48 MiB 1.3 times as fast as one, and more streams were not faster.
constexpr uint64_t kHostSliceBytes = uint64_t{4} << 20;
constexpr uint64_t kHostStreamBytes = uint64_t{8} << 20;
constexpr uint64_t kMaxStreamsInRegion = 4;

constexpr uint64_t kMaxRows = std::numeric_limits<int32_t>::max();
constexpr int kMaxStreams = 1024;
constexpr size_t kMostDepths = 64;
constexpr int32_t kDefaultIgnoreIndex = -100;

absl::Status WrongCount(absl::string_view field, uint64_t entries, uint64_t rows) {
  return ArgumentError(field, entries, absl::StrCat("has ", entries, " entries for ", rows, " rows"));
}

// The checks that ComputeLoss and Backward have in common. `what` is the name of the argument.
absl::Status ValidateShape(absl::string_view what, const std::string& head, uint64_t rows,
                           uint64_t hidden_size, v1::DType dtype) {
  const auto field = [what](absl::string_view name) { return absl::StrCat(what, ".", name); };
  if (head.empty()) return ArgumentError(field("head"), head, "is empty");
  if (hidden_size == 0) return ArgumentError(field("hidden_size"), hidden_size, "is 0; it must be above 0");
  if (ElementSize(dtype) == 0) {
    return ArgumentError(field("hidden_dtype"), static_cast<int>(dtype),
                         absl::StrCat("is ", static_cast<int>(dtype), ", not a dtype"));
  }
  if (rows > kMaxRows) {
    return ArgumentError(what, rows, absl::StrCat("has ", rows, " rows; the most is ", kMaxRows));
  }
  // So that the bytes of all rows, with at most 4 bytes an element, fit into an int64.
  if (hidden_size > std::numeric_limits<int64_t>::max() / 4 / std::max<uint64_t>(rows, 1)) {
    return ArgumentError(field("hidden_size"), hidden_size,
                         absl::StrCat("is ", hidden_size, ": too large for ", rows, " rows"));
  }
  return absl::OkStatus();
}

// Checks the buffers of a call for embedding rows. The server checks the other options.
absl::Status ValidateEmbedding(const Microbatch& microbatch, const LossOutputs& outputs,
                               const ComputeOptions& options) {
  if (microbatch.embedding == v1::EMBEDDING_UNSPECIFIED) return absl::OkStatus();
  const bool gradients = microbatch.embedding == v1::EMBEDDING_GRADIENTS;
  if (!gradients && microbatch.hidden != nullptr)
    return ArgumentError("microbatch.hidden", "a buffer", "is given; EMBEDDING_ROWS brings none");
  if (!gradients && outputs.grad_hidden == nullptr && !microbatch.targets.empty())
    return ArgumentError("outputs.grad_hidden", "null", "is null; EMBEDDING_ROWS needs a place for the rows");
  if (gradients && outputs.grad_hidden != nullptr)
    return ArgumentError("outputs.grad_hidden", "a buffer", "is given; EMBEDDING_GRADIENTS has no result");
  if (options.accumulate_gradients != gradients) {
    return ArgumentError("options.accumulate_gradients", gradients ? "false" : "true",
                         gradients ? "is false; EMBEDDING_GRADIENTS adds to the gradients"
                                   : "is true; EMBEDDING_ROWS adds nothing");
  }
  if (!microbatch.depths.empty()) {
    return ArgumentError("microbatch.depths", microbatch.depths.size(),
                         "is given; the rows of an embedding have no depths");
  }
  return absl::OkStatus();
}

absl::Status ValidateMicrobatch(const Microbatch& microbatch, int32_t ignore_index) {
  const uint64_t rows = microbatch.targets.size();
  LOSSD_RETURN_IF_ERROR(
      ValidateShape("microbatch", microbatch.head, rows, microbatch.hidden_size, microbatch.hidden_dtype));
  const std::pair<absl::string_view, size_t> counts[] = {
      {"microbatch.row_weights", microbatch.row_weights.size()},
      {"microbatch.advantages", microbatch.advantages.size()},
      {"microbatch.old_logprobs", microbatch.old_logprobs.size()},
      {"microbatch.ref_logprobs", microbatch.ref_logprobs.size()}};
  for (const auto& [field, count] : counts) {
    if (count != 0 && count != rows) return WrongCount(field, count, rows);
  }
  if (microbatch.embedding != v1::EMBEDDING_ROWS && HiddenOf(microbatch).empty() &&
      CountValid(microbatch.targets, ignore_index) > 0) {
    return ArgumentError("microbatch.hidden", "null", "is null");
  }
  return absl::OkStatus();
}

absl::Status ValidateDepth(const std::string& field, const Depth& depth, const ComputeOptions& options) {
  if (!std::isfinite(depth.weight) || depth.weight < 0) {
    return ArgumentError(field + "weight", depth.weight,
                         absl::StrCat("is ", depth.weight, "; it must be finite and not negative"));
  }
  if (depth.normalizer.has_value()) {
    if (options.reduction != v1::REDUCTION_MEAN)
      return ArgumentError(field + "normalizer", *depth.normalizer,
                           absl::StrCat("is ", *depth.normalizer, "; it is for the mean only"));
    if (!std::isfinite(*depth.normalizer) || *depth.normalizer < 0) {
      return ArgumentError(field + "normalizer", *depth.normalizer,
                           absl::StrCat("is ", *depth.normalizer, "; it must be finite and not negative"));
    }
  } else if (options.reduction == v1::REDUCTION_MEAN && options.loss.use_class_weights()) {
    return ArgumentError(field + "normalizer", "nothing",
                         "is absent; with class weights a mean needs the sum of the weights of the targets");
  }
  return absl::OkStatus();
}

// Checks a buffer that depths may have (`of`): all depths that have rows must have it, or none. If they have
// it, the microbatch must not have one for all rows (`whole`).
absl::Status ValidatePieces(absl::string_view member, absl::string_view whole_field, const void* whole,
                            const std::vector<Depth>& depths,
                            const std::function<const void*(const Depth&)>& of) {
  const bool apart = std::any_of(depths.begin(), depths.end(), [&](const Depth& depth) { return of(depth); });
  if (!apart) return absl::OkStatus();
  if (whole != nullptr) {
    return ArgumentError(whole_field, "given",
                         absl::StrCat("is given, and so is ", member, " of microbatch.depths"));
  }
  for (size_t i = 0; i < depths.size(); ++i) {
    if (depths[i].rows == 0 || of(depths[i]) != nullptr) continue;
    return ArgumentError(absl::StrCat("microbatch.depths[", i, "].", member), "null",
                         "is null; other depths have one");
  }
  return absl::OkStatus();
}

absl::Status ValidateDepths(const Microbatch& microbatch, const LossOutputs& outputs,
                            const ComputeOptions& options) {
  const std::vector<Depth>& depths = microbatch.depths;
  if (depths.empty()) return absl::OkStatus();
  if (depths.size() > kMostDepths) {
    return ArgumentError("microbatch.depths", depths.size(),
                         absl::StrCat("has ", depths.size(), " entries; the most is ", kMostDepths));
  }
  if (options.reduction == v1::REDUCTION_NONE)
    return ArgumentError("microbatch.depths", depths.size(), "is given; it does not go with REDUCTION_NONE");
  if (options.normalizer.has_value()) {
    return ArgumentError("options.normalizer", *options.normalizer,
                         absl::StrCat("is ", *options.normalizer, "; depths have normalizers of their own"));
  }
  uint64_t left = microbatch.targets.size();
  for (size_t i = 0; i < depths.size(); ++i) {
    const std::string field = absl::StrCat("microbatch.depths[", i, "].");
    LOSSD_RETURN_IF_ERROR(ValidateDepth(field, depths[i], options));
    if (depths[i].rows > left) {
      return ArgumentError(field + "rows", depths[i].rows,
                           absl::StrCat("is ", depths[i].rows, ", and ", left, " rows are left"));
    }
    left -= depths[i].rows;
  }
  if (left > 0) {
    const uint64_t rows = microbatch.targets.size();
    return ArgumentError("microbatch.depths", rows - left,
                         absl::StrCat("have ", rows - left, " rows; targets has ", rows));
  }
  LOSSD_RETURN_IF_ERROR(ValidatePieces("hidden", "microbatch.hidden", microbatch.hidden, depths,
                                       [](const Depth& depth) { return depth.hidden; }));
  return ValidatePieces("grad_hidden", "outputs.grad_hidden", outputs.grad_hidden, depths,
                        [](const Depth& depth) { return depth.grad_hidden; });
}

// Checks the teacher's hidden states: a distillation needs them, and other losses must not have them.
absl::Status ValidateTeacher(const Microbatch& microbatch, const ComputeOptions& options) {
  const bool distilled = options.loss.has_distillation();
  if (!distilled && (microbatch.teacher_hidden != nullptr || microbatch.teacher_hidden_size > 0)) {
    return ArgumentError("microbatch.teacher_hidden", "given",
                         "is given; it goes with options.loss.distillation only");
  }
  if (!distilled) return absl::OkStatus();
  if (microbatch.teacher_hidden == nullptr && !HiddenOf(microbatch).empty()) {
    return ArgumentError("microbatch.teacher_hidden", "null",
                         "is not given; options.loss.distillation needs it");
  }
  const uint64_t rows = std::max<uint64_t>(microbatch.targets.size(), 1);
  if (microbatch.teacher_hidden_size == 0 ||
      microbatch.teacher_hidden_size > std::numeric_limits<int64_t>::max() / 4 / rows) {
    return ArgumentError(
        "microbatch.teacher_hidden_size", microbatch.teacher_hidden_size,
        absl::StrCat("is ", microbatch.teacher_hidden_size, "; it must be above 0, and fit ", rows, " rows"));
  }
  if (options.retain) {
    return ArgumentError("options.retain", "true", "is true; hidden states of a teacher are not retained");
  }
  return absl::OkStatus();
}

// Soft targets must come with loss.rest, and only with it. Their values are checked later (CheckRowValues).
absl::Status ValidateSoftTargets(const Microbatch& microbatch, const ComputeOptions& options) {
  const uint64_t count = microbatch.target_count, rows = microbatch.targets.size();
  const bool wanted = options.loss.rest() != v1::REST_UNSPECIFIED;
  if (wanted != (count > 0)) {
    return ArgumentError("microbatch.target_classes", count,
                         wanted ? "is not given; options.loss.rest needs it"
                                : "is given; it goes with options.loss.rest only");
  }
  const std::pair<absl::string_view, uint64_t> sizes[] = {
      {"microbatch.target_classes", microbatch.target_classes.size()},
      {"microbatch.target_weights", microbatch.target_weights.size()}};
  for (const auto& [field, size] : sizes) {
    if (size == count * rows) continue;
    return ArgumentError(field, size,
                         absl::StrCat("has ", size, " entries; with target_count ", count,
                                      " it must have as many for each of the ", rows, " rows"));
  }
  return absl::OkStatus();
}

absl::Status ValidateClasses(const Microbatch& microbatch, uint64_t class_count) {
  const uint64_t classes = microbatch.classes.size(), rows = microbatch.targets.size();
  if (classes == class_count || classes == class_count * rows) return absl::OkStatus();
  return ArgumentError("microbatch.classes", classes,
                       absl::StrCat("has ", classes, " entries; outputs.class_count is ", class_count,
                                    ", so it must have as many, or as many for each of the ", rows, " rows"));
}

absl::Status ValidateOutputs(const LossOutputs& outputs, uint64_t rows) {
  const auto check = [rows](const char* name, uint64_t size) {
    if (size == 0 || size == rows) return absl::OkStatus();
    return WrongCount(absl::StrCat("outputs.", name), size, rows);
  };
  absl::Status status = check("row_loss", outputs.row_loss.size());
  status.Update(check("row_lse", outputs.row_lse.size()));
  status.Update(check("row_entropy", outputs.row_entropy.size()));
  status.Update(check("row_logprob", outputs.row_logprob.size()));
  status.Update(check("row_argmax", outputs.row_argmax.size()));
  const auto check_classes = [rows](const char* name, uint64_t size, uint64_t each) {
    return size == rows * each ? absl::OkStatus()
                               : WrongCount(absl::StrCat("outputs.", name), size, rows * each);
  };
  status.Update(check_classes("class_logprobs", outputs.class_logprobs.size(), outputs.class_count));
  status.Update(check_classes("top_logprobs", outputs.top_logprobs.size(), outputs.top_k));
  status.Update(check_classes("top_classes", outputs.top_classes.size(), outputs.top_k));
  return status;
}

// Checks reduction, normalizer and grad_output. `divided`: the rows are divided into depths, which have their
// own normalizers.
absl::Status ValidateScale(const ComputeOptions& options, bool divided) {
  if (options.reduction != v1::REDUCTION_SUM && options.reduction != v1::REDUCTION_MEAN &&
      options.reduction != v1::REDUCTION_NONE) {
    return ArgumentError(
        "options.reduction", static_cast<int>(options.reduction),
        absl::StrCat("is ", static_cast<int>(options.reduction), ", neither sum nor mean nor none"));
  }
  if (options.normalizer.has_value()) {
    if (options.reduction != v1::REDUCTION_MEAN) {
      return ArgumentError("options.normalizer", *options.normalizer,
                           absl::StrCat("is ", *options.normalizer, "; it is for the mean only"));
    }
    if (!std::isfinite(*options.normalizer) || *options.normalizer < 0) {
      return ArgumentError("options.normalizer", *options.normalizer,
                           absl::StrCat("is ", *options.normalizer, "; it must be finite and not negative"));
    }
  } else if (!divided && options.reduction == v1::REDUCTION_MEAN && options.loss.use_class_weights()) {
    return ArgumentError("options.normalizer", "nothing",
                         "is absent; with class weights a mean needs the sum of the weights of the targets");
  }
  if (options.grad_output.has_value() && !std::isfinite(*options.grad_output)) {
    return ArgumentError("options.grad_output", *options.grad_output,
                         absl::StrCat("is ", *options.grad_output, "; it must be finite"));
  }
  return absl::OkStatus();
}

// Checks that only REDUCTION_NONE retains rows, and that it asks for no gradients, which come by Backward.
absl::Status ValidateDeferral(const LossOutputs& outputs, const ComputeOptions& options) {
  const bool none = options.reduction == v1::REDUCTION_NONE;
  if (options.retain && !none) {
    return ArgumentError("options.retain", "true", "is true; it goes with REDUCTION_NONE only");
  }
  if (none && options.accumulate_gradients) {
    return ArgumentError("options.accumulate_gradients", "true",
                         "is true; with REDUCTION_NONE gradients come by Backward");
  }
  if (none && outputs.grad_hidden != nullptr) {
    return ArgumentError("outputs.grad_hidden", "a buffer",
                         "is given; with REDUCTION_NONE gradients come by Backward");
  }
  return absl::OkStatus();
}

absl::Status ValidateTransport(const ComputeOptions& options) {
  if (options.streams < 0 || options.streams > kMaxStreams) {
    return ArgumentError("options.streams", options.streams,
                         absl::StrCat("is ", options.streams, "; it must be in [0, ", kMaxStreams, "]"));
  }
  if (options.slice_bytes == uint64_t{0})
    return ArgumentError("options.slice_bytes", 0, "is 0; it must be above 0");
  if (options.max_attempts < 0) {
    return ArgumentError("options.max_attempts", options.max_attempts,
                         absl::StrCat("is ", options.max_attempts));
  }
  if (options.timeout < absl::ZeroDuration()) {
    const std::string timeout = absl::FormatDuration(options.timeout);
    return ArgumentError("options.timeout", timeout, absl::StrCat("is ", timeout));
  }
  return absl::OkStatus();
}

// The first row of [row, end) that is valid, or `end`.
uint64_t NextValid(absl::Span<const int32_t> targets, int32_t ignore_index, uint64_t row, uint64_t end) {
  while (row < end && targets[row] == ignore_index) ++row;
  return row;
}

template <typename T>
void FillRows(absl::Span<T> values, Rows rows, T value) {
  if (!values.empty()) std::fill(values.begin() + rows.begin, values.begin() + rows.end, value);
}

// The range of results of `rows` in an array that has `each` results per row.
Rows Each(Rows rows, uint64_t each) { return {rows.begin * each, rows.end * each}; }

void FillIgnored(const LossOutputs& outputs, uint64_t row_bytes, Rows rows) {
  if (outputs.grad_hidden != nullptr) {
    std::memset(static_cast<char*>(outputs.grad_hidden) + rows.begin * row_bytes, 0, rows.size() * row_bytes);
  }
  FillRows(outputs.row_loss, rows, 0.0f);
  FillRows(outputs.row_lse, rows, 0.0f);
  FillRows(outputs.row_entropy, rows, 0.0f);
  FillRows(outputs.row_logprob, rows, 0.0f);
  FillRows(outputs.row_argmax, rows, int32_t{-1});
  FillRows(outputs.class_logprobs, Each(rows, outputs.class_count), 0.0f);
  FillRows(outputs.top_logprobs, Each(rows, outputs.top_k), 0.0f);
  FillRows(outputs.top_classes, Each(rows, outputs.top_k), int32_t{-1});
}

}  // namespace

// ---- The caller's memory ----

RowPieces::RowPieces(const void* all) {
  if (all != nullptr) pieces_.push_back({0, static_cast<const uint8_t*>(all)});
}

RowPieces RowPieces::HiddenOf(const std::vector<Depth>& depths) {
  RowPieces pieces;
  uint64_t row = 0;
  for (const Depth& depth : depths) {
    if (depth.hidden != nullptr && depth.rows > 0)
      pieces.pieces_.push_back({row, static_cast<const uint8_t*>(depth.hidden)});
    row += depth.rows;
  }
  return pieces;
}

RowPieces RowPieces::GradientsOf(const std::vector<Depth>& depths) {
  std::vector<Depth> gradients = depths;
  for (Depth& depth : gradients) depth.hidden = depth.grad_hidden;  // HiddenOf reads this member
  return HiddenOf(gradients);
}

const uint8_t* RowPieces::At(uint64_t row, uint64_t row_bytes) const {
  const auto next = std::upper_bound(pieces_.begin(), pieces_.end(), row,
                                     [](uint64_t r, const Piece& piece) { return r < piece.first_row; });
  const Piece& piece = *std::prev(next);
  return piece.at + (row - piece.first_row) * row_bytes;
}

std::vector<Rows> RowPieces::Cut(Rows rows) const {
  std::vector<Rows> cut;
  for (const Piece& piece : pieces_) {
    if (piece.first_row <= rows.begin || piece.first_row >= rows.end) continue;
    cut.push_back({rows.begin, piece.first_row});
    rows.begin = piece.first_row;
  }
  cut.push_back(rows);
  return cut;
}

std::vector<const void*> RowPieces::Addresses() const {
  std::vector<const void*> addresses;
  for (const Piece& piece : pieces_) addresses.push_back(piece.at);
  return addresses;
}

RowPieces HiddenOf(const Microbatch& microbatch) {
  return microbatch.hidden != nullptr ? RowPieces(microbatch.hidden) : RowPieces::HiddenOf(microbatch.depths);
}

RowPieces GradientsOf(const Microbatch& microbatch, const LossOutputs& outputs) {
  return outputs.grad_hidden != nullptr ? RowPieces(outputs.grad_hidden)
                                        : RowPieces::GradientsOf(microbatch.depths);
}

int32_t IgnoreIndex(const v1::LossOptions& options) {
  return options.has_ignore_index() ? options.ignore_index() : kDefaultIgnoreIndex;
}

absl::Status ValidateCall(const Microbatch& microbatch, const LossOutputs& outputs,
                          const ComputeOptions& options) {
  absl::Status status = ValidateMicrobatch(microbatch, IgnoreIndex(options.loss));
  status.Update(ValidateEmbedding(microbatch, outputs, options));
  status.Update(ValidateDepths(microbatch, outputs, options));
  status.Update(ValidateTeacher(microbatch, options));
  status.Update(ValidateOutputs(outputs, microbatch.targets.size()));
  status.Update(ValidateClasses(microbatch, outputs.class_count));
  status.Update(ValidateSoftTargets(microbatch, options));
  status.Update(ValidateScale(options, !microbatch.depths.empty()));
  status.Update(ValidateDeferral(outputs, options));
  status.Update(ValidateTransport(options));
  if (options.accumulate_gradients && !microbatch.step.has_value()) {
    status.Update(ArgumentError("microbatch.step", "nothing", "is absent; accumulate_gradients needs it"));
  }
  return status;
}

absl::Status ValidateBackward(const RetainedGradients& gradients, const BackwardOptions& options) {
  const uint64_t rows = gradients.grad_loss.size();
  absl::Status status =
      ValidateShape("gradients", gradients.head, rows, gradients.hidden_size, gradients.hidden_dtype);
  if (rows == 0) status.Update(ArgumentError("gradients.grad_loss", "nothing", "is empty"));
  const auto check = [rows](const char* name, uint64_t size) {
    if (size == 0 || size == rows) return absl::OkStatus();
    return WrongCount(absl::StrCat("gradients.", name), size, rows);
  };
  status.Update(check("grad_lse", gradients.grad_lse.size()));
  status.Update(check("grad_entropy", gradients.grad_entropy.size()));
  if (options.accumulate_gradients && !gradients.step.has_value()) {
    status.Update(ArgumentError("gradients.step", "nothing", "is absent; accumulate_gradients needs it"));
  }
  return status;
}

bool TargetsCount(const ComputeOptions& options) {
  return !options.loss.has_distillation() || options.loss.distillation().target_weight() != 0;
}

namespace {

absl::Status CheckTargets(const Microbatch& microbatch, const ComputeOptions& options, int64_t vocab_size,
                          const std::vector<int32_t>* classes) {
  const int32_t ignored = IgnoreIndex(options.loss);
  const bool listed = classes != nullptr && options.loss.refuse_unlisted() && TargetsCount(options);
  const std::string also = microbatch.embedding != v1::EMBEDDING_UNSPECIFIED
                               ? ""
                               : absl::StrCat(" or ignore_index (", ignored, ")");
  for (size_t i = 0; i < microbatch.targets.size(); ++i) {
    const int32_t target = microbatch.targets[i];
    if (target == ignored) continue;
    LOSSD_RETURN_IF_ERROR(errors::CheckClass("open.targets", i, target, vocab_size, also));
    if (listed && !std::binary_search(classes->begin(), classes->end(), target)) {
      return errors::FieldError(absl::StrCat("open.targets[", i, "]"),
                                "be in the head's class_list with open.options.refuse_unlisted", target);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNamedClasses(absl::Span<const int32_t> named, int64_t vocab_size,
                               const std::vector<int32_t>* classes) {
  for (size_t i = 0; i < named.size(); ++i) {
    LOSSD_RETURN_IF_ERROR(errors::CheckClass("open.classes", i, named[i], vocab_size));
    if (classes == nullptr || std::binary_search(classes->begin(), classes->end(), named[i])) continue;
    return errors::FieldError(absl::StrCat("open.classes[", i, "]"), "be in the head's class_list", named[i]);
  }
  return absl::OkStatus();
}

errors::WeightSum SumOf(v1::Rest rest) {
  return rest == v1::REST_ONE_CLASS      ? errors::WeightSum::kAtMostOne
         : rest == v1::REST_RENORMALIZED ? errors::WeightSum::kAboveZero
                                         : errors::WeightSum::kAny;
}

}  // namespace

absl::Status CheckRowValues(const Microbatch& microbatch, const ComputeOptions& options, int64_t vocab_size,
                            const std::vector<int32_t>* classes) {
  LOSSD_RETURN_IF_ERROR(errors::CheckFinite("open.row_weights", microbatch.row_weights));
  LOSSD_RETURN_IF_ERROR(errors::CheckFinite("open.advantages", microbatch.advantages));
  LOSSD_RETURN_IF_ERROR(errors::CheckFinite("open.old_logprobs", microbatch.old_logprobs));
  LOSSD_RETURN_IF_ERROR(errors::CheckFinite("open.ref_logprobs", microbatch.ref_logprobs));
  LOSSD_RETURN_IF_ERROR(CheckNamedClasses(microbatch.classes, vocab_size, classes));
  LOSSD_RETURN_IF_ERROR(errors::CheckSoftTargets(
      "open.", SumOf(options.loss.rest()), vocab_size, microbatch.target_count, microbatch.target_classes,
      microbatch.target_weights, microbatch.targets, IgnoreIndex(options.loss)));
  return CheckTargets(microbatch, options, vocab_size, classes);
}

absl::Status CheckRowValues(const RetainedGradients& gradients) {
  LOSSD_RETURN_IF_ERROR(errors::CheckFinite("backward.grad_loss", gradients.grad_loss));
  LOSSD_RETURN_IF_ERROR(errors::CheckFinite("backward.grad_lse", gradients.grad_lse));
  return errors::CheckFinite("backward.grad_entropy", gradients.grad_entropy);
}

// ---- Streams and slices ----

uint64_t CountValid(absl::Span<const int32_t> targets, int32_t ignore_index) {
  return targets.size() - std::count(targets.begin(), targets.end(), ignore_index);
}

std::vector<Rows> SplitRanges(absl::Span<const int32_t> targets, int32_t ignore_index, int streams,
                              uint64_t max_rows) {
  const uint64_t total = CountValid(targets, ignore_index);
  const uint64_t wanted = std::clamp<uint64_t>(total / kMinRowsPerStream, 1, std::max<uint64_t>(1, streams));
  std::vector<Rows> ranges;
  uint64_t begin = 0;
  uint64_t valid = 0;  // valid rows in [0, row]
  uint64_t share = 1;  // the number, out of `wanted`, of the range that is being filled
  for (uint64_t row = 0; row < targets.size(); ++row) {
    valid += targets[row] != ignore_index;
    const bool enough = share < wanted && valid >= total * share / wanted;
    share += enough;
    if ((enough || row + 1 - begin == max_rows) && row + 1 < targets.size()) {
      ranges.push_back({begin, row + 1});
      begin = row + 1;
    }
  }
  ranges.push_back({begin, targets.size()});
  return ranges;
}

std::vector<Rows> DivideIntoSlices(absl::Span<const int32_t> targets, int32_t ignore_index, Rows range,
                                   const SliceRule& rule) {
  // Each slice begins and ends with a valid row. It may have ignored rows in between, but no long run of
  // them. With a grid it ends at the next multiple of row_grid at the latest.
  const uint64_t longest_gap = std::max<uint64_t>(1, rule.max_rows / 8);  // ignored rows within a slice
  std::vector<Rows> slices;
  uint64_t row = NextValid(targets, ignore_index, range.begin, range.end);
  while (row < range.end) {
    const uint64_t on_grid = rule.row_grid == 0 ? rule.max_rows : rule.row_grid - row % rule.row_grid;
    const uint64_t last = row + std::min({rule.max_rows, on_grid, range.end - row});
    Rows slice{row, row + 1};
    for (uint64_t next = row + 1; next < last && next - slice.end <= longest_gap; ++next) {
      if (targets[next] != ignore_index) slice.end = next + 1;
    }
    slices.push_back(slice);
    row = NextValid(targets, ignore_index, slice.end, range.end);
  }
  return slices;
}

std::vector<Rows> RowsOfDepths(const std::vector<Depth>& depths) {
  std::vector<Rows> rows;
  for (const Depth& depth : depths) {
    const uint64_t begin = rows.empty() ? 0 : rows.back().end;
    rows.push_back({begin, begin + depth.rows});
  }
  return rows;
}

std::vector<Rows> DivideIntoSlices(absl::Span<const int32_t> targets, int32_t ignore_index, Rows range,
                                   const SliceRule& rule, const std::vector<Depth>& depths) {
  if (depths.empty()) return DivideIntoSlices(targets, ignore_index, range, rule);
  std::vector<Rows> slices;
  for (const Rows& depth : RowsOfDepths(depths)) {
    const Rows part{std::max(depth.begin, range.begin), std::min(depth.end, range.end)};
    if (part.begin >= part.end) continue;
    const std::vector<Rows> of_depth = DivideIntoSlices(targets, ignore_index, part, rule);
    slices.insert(slices.end(), of_depth.begin(), of_depth.end());
  }
  return slices;
}

absl::StatusOr<SliceRule> MakeSliceRule(uint64_t row_bytes, std::optional<uint64_t> slice_bytes,
                                        const v1::SliceLimits& limits) {
  uint64_t rows = std::max<uint64_t>(1, slice_bytes.value_or(kMessageBytes) / row_bytes);
  uint64_t in_region = slice_bytes.has_value() ? 0 : limits.max_bytes_in_region() / row_bytes;
  if (limits.max_bytes() > 0) {
    if (row_bytes > limits.max_bytes()) {
      return errors::WithViolation(
          absl::InvalidArgumentError(absl::StrCat(
              "microbatch.hidden_size: a row has ", errors::ExactBytes(row_bytes),
              ", but the server takes slices of ", errors::ExactBytes(limits.max_bytes()), " at most")),
          {"microbatch.hidden_size", "must let a row fit into a slice",
           absl::StrCat("a row of ", errors::ExactBytes(row_bytes))});
    }
    rows = std::min<uint64_t>(rows, limits.max_bytes() / row_bytes);
  }
  if (limits.max_rows() > 0) {
    rows = std::min<uint64_t>(rows, limits.max_rows());
    in_region = std::min<uint64_t>(in_region, limits.max_rows());
  }
  return SliceRule{rows, limits.row_grid(), in_region};
}

// ---- Slices in a region ----

uint64_t ShareOfRegion(uint64_t region_bytes) { return region_bytes / kCallsPerRegion; }

uint64_t WantedRegion(uint64_t call_bytes, const RegionSizes& sizes) {
  // Room for kCallsPerRegion calls of this size, rounded up to a power of two.
  const uint64_t wanted = std::bit_ceil(kCallsPerRegion * std::min(call_bytes, sizes.most));
  return std::clamp(wanted, sizes.least, sizes.most);
}

int StreamsInRegion(uint64_t bytes, unsigned cores) {
  const uint64_t most = std::min<uint64_t>(kMaxStreamsInRegion, cores / 2);
  return static_cast<int>(std::clamp<uint64_t>(bytes / kHostStreamBytes, 1, std::max<uint64_t>(1, most)));
}

uint64_t WantedRows(uint64_t region_bytes, bool of_gpu, uint64_t row_bytes) {
  const uint64_t share = ShareOfRegion(region_bytes);
  // A copy within a GPU is fast, so slices need not be small to overlap copies with work of the server.
  return (of_gpu ? share : std::min(kHostSliceBytes, share)) / row_bytes;
}

SliceRule InRegion(const SliceRule& rule, uint64_t rows, uint64_t wanted) {
  // The largest slice; then all slices get about the same size.
  const uint64_t most = std::max(rule.max_rows, std::min(rule.max_rows_in_region, wanted));
  const uint64_t parts = (rows + most - 1) / most;
  return {.max_rows = parts <= 1 ? most : (rows + parts - 1) / parts, .row_grid = rule.row_grid};
}

std::vector<Rows> CutForMessages(Rows slice, const SliceRule& rule) {
  std::vector<Rows> parts;
  for (uint64_t row = slice.begin; row < slice.end; row = parts.back().end) {
    const uint64_t on_grid = rule.row_grid == 0 ? rule.max_rows : rule.row_grid - row % rule.row_grid;
    parts.push_back({row, std::min({slice.end, row + rule.max_rows, row + on_grid})});
  }
  return parts;
}

// ---- Rows in no slice ----

std::vector<Rows> UnsentRows(Rows range, absl::Span<const Rows> slices) {
  std::vector<Rows> unsent;
  uint64_t done = range.begin;
  const auto add = [&](uint64_t end) {
    if (end > done) unsent.push_back({done, end});
  };
  for (const Rows& slice : slices) {
    add(slice.begin);
    done = slice.end;
  }
  add(range.end);
  return unsent;
}

void FillUnsentRows(const LossOutputs& outputs, uint64_t row_bytes, Rows range,
                    absl::Span<const Rows> slices) {
  for (const Rows& rows : UnsentRows(range, slices)) FillIgnored(outputs, row_bytes, rows);
}

// ---- AnswerTracker ----

namespace {

absl::Status ServerSentRows(Rows rows, absl::string_view what) {
  return ServerSent("results of rows [", rows.begin, ", ", rows.end, ")", what);
}

}  // namespace

AnswerTracker AnswerTracker::Exactly(const std::vector<Rows>& slices) {
  AnswerTracker tracker;
  for (const Rows& slice : slices) tracker.open_[slice.begin] = slice.end;
  return tracker;
}

AnswerTracker AnswerTracker::Within(Rows range) {
  AnswerTracker tracker;
  tracker.exactly_ = false;
  tracker.range_ = range;
  return tracker;
}

void AnswerTracker::Replace(Rows whole, const std::vector<Rows>& parts) {
  open_.erase(whole.begin);
  for (const Rows& part : parts) open_[part.begin] = part.end;
}

absl::Status AnswerTracker::Take(const v1::RowRange& range) {
  const Rows rows{range.begin(), range.end()};
  LOSSD_RETURN_IF_ERROR(exactly_ ? TakeExactly(rows) : TakeWithin(rows));
  answered_[rows.begin] = rows.end;
  answered_rows_ += rows.size();
  return absl::OkStatus();
}

absl::Status AnswerTracker::TakeExactly(Rows rows) {
  const auto done = answered_.find(rows.begin);
  if (done != answered_.end() && done->second == rows.end) return ServerSentRows(rows, " twice");
  const auto it = open_.find(rows.begin);
  if (it == open_.end() || it->second != rows.end)
    return ServerSentRows(rows, ", which are no slice of this call");
  open_.erase(it);
  return absl::OkStatus();
}

absl::Status AnswerTracker::TakeWithin(Rows rows) {
  if (rows.begin >= rows.end || rows.begin < range_.begin || rows.end > range_.end) {
    return ServerSentRows(rows, ", which are not in this call");
  }
  const auto next = answered_.lower_bound(rows.begin);
  const bool overlaps_next = next != answered_.end() && next->first < rows.end;
  const bool overlaps_previous = next != answered_.begin() && std::prev(next)->second > rows.begin;
  if (overlaps_next || overlaps_previous) return ServerSentRows(rows, " twice");
  return absl::OkStatus();
}

}  // namespace lossd::client::internal
