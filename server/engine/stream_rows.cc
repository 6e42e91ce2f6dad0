// SPDX-License-Identifier: Apache-2.0
#include "server/engine/stream_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/bytes.h"
#include "kernels/errors/field_error.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

absl::Status CheckRanges(const StreamSpec& spec) {
  if (spec.microbatch_rows < 0 || spec.microbatch_rows > kMaxRows) {
    return InvalidField("open.microbatch_rows", "must be in [0, 2^31 - 1]",
                        absl::StrCat(spec.microbatch_rows));
  }
  if (!spec.rows.IsWithin({0, spec.microbatch_rows})) {
    return InvalidField("open.rows", absl::StrCat("must lie in [0, ", spec.microbatch_rows, ")"),
                        Text(spec.rows));
  }
  const int64_t rows = spec.rows.size();
  if (static_cast<int64_t>(spec.targets.size()) != rows) {
    return InvalidField("open.targets", absl::StrCat("must have one entry for each of the ", rows, " rows"),
                        absl::StrCat(spec.targets.size()));
  }
  return CheckRowValues("open.row_weights", spec.row_weights, rows, /*optional=*/true);
}

absl::Status CheckNumbers(const StreamSpec& spec) {
  if (spec.reduction == Reduction::kNone && (spec.want_grad_hidden || spec.accumulate_gradients)) {
    return InvalidField(
        "open.reduction",
        "must be sum or mean with want_grad_hidden or accumulate_gradients (with none, gradients "
        "come by Backward)",
        "none");
  }
  if (spec.retain && spec.reduction != Reduction::kNone) {
    return InvalidField("open.retain", "goes with REDUCTION_NONE only", "true");
  }
  if (!std::isfinite(spec.grad_output)) {
    return InvalidField("open.grad_output", "must be finite", absl::StrCat(spec.grad_output));
  }
  if (spec.normalizer.has_value() && spec.reduction != Reduction::kMean) {
    return InvalidField("open.normalizer", "goes with REDUCTION_MEAN only", absl::StrCat(*spec.normalizer));
  }
  if (spec.normalizer.has_value() && !(std::isfinite(*spec.normalizer) && *spec.normalizer >= 0)) {
    return InvalidField("open.normalizer", "must be finite and positive", absl::StrCat(*spec.normalizer));
  }
  if (absl::Status status = kernels::Validate(spec.options); !status.ok()) {
    return errors::Within("open.options.", std::move(status));
  }
  return absl::OkStatus();
}

// Fills in what the spec leaves to the head.
void ResolveOptions(const kernels::HeadConfig& config, StreamSpec& spec) {
  if (spec.gradients_of_head) spec.options.gradients = config.gradients;
}

absl::Status CheckHead(const StreamSpec& spec, const kernels::HeadConfig& config) {
  if (spec.options.use_class_weights && !config.has_class_weights) {
    return InvalidField("open.options.use_class_weights", "needs a head with class weights", "true");
  }
  if (!spec.accumulate_gradients) return absl::OkStatus();
  if (!config.trainable) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.accumulate_gradients",
                      "needs a head that is not frozen", "true");
  }
  if (!spec.step.has_value()) {
    return InvalidField("open.step", "is required with accumulate_gradients", "nothing");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRowValues(absl::string_view field, absl::Span<const float> values, int64_t rows,
                            bool optional) {
  if (values.empty() && optional) return absl::OkStatus();
  if (static_cast<int64_t>(values.size()) != rows) {
    return InvalidField(field,
                        absl::StrCat(optional ? "must be empty or have" : "must have",
                                     " one entry for each of the ", rows, " rows"),
                        absl::StrCat(values.size()));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return InvalidField(absl::StrCat(field, "[", i, "]"), "must be finite", absl::StrCat(values[i]));
    }
  }
  return absl::OkStatus();
}

StreamRows::StreamRows(StreamSpec spec, HeadState state, SliceLimits limits)
    : spec_(std::move(spec)), head_state_(state), limits_(limits) {}

absl::StatusOr<StreamRows> StreamRows::Create(StreamSpec spec, const kernels::HeadConfig& config,
                                              HeadState state, SliceLimits limits) {
  ResolveOptions(config, spec);
  if (auto status = CheckRanges(spec); !status.ok()) return status;
  if (auto status = CheckNumbers(spec); !status.ok()) return status;
  if (auto status = CheckHead(spec, config); !status.ok()) return status;

  StreamRows rows(std::move(spec), state, limits);
  rows.hidden_size_ = config.hidden_size;
  if (auto status = rows.MapTargets(config.vocab_size); !status.ok()) return status;
  if (auto status = rows.ResolveNormalizer(); !status.ok()) return status;
  return rows;
}

absl::Status StreamRows::MapTargets(int64_t vocab_size) {
  for (size_t i = 0; i < spec_.targets.size(); ++i) {
    int32_t& target = spec_.targets[i];
    if (target == spec_.ignore_index) {
      target = kernels::kIgnoredTarget;
    } else if (target < 0 || target >= vocab_size) {
      return InvalidField(
          absl::StrCat("open.targets[", i, "]"),
          absl::StrCat("must be in [0, ", vocab_size, ") or ignore_index (", spec_.ignore_index, ")"),
          absl::StrCat(target));
    } else {
      ++valid_rows_;
    }
  }
  return absl::OkStatus();
}

absl::Status StreamRows::ResolveNormalizer() {
  double normalizer = 1.0;
  if (spec_.reduction == Reduction::kMean) {
    if (spec_.normalizer.has_value()) {
      normalizer = *spec_.normalizer;
    } else if (spec_.rows == RowRange{0, spec_.microbatch_rows} && !spec_.options.use_class_weights) {
      normalizer = static_cast<double>(valid_rows_);
    } else {
      return InvalidField(
          "open.normalizer",
          "is required with REDUCTION_MEAN unless one call carries the whole microbatch without "
          "class weights",
          "nothing");
    }
    if (normalizer == 0 && valid_rows_ > 0) {
      return InvalidField("open.normalizer",
                          absl::StrCat("must be positive with ", valid_rows_, " valid rows"), "0");
    }
  }
  grad_scale_ = normalizer == 0 ? 0.0f : static_cast<float>(double{spec_.grad_output} / normalizer);
  if (!std::isfinite(grad_scale_)) {
    return InvalidField("open.normalizer", "makes grad_output / normalizer overflow",
                        absl::StrCat(normalizer));
  }
  terms_ = {.microbatch_rows = spec_.microbatch_rows,
            .options = spec_.options,
            .hidden_dtype = spec_.hidden_dtype,
            .reduction = spec_.reduction,
            .normalizer = normalizer,
            .grad_output = spec_.grad_output,
            .want_grad_hidden = limits_.has_grid() && spec_.want_grad_hidden,
            .want_row_entropy = limits_.has_grid() && spec_.want_rows.entropy};
  return absl::OkStatus();
}

void StreamRows::SetRetained(std::vector<RetainedRows> retained, RowGradients gradients) {
  retained_ = std::move(retained);
  gradients_ = std::move(gradients);
  is_backward_ = !gradients_.loss.empty();
}

const float* StreamRows::At(const std::vector<float>& values, RowRange rows) const {
  return values.empty() ? nullptr : values.data() + (rows.begin - spec_.rows.begin);
}

Binding StreamRows::binding() const {
  Binding binding{.step = spec_.step, .weights = head_state_.weights_version};
  if (spec_.accumulate_gradients || spec_.retain || is_backward())
    binding.generation = head_state_.generation;
  return binding;
}

const float* StreamRows::row_weights(RowRange rows) const { return At(spec_.row_weights, rows); }

int64_t StreamRows::RowBytes(int64_t rows) const {
  return rows * hidden_size_ * static_cast<int64_t>(kernels::SizeOf(spec_.hidden_dtype));
}

int64_t StreamRows::RetainedOffset(RowRange rows) const {
  for (const RetainedRows& piece : retained_) {
    if (piece.rows.begin <= rows.begin && rows.end <= piece.rows.end) {
      return piece.block->offset() + RowBytes(rows.begin - piece.rows.begin);
    }
  }
  return -1;
}

int64_t StreamRows::HostBytes() const {
  constexpr int64_t kOverhead = 1024;  // of the stream itself
  const size_t floats =
      spec_.row_weights.size() + gradients_.loss.size() + gradients_.lse.size() + gradients_.entropy.size();
  constexpr size_t kTargetAndFlag = sizeof(int32_t) + sizeof(uint8_t);
  return kOverhead + static_cast<int64_t>(spec_.targets.size() * kTargetAndFlag + floats * sizeof(float));
}

RowValues StreamRows::TakeValues() {
  return {.targets = std::move(spec_.targets),
          .row_weights = std::move(spec_.row_weights),
          .grad_loss = std::move(gradients_.loss),
          .grad_lse = std::move(gradients_.lse),
          .grad_entropy = std::move(gradients_.entropy)};
}

DeferredMicrobatches::Part StreamRows::TakePart() {
  return {.retained = std::move(retained_.front()),
          .targets = std::move(spec_.targets),
          .row_weights = std::move(spec_.row_weights),
          .identity = spec_.identity,
          .run = spec_.run};
}

std::vector<RowRange> StreamRows::RetainedSlices() const {
  const int64_t most = std::max<int64_t>(1, std::min(limits_.max_rows, limits_.max_bytes / RowBytes(1)));
  std::vector<RowRange> slices;
  for (const RetainedRows& piece : retained_) {
    const int64_t end = std::min(piece.rows.end, spec_.rows.end);
    for (int64_t row = std::max(piece.rows.begin, spec_.rows.begin); row < end; row = slices.back().end) {
      slices.push_back({row, std::min({end, row + most, limits_.NextGridRow(row)})});
    }
  }
  return slices;
}

absl::Status StreamRows::CheckSlice(RowRange rows, int64_t bytes, bool in_place) const {
  const int64_t most = in_place ? limits_.max_bytes_in_place : limits_.max_bytes;
  if (bytes > most) {
    return InvalidField(in_place ? "slice.in_region" : "payload",
                        absl::StrCat("must have at most ", errors::ExactBytes(most)), absl::StrCat(bytes));
  }
  if (rows.begin >= rows.end || !rows.IsWithin(spec_.rows)) {
    return InvalidField("slice.rows", absl::StrCat("must be a non-empty range in ", Text(spec_.rows)),
                        Text(rows));
  }
  if (rows.size() > limits_.max_rows) {
    return InvalidField("slice.rows", absl::StrCat("must have at most ", limits_.max_rows, " rows"),
                        Text(rows));
  }
  if (bytes != RowBytes(rows.size())) {
    return InvalidField(
        "payload",
        absl::StrCat("must have ", errors::ExactBytes(RowBytes(rows.size())), " for rows ", Text(rows),
                     " of ", hidden_size_, " ", kernels::Name(spec_.hidden_dtype), " values"),
        absl::StrCat(bytes));
  }
  return absl::OkStatus();
}

}  // namespace lossd::engine
