#include "server/engine/stream_state.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

bool Inside(RowRange inner, int64_t begin, int64_t end) {
  return inner.begin >= begin && inner.begin <= inner.end && inner.end <= end;
}

absl::Status CheckRanges(const StreamSpec& spec) {
  if (spec.microbatch_rows < 0 || spec.microbatch_rows > kMaxRows) {
    return InvalidField("open.microbatch_rows", "must be in [0, 2^31 - 1]",
                        absl::StrCat(spec.microbatch_rows));
  }
  if (!Inside(spec.rows, 0, spec.microbatch_rows)) {
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
    return absl::InvalidArgumentError(absl::StrCat("open.options.", status.message()));
  }
  return absl::OkStatus();
}

// Fills in what the spec leaves to the head.
void ResolveOptions(const kernels::HeadConfig& config, StreamSpec& spec) {
  kernels::LossOptions& options = spec.options;
  if (spec.algorithm_of_head) options.algorithm = config.algorithm;
  if (spec.epsilon_of_algorithm) options.filter_epsilon = kernels::DefaultFilterEpsilon(options.algorithm);
}

absl::Status CheckHead(const StreamSpec& spec, const kernels::HeadConfig& config) {
  const kernels::Algorithm algorithm = spec.options.algorithm;
  if (config.algorithm == kernels::Algorithm::kCut && algorithm != kernels::Algorithm::kCut) {
    return InvalidField(
        "open.options.algorithm",
        "must be cut or unspecified: the head was created for cut and has no memory for logits",
        kernels::Name(algorithm));
  }
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

StreamState::StreamState(StreamSpec spec, HeadState state, SliceLimits limits,
                         std::shared_ptr<StreamObserver> observer)
    : spec_(std::move(spec)), head_state_(state), limits_(limits), observer_(std::move(observer)) {}

absl::StatusOr<std::shared_ptr<StreamState>> StreamState::Create(StreamSpec spec,
                                                                 const kernels::HeadConfig& config,
                                                                 HeadState state, SliceLimits limits,
                                                                 std::shared_ptr<StreamObserver> observer) {
  ResolveOptions(config, spec);
  if (auto status = CheckRanges(spec); !status.ok()) return status;
  if (auto status = CheckNumbers(spec); !status.ok()) return status;
  if (auto status = CheckHead(spec, config); !status.ok()) return status;
  if (spec.step.has_value() && *spec.step != state.step)
    return StepNotOpen("open.step", *spec.step, state.step);

  auto stream = absl::WrapUnique(new StreamState(std::move(spec), state, limits, std::move(observer)));
  stream->hidden_size_ = config.hidden_size;
  if (auto status = stream->MapTargets(config.vocab_size); !status.ok()) return status;
  if (auto status = stream->ResolveNormalizer(); !status.ok()) return status;
  stream->summary_.state = state;
  return std::shared_ptr<StreamState>(std::move(stream));
}

absl::Status StreamState::MapTargets(int64_t vocab_size) {
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
      ++summary_.valid_rows;
    }
  }
  sent_.resize(spec_.targets.size(), 0);
  unsent_rows_ = static_cast<int64_t>(spec_.targets.size());
  unsent_valid_rows_ = summary_.valid_rows;
  return absl::OkStatus();
}

absl::Status StreamState::ResolveNormalizer() {
  double normalizer = 1.0;
  if (spec_.reduction == Reduction::kMean) {
    if (spec_.normalizer.has_value()) {
      normalizer = *spec_.normalizer;
    } else if (spec_.rows == RowRange{0, spec_.microbatch_rows} && !spec_.options.use_class_weights) {
      normalizer = static_cast<double>(summary_.valid_rows);
    } else {
      return InvalidField(
          "open.normalizer",
          "is required with REDUCTION_MEAN unless one call carries the whole microbatch without "
          "class weights",
          "nothing");
    }
    if (normalizer == 0 && summary_.valid_rows > 0) {
      return InvalidField("open.normalizer",
                          absl::StrCat("must be positive with ", summary_.valid_rows, " valid rows"), "0");
    }
  }
  grad_scale_ = normalizer == 0 ? 0.0f : static_cast<float>(double{spec_.grad_output} / normalizer);
  if (!std::isfinite(grad_scale_)) {
    return InvalidField("open.normalizer", "makes grad_output / normalizer overflow",
                        absl::StrCat(normalizer));
  }
  summary_.normalizer = normalizer;
  terms_ = {.microbatch_rows = spec_.microbatch_rows,
            .options = spec_.options,
            .hidden_dtype = spec_.hidden_dtype,
            .reduction = spec_.reduction,
            .normalizer = normalizer,
            .grad_output = spec_.grad_output,
            .want_grad_hidden = in_order() && spec_.want_grad_hidden,
            .want_row_entropy = in_order() && spec_.want_rows.entropy};
  return absl::OkStatus();
}

void StreamState::SetRetained(std::vector<RetainedRows> retained, RowGradients gradients) {
  retained_ = std::move(retained);
  gradients_ = std::move(gradients);
}

const float* StreamState::At(const std::vector<float>& values, RowRange rows) const {
  return values.empty() ? nullptr : values.data() + (rows.begin - spec_.rows.begin);
}

const float* StreamState::row_weights(RowRange rows) const { return At(spec_.row_weights, rows); }

int64_t StreamState::RowBytes(int64_t rows) const {
  return rows * hidden_size_ * static_cast<int64_t>(kernels::SizeOf(spec_.hidden_dtype));
}

int64_t StreamState::RetainedOffset(RowRange rows) const {
  for (const RetainedRows& piece : retained_) {
    if (piece.rows.begin <= rows.begin && rows.end <= piece.rows.end) {
      return piece.block->offset() + RowBytes(rows.begin - piece.rows.begin);
    }
  }
  return -1;
}

DeferredMicrobatches::Part StreamState::TakePart() {
  return {.retained = std::move(retained_.front()),
          .targets = std::move(spec_.targets),
          .row_weights = std::move(spec_.row_weights)};
}

std::vector<RowRange> StreamState::RetainedSlices() const {
  const int64_t most = std::max<int64_t>(1, std::min(limits_.max_rows, limits_.max_bytes / RowBytes(1)));
  std::vector<RowRange> slices;
  for (const RetainedRows& piece : retained_) {
    const int64_t end = std::min(piece.rows.end, spec_.rows.end);
    for (int64_t row = std::max(piece.rows.begin, spec_.rows.begin); row < end; row = slices.back().end) {
      const int64_t grid_end = in_order() ? (row / limits_.row_grid + 1) * limits_.row_grid : end;
      slices.push_back({row, std::min({end, row + most, grid_end})});
    }
  }
  return slices;
}

absl::Status StreamState::CheckSlice(RowRange rows, int64_t bytes) const {
  if (half_closed_) return InvalidField("slice.rows", "came after the half-close", Text(rows));
  if (rows.begin >= rows.end || !Inside(rows, spec_.rows.begin, spec_.rows.end)) {
    return InvalidField("slice.rows", absl::StrCat("must be a non-empty range in ", Text(spec_.rows)),
                        Text(rows));
  }
  if (rows.size() > limits_.max_rows) {
    return InvalidField("slice.rows", absl::StrCat("must have at most ", limits_.max_rows, " rows"),
                        Text(rows));
  }
  if (bytes != RowBytes(rows.size())) {
    return InvalidField("payload",
                        absl::StrCat("must have ", RowBytes(rows.size()), " bytes for rows ", Text(rows),
                                     " of ", hidden_size_, " ", kernels::Name(spec_.hidden_dtype), " values"),
                        absl::StrCat(bytes));
  }
  const size_t first = static_cast<size_t>(rows.begin - spec_.rows.begin);
  for (size_t i = 0; i < static_cast<size_t>(rows.size()); ++i) {
    if (sent_[first + i]) {
      return InvalidField("slice.rows", absl::StrCat("repeats row ", rows.begin + static_cast<int64_t>(i)),
                          Text(rows));
    }
  }
  return in_order() ? CheckOrder(rows) : absl::OkStatus();
}

absl::Status StreamState::CheckOrder(RowRange rows) const {
  if (rows.begin < sent_end_) {
    return InvalidField(
        "slice.rows",
        absl::StrCat("must come in ascending order on a deterministic server, after row ", sent_end_ - 1),
        Text(rows));
  }
  if (rows.begin / limits_.row_grid != (rows.end - 1) / limits_.row_grid) {
    return InvalidField("slice.rows",
                        absl::StrCat("must not hold rows on both sides of a multiple of ", limits_.row_grid,
                                     " (SliceLimits.row_grid)"),
                        Text(rows));
  }
  return absl::OkStatus();
}

absl::Status StreamState::AddSlice(RowRange rows, int64_t bytes) {
  if (absl::Status status = CheckSlice(rows, bytes); !status.ok()) return status;
  const size_t first = static_cast<size_t>(rows.begin - spec_.rows.begin);
  for (size_t i = 0; i < static_cast<size_t>(rows.size()); ++i) {
    sent_[first + i] = 1;
    if (spec_.targets[first + i] != kernels::kIgnoredTarget) --unsent_valid_rows_;
  }
  unsent_rows_ -= rows.size();
  sent_end_ = rows.end;
  ++outstanding_;
  return absl::OkStatus();
}

void StreamState::FinishSlice(const kernels::SliceSums& sums, int64_t accumulated, int64_t repeated,
                              double queue_seconds, double compute_seconds) {
  summary_.loss_sum += sums.loss;
  summary_.z_loss_sum += sums.z_loss;
  summary_.entropy_sum += sums.entropy;
  summary_.dropped_mass += sums.dropped_mass;
  summary_.correct_rows += sums.correct_rows;
  summary_.accumulated_rows += accumulated;
  summary_.repeated_rows += repeated;
  summary_.queue_seconds += queue_seconds;
  summary_.compute_seconds += compute_seconds;
}

absl::Status StreamState::HalfClose() {
  half_closed_ = true;
  if (unsent_valid_rows_ == 0) return absl::OkStatus();
  for (size_t i = 0; i < sent_.size(); ++i) {
    if (!sent_[i] && spec_.targets[i] != kernels::kIgnoredTarget) {
      return InvalidField("slice.rows",
                          absl::StrCat("must cover every row with a target before the half-close; ",
                                       unsent_valid_rows_, " are missing"),
                          absl::StrCat("nothing for row ", spec_.rows.begin + static_cast<int64_t>(i)));
    }
  }
  return absl::InternalError("missing rows that are not there");
}

void StreamState::Fail(absl::Status status) {
  if (status_.ok() && !finished_) status_ = std::move(status);
}

bool StreamState::ReadyToFinish() const {
  if (!started_ || finished_ || outstanding_ > 0) return false;
  return failed() || unsent_rows_ == 0 || (half_closed_ && unsent_valid_rows_ == 0);
}

}  // namespace lossd::engine
