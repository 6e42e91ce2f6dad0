// SPDX-License-Identifier: Apache-2.0
// The parts of a head on the CPU, and CpuHead itself (cpu_head.h), in this order: the order of the rows,
// parameters and optimizer, the norm, the guard, and the steps of a chunk.
//
// A chunk gathers its rows (RowOrder): buffers_.hidden has the hidden states, and buffers_.logits their
// logits, a block of rows at a time. RowLoss turns the logits in place into ds, their gradient. When the
// guard has cleared the slices that fail, two products compute dx = ds W and dW += ds^T x.
//
// A head that is split by vocabulary has a part of the classes on each device. The parts compute statistics
// of each row over their own classes, and merge them by PartExchange. All parts call the same exchanges in
// the same order, so no part may skip one. The first part reports the results of rows (reports_).
#include "kernels/cpu/cpu_head.h"

#include <algorithm>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/divergence.h"
#include "kernels/cpu/row_loops.h"
#include "kernels/decision.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels {
namespace {

constexpr size_t kGroups = 4;

// The group of a row, in the order of RowOrder: 0 accumulated only, 1 accumulated with grad_hidden, 2
// grad_hidden only, 3 neither.
size_t GroupOf(const Slice& slice, int64_t row, bool accumulate) {
  if (IsAbsent(slice, row)) return 3;
  const bool accumulated = accumulate && (slice.accumulate == nullptr || slice.accumulate[row] != 0);
  const bool with_hidden = slice.grad_hidden != nullptr;
  if (accumulated) return with_hidden ? 1 : 0;
  return with_hidden ? 2 : 3;
}

// Calls visit(source, group) for each row that has a target.
template <typename Visit>
void ForEachValidRow(absl::Span<const Slice> slices, bool accumulate, Visit visit) {
  for (size_t i = 0; i < slices.size(); ++i) {
    for (int64_t row = 0; row < slices[i].rows; ++row) {
      if (slices[i].targets[row] == kIgnoredTarget) continue;
      visit(RowSource{static_cast<int64_t>(i), row}, GroupOf(slices[i], row, accumulate));
    }
  }
}

}  // namespace

RowOrder OrderRows(absl::Span<const Slice> slices, bool accumulate, RowSource* sources) {
  std::array<int64_t, kGroups> counts{};
  ForEachValidRow(slices, accumulate, [&](const RowSource&, size_t group) { ++counts[group]; });
  RowOrder order;
  order.hidden_begin = counts[0];
  order.accumulated = counts[0] + counts[1];
  order.hidden_end = order.accumulated + counts[2];
  order.rows = order.hidden_end + counts[3];
  std::array<int64_t, kGroups> next = {0, order.hidden_begin, order.accumulated, order.hidden_end};
  ForEachValidRow(slices, accumulate,
                  [&](const RowSource& source, size_t group) { sources[next[group]++] = source; });
  return order;
}

namespace {

double SumOfSquares(const float* values, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += double{values[i]} * double{values[i]};
  return sum;
}

}  // namespace

float* CpuParams::RowOf(TensorId id, int64_t row) const {
  const int64_t first = StoredRowsOf(config_, id, replica_).first;
  return buffers_.tensor(id) + (row - first) * ShapeOf(config_, id.param).cols;
}

int64_t CpuParams::Elements(Param param) const {
  return StoredRowsOf(config_, {param, Role::kGradient}, replica_).rows * ShapeOf(config_, param).cols;
}

// Whether this replica counts the parameter in its part of the norm. A parameter that is on every device is
// counted by replica 0 only.
bool CpuParams::CountsInNorm(Param param) const {
  const bool of_classes = param == Param::kWeight || param == Param::kBias;
  return of_classes || replica_.index == 0 || !IsSplitByVocabulary(config_, replica_);
}

absl::Status CpuParams::ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                   absl::Span<uint8_t> out) {
  LOSSD_RETURN_IF_ERROR(ValidateReplicaAccess(config_, replica_, id, row_begin, rows, dtype, out.size()));
  const int64_t cols = ShapeOf(config_, id.param).cols;
  const float* const from = RowOf(id, row_begin);
  pool_->ParallelFor(rows * cols, kElementGrain, [&](int64_t begin, int64_t end) {
    FromFloat(dtype, from + begin, end - begin, out.data() + SizeOf(begin, dtype));
  });
  return absl::OkStatus();
}

absl::Status CpuParams::WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                    absl::Span<const uint8_t> in) {
  LOSSD_RETURN_IF_ERROR(ValidateReplicaAccess(config_, replica_, id, row_begin, rows, dtype, in.size()));
  const int64_t cols = ShapeOf(config_, id.param).cols;
  float* const to = RowOf(id, row_begin);
  pool_->ParallelFor(rows * cols, kElementGrain, [&](int64_t begin, int64_t end) {
    ToFloat(dtype, in.data() + SizeOf(begin, dtype), end - begin, to + begin);
  });
  return absl::OkStatus();
}

absl::Status CpuParams::AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                                    absl::Span<const uint8_t> in) {
  const TensorId id{param, Role::kGradient};
  LOSSD_RETURN_IF_ERROR(ValidateReplicaAccess(config_, replica_, id, row_begin, rows, dtype, in.size()));
  const int64_t cols = ShapeOf(config_, param).cols;
  float* const to = RowOf(id, row_begin);
  pool_->ParallelFor(rows * cols, kElementGrain, [&](int64_t begin, int64_t end) {
    AddScaled(dtype, in.data() + SizeOf(begin, dtype), end - begin, scale, to + begin);
  });
  return absl::OkStatus();
}

// Adds the sums of fixed blocks in their order, so that the result does not depend on the number of threads.
absl::StatusOr<double> CpuParams::GradNorm() {
  if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
  double total = 0.0;
  std::vector<double> partial;
  for (Param param : kTrainedParams) {
    const float* const values = gradient(param);
    if (values == nullptr || !CountsInNorm(param)) continue;
    const int64_t n = Elements(param);
    partial.assign(static_cast<size_t>((n + kElementGrain - 1) / kElementGrain), 0.0);
    pool_->ParallelFor(static_cast<int64_t>(partial.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t from = i * kElementGrain;
        partial[static_cast<size_t>(i)] = SumOfSquares(values + from, std::min(kElementGrain, n - from));
      }
    });
    for (double sum : partial) total += sum;
  }
  return std::sqrt(total);
}

namespace {

// Whether every element of a row [cols] of gradients is +0 or -0. Compares bits, because subnormal numbers
// are not 0. Sets the elements of such a row to +0, as a step leaves gradients.
bool TakeIdleRow(float* gradient, int64_t cols) {
  uint32_t bits = 0;
#pragma omp simd reduction(| : bits)
  for (int64_t i = 0; i < cols; ++i) bits |= std::bit_cast<uint32_t>(gradient[i]);
  if ((bits << 1) != 0) return false;
  if (bits != 0) std::fill_n(gradient, cols, 0.0f);
  return true;
}

}  // namespace

absl::Status CpuParams::ApplyStep(const OptimizerOptions& options, int64_t update) {
  LOSSD_RETURN_IF_ERROR(ValidateStep(config_, options, update));
  for (Param param : kTrainedParams) {
    if (gradient(param) == nullptr) continue;
    const ShardRows own = shard(param);
    const int64_t cols = ShapeOf(config_, param).cols;
    const auto at = [&](Role role, int64_t offset) {
      return buffers_.tensor({param, role}) == nullptr ? nullptr : RowOf({param, role}, own.first) + offset;
    };
    const auto update_elements = [&](int64_t begin, int64_t end) {
      UpdateParams(options, update, param != Param::kWeight,
                   {at(Role::kValue, begin), at(Role::kGradient, begin), at(Role::kMoment1, begin),
                    at(Role::kMoment2, begin), end - begin});
    };
    if (!options.lazy_rows || param != Param::kWeight) {
      pool_->ParallelFor(own.rows * cols, kElementGrain, update_elements);
      continue;
    }
    pool_->ParallelFor(own.rows, std::max<int64_t>(1, kElementGrain / cols), [&](int64_t begin, int64_t end) {
      int64_t first = begin;  // first row after the last idle row
      for (int64_t row = begin; row < end; ++row) {
        if (!TakeIdleRow(at(Role::kGradient, row * cols), cols)) continue;
        if (first < row) update_elements(first * cols, row * cols);
        first = row + 1;
      }
      if (first < end) update_elements(first * cols, end * cols);
    });
  }
  return absl::OkStatus();
}

absl::Status CpuParams::ZeroGradients() {
  if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
  for (Param param : kTrainedParams) {
    float* const values = gradient(param);
    if (values == nullptr) continue;
    pool_->ParallelFor(Elements(param), kElementGrain,
                       [&](int64_t begin, int64_t end) { std::fill(values + begin, values + end, 0.0f); });
  }
  return absl::OkStatus();
}

absl::Status CpuParams::ZeroMoments() {
  for (Param param : kTrainedParams) {
    const int64_t elements = shard(param).rows * ShapeOf(config_, param).cols;
    for (const Role role : {Role::kMoment1, Role::kMoment2}) {
      float* const values = buffers_.tensor({param, role});
      if (values == nullptr) continue;
      pool_->ParallelFor(elements, kElementGrain,
                         [&](int64_t begin, int64_t end) { std::fill(values + begin, values + end, 0.0f); });
    }
  }
  return absl::OkStatus();
}

namespace {

// The formulas are in docs/math.md, "Optimizer". `rate` and `root` have the corrections of the two moments.
void UpdateAdamW(const OptimizerOptions& options, int64_t update, double decay, const ParamRange& range) {
  const double correction1 = 1.0 - std::pow(options.beta1, static_cast<double>(update));
  const double correction2 = 1.0 - std::pow(options.beta2, static_cast<double>(update));
  const float keep = static_cast<float>(1.0 - options.learning_rate * decay);
  const float rate = static_cast<float>(options.learning_rate / correction1);
  const float root = static_cast<float>(1.0 / std::sqrt(correction2));
  const float epsilon = static_cast<float>(options.epsilon);
  const float multiplier = static_cast<float>(options.grad_multiplier);
  const float beta1 = static_cast<float>(options.beta1);
  const float beta2 = static_cast<float>(options.beta2);
  const float rest1 = static_cast<float>(1.0 - options.beta1);
  const float rest2 = static_cast<float>(1.0 - options.beta2);
#pragma omp simd
  for (int64_t i = 0; i < range.n; ++i) {
    const float g = multiplier * range.gradient[i];
    const float m = beta1 * range.moment1[i] + rest1 * g;
    const float v = beta2 * range.moment2[i] + rest2 * g * g;
    range.moment1[i] = m;
    range.moment2[i] = v;
    // If all gradients so far were 0, the step is 0, even with epsilon 0.
    const float step = m == 0.0f ? 0.0f : rate * m / (std::sqrt(v) * root + epsilon);
    range.value[i] = keep * range.value[i] - step;
    range.gradient[i] = 0.0f;
  }
}

// Without decay, a value is not multiplied by it: a value of -infinity, which masks a class, times 0 would be
// NaN.
void UpdatePlainSgd(const OptimizerOptions& options, double decay, const ParamRange& range) {
  const float rate = static_cast<float>(options.learning_rate);
  const float weight_decay = static_cast<float>(decay);
  const float multiplier = static_cast<float>(options.grad_multiplier);
#pragma omp simd
  for (int64_t i = 0; i < range.n; ++i) {
    const float decayed = weight_decay == 0.0f ? 0.0f : weight_decay * range.value[i];
    range.value[i] -= rate * (multiplier * range.gradient[i] + decayed);
    range.gradient[i] = 0.0f;
  }
}

// buffer = momentum * buffer + (1 - dampening) * g. The value moves by the buffer, or with Nesterov by g +
// momentum * buffer. The first update sets the buffer to the gradient, without dampening.
void UpdateMomentumSgd(const OptimizerOptions& options, int64_t update, double decay,
                       const ParamRange& range) {
  const float rate = static_cast<float>(options.learning_rate);
  const float weight_decay = static_cast<float>(decay);
  const float multiplier = static_cast<float>(options.grad_multiplier);
  const float momentum = update == 1 ? 0.0f : static_cast<float>(options.momentum);
  const float rest = update == 1 ? 1.0f : static_cast<float>(1.0 - options.dampening);
  const float gradient_share = options.nesterov ? 1.0f : 0.0f;
  const float buffer_share = options.nesterov ? static_cast<float>(options.momentum) : 1.0f;
#pragma omp simd
  for (int64_t i = 0; i < range.n; ++i) {
    const float decayed = weight_decay == 0.0f ? 0.0f : weight_decay * range.value[i];
    const float g = multiplier * range.gradient[i] + decayed;
    const float buffer = momentum * range.moment1[i] + rest * g;
    range.moment1[i] = buffer;
    range.value[i] -= rate * (gradient_share * g + buffer_share * buffer);
    range.gradient[i] = 0.0f;
  }
}

}  // namespace

void UpdateParams(const OptimizerOptions& options, int64_t update, bool is_vector, const ParamRange& range) {
  const double decay = is_vector && !options.decay_vectors ? 0.0 : options.weight_decay;
  if (options.kind == OptimizerOptions::Kind::kAdamW) {
    UpdateAdamW(options, update, decay, range);
  } else if (options.momentum > 0.0) {
    UpdateMomentumSgd(options, update, decay, range);
  } else {
    UpdatePlainSgd(options, decay, range);
  }
}

namespace {

double Mean(const float* x, int64_t n) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += double{x[i]};
  return sum / static_cast<double>(n);
}

double MeanSquareAbout(const float* x, double centre, int64_t n) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += (double{x[i]} - centre) * (double{x[i]} - centre);
  return sum / static_cast<double>(n);
}

}  // namespace

float NormForward(const NormParams& params, float* unit, float* y) {
  const int64_t n = params.size;
  const double mean = params.norm == Norm::kLayerNorm ? Mean(unit, n) : 0.0;
  const double inverse = 1.0 / std::sqrt(MeanSquareAbout(unit, mean, n) + double{params.epsilon});
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    unit[i] = static_cast<float>((double{unit[i]} - mean) * inverse);
    y[i] = unit[i] * params.gain[i];
  }
  if (params.norm == Norm::kLayerNorm) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] += params.shift[i];
  }
  return static_cast<float>(inverse);
}

// dx = inverse * (h - mean(h) - unit * mean(h * unit)) with h = dy * gain; RMSNorm without mean(h).
void NormBackward(const NormParams& params, const float* unit, float inverse_deviation, float* grad) {
  const int64_t n = params.size;
  double sum = 0.0;
  double sum_unit = 0.0;
#pragma omp simd reduction(+ : sum, sum_unit)
  for (int64_t i = 0; i < n; ++i) {
    const double h = double{grad[i]} * double{params.gain[i]};
    sum += h;
    sum_unit += h * double{unit[i]};
  }
  const double mean = params.norm == Norm::kLayerNorm ? sum / static_cast<double>(n) : 0.0;
  const double mean_unit = sum_unit / static_cast<double>(n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const double h = double{grad[i]} * double{params.gain[i]};
    grad[i] = static_cast<float>(double{inverse_deviation} * (h - mean - double{unit[i]} * mean_unit));
  }
}

bool RowGuard::FindFailedSlices(const Chunk& chunk, const RowOrder& order) const {
  for (Slice& slice : chunk.slices) slice.first_nonfinite_row = -1;
  bool failed = false;
  for (int64_t i = 0; i < order.rows; ++i) {
    if (buffers_.results[i].finite) continue;
    failed = true;
    const RowSource& source = buffers_.sources[i];
    int64_t& first = chunk.slices[static_cast<size_t>(source.slice)].first_nonfinite_row;
    first = first < 0 ? source.row : std::min(first, source.row);
  }
  return failed;
}

void RowGuard::ClearFailedSlices(const Chunk& chunk, const RowOrder& order) const {
  if (!FindFailedSlices(chunk, order)) return;
  const int64_t d = hidden_size_;
  for (int64_t i = 0; i < order.with_gradient(); ++i) {
    if (chunk.slices[static_cast<size_t>(buffers_.sources[i].slice)].first_nonfinite_row < 0) continue;
    std::fill_n(buffers_.hidden + i * d, d, 0.0f);
    std::fill_n(buffers_.logits + i * classes_, classes_, 0.0f);
    std::fill_n(buffers_.grad_hidden + i * d, d, 0.0f);
    if (buffers_.unit == nullptr) continue;
    std::fill_n(buffers_.unit + i * d, d, 0.0f);
    buffers_.inverse_deviation[i] = 0.0f;
  }
}

absl::Status RowGuard::CheckGradients(const Chunk& chunk, const RowOrder& order, RowRange rows, RowRange here,
                                      int part, PartExchange& exchange) const {
  constexpr int64_t kGrain = 1 << 15;  // elements
  const RowLoops& loops = SelectRowLoops();
  pool_->ParallelFor(here.end - here.begin, std::max<int64_t>(1, kGrain / hidden_size_),
                     [&](int64_t from, int64_t to) {
                       for (int64_t i = here.begin + from; i < here.begin + to; ++i) {
                         const float* const row = buffers_.grad_hidden + i * hidden_size_;
                         if (!loops.all_finite(row, hidden_size_)) buffers_.results[i].finite = false;
                       }
                     });
  if (buffers_.bad_rows != nullptr) {
    // The parts of a split head exchange which of their rows are not finite.
    const int64_t n = rows.end - rows.begin;
    float* const own = buffers_.bad_rows;
    float* const all = buffers_.bad_rows + n;
    std::fill_n(own, 2 * n, 0.0f);
    for (int64_t i = here.begin; i < here.end; ++i) {
      own[i - rows.begin] = buffers_.results[i].finite ? 0.0f : 1.0f;
    }
    LOSSD_RETURN_IF_ERROR(exchange.AddSums(part, own, all, n));
    for (int64_t i = 0; i < n; ++i) {
      if (all[i] != 0.0f) buffers_.results[rows.begin + i].finite = false;
    }
  }
  ClearFailedSlices(chunk, order);
  return absl::OkStatus();
}

namespace {

NormParams NormParamsOf(const HeadConfig& config, const HeadBuffers& buffers) {
  return {config.norm, config.norm_epsilon, config.hidden_size, buffers.value(Param::kNormGain),
          buffers.value(Param::kNormShift)};
}

// The logits of a block have about this many bytes, so that they are still in a cache when they are turned
// into gradients. A block has at least kLeastBlockRows rows, so that packing W for the product stays cheap.
constexpr int64_t kBlockBytes = int64_t{8} << 20;
constexpr int64_t kLeastBlockRows = 128;

double SumOf(const float* values, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += double{values[i]};
  return sum;
}

// The most single classes that a slice of the chunk wants.
struct WantedClasses {
  int64_t top_k = 0;
  int64_t class_count = 0;
  bool any() const { return top_k > 0 || class_count > 0; }
};

WantedClasses WantedOf(const Chunk& chunk) {
  WantedClasses wanted;
  for (const Slice& slice : chunk.slices) {
    wanted.top_k = std::max<int64_t>(wanted.top_k, slice.top_k);
    wanted.class_count = std::max<int64_t>(wanted.class_count, slice.class_count);
  }
  return wanted;
}

bool AnyGradEntropy(const Chunk& chunk) {
  const Objective& objective = chunk.options.objective;
  for (const Slice& slice : chunk.slices) {
    if (slice.grad_entropy == nullptr && objective.entropy_bonus == 0.0f) continue;
    for (int64_t row = 0; row < slice.rows; ++row) {
      if (slice.targets[row] != kIgnoredTarget && GradEntropyOf(objective, slice, row) != 0.0) return true;
    }
  }
  return false;
}

// Whether the predicted relative error of sampled gradients, sqrt(variance / square), exceeds the limit. The
// sums are over the rows with a gradient, without rows that are not finite or that stand in for other rows.
bool ExceedsError(const Chunk& chunk, const RowOrder& order, const HeadBuffers& buffers) {
  double variance = 0.0;
  double square = 0.0;
  for (int64_t i = 0; i < order.with_gradient(); ++i) {
    const RowResult& result = buffers.results[i];
    if (!result.finite || chunk.slices[static_cast<size_t>(buffers.sources[i].slice)].stands_in) continue;
    variance += result.gradient.sampling_variance;
    square += result.gradient.squared_gradient;
  }
  const auto limit = double{chunk.options.max_gradient_error};
  return variance > limit * limit * square;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CpuHead>> CpuHead::Create(const HeadConfig& config, Replica replica,
                                                         int64_t chunk_rows, ThreadPool* pool,
                                                         MemoryAccounting::Reservation reservation,
                                                         std::unique_ptr<CpuPooled> pooled) {
  LOSSD_TRY(HeadArenas arenas, AllocateArenas(reservation.bytes()));
  reservation.MarkResident();  // arenas are written with zeros
  const HeadBuffers buffers = LayOut(config, replica, chunk_rows, arenas);
  for (Param param : {Param::kNormGain, Param::kClassWeights}) {
    float* const values = buffers.tensor({param, Role::kValue});
    if (values != nullptr) std::fill_n(values, ShapeOf(config, param).elements(), 1.0f);
  }
  return std::unique_ptr<CpuHead>(new CpuHead(config, replica, chunk_rows, pool, std::move(reservation),
                                              std::move(arenas), buffers, std::move(pooled)));
}

CpuHead::CpuHead(const HeadConfig& config, Replica replica, int64_t chunk_rows, ThreadPool* pool,
                 MemoryAccounting::Reservation reservation, HeadArenas arenas, const HeadBuffers& buffers,
                 std::unique_ptr<CpuPooled> pooled)
    : CpuPooledKernels(std::move(pooled)),
      config_(config),
      part_(PlaceOf(config, replica).index),
      has_norm_(config.norm != Norm::kNone),
      is_split_(IsSplitByVocabulary(config, replica)),
      reports_(part_ == 0),
      classes_(ClassesOf(config, replica)),
      chunk_rows_(chunk_rows),
      pool_(pool),
      reservation_(std::move(reservation)),
      arenas_(std::move(arenas)),
      buffers_(buffers),
      params_(config_, replica, pool, buffers),
      guard_(buffers_, config.hidden_size, classes_.rows, pool),
      exchange_(std::make_shared<SolePartExchange>()) {}

std::vector<Choice> CpuHead::Describe() const {
  return DescribeCpuHead(config_, chunk_rows_, memory()[MemoryKind::kWorkspace], pool_->threads());
}

std::vector<Choice> DescribeCpuHead(const HeadConfig& config, int64_t chunk_rows, int64_t workspace_bytes,
                                    int threads) {
  const LossOptions options = {.gradients = config.gradients};
  const absl::string_view why_exact = WhyExact(options, false);
  const Choice chunk = {
      .what = "chunk",
      .choice = absl::StrCat("up to ", chunk_rows, " rows"),
      .reason = chunk_rows == kMostChunkRows ? "more are no faster" : "the workspace holds no more",
      .workspace_bytes = workspace_bytes};
  if (config.logits == Logits::kNone) return {chunk, NoLogitsChoice()};
  std::vector<Choice> choices = {
      chunk,
      {.what = "products", .choice = absl::StrCat("fp32, OpenBLAS, ", threads, " threads")},
      {.what = "row loops",
       .choice = std::string(SelectRowLoops().instruction_set),
       .reason = "the widest that this processor has"},
      GradientsChoice(GradientsOf(options, why_exact), why_exact)};
  if (config.logits == Logits::kRecomputed) {
    choices.push_back(
        {.what = "logits", .choice = "stored", .reason = "this backend does not recompute them"});
  }
  return choices;
}

absl::Status CpuHead::CheckTeacher(const HeadKernels& teacher) const {
  const auto* const other = dynamic_cast<const CpuHead*>(&teacher);
  const bool same_device = other != nullptr && other->pool_ == pool_;
  return ValidateTeacherPart({config_, classes_},
                             {teacher.config(), same_device ? other->classes_ : classes_}, same_device);
}

namespace {

// Copies the values of a head in host memory to the pool if they are not there, and makes `buffers` point to
// them.
void BringValues(const CpuPooled& pooled, const CpuParams& params, HeadBuffers& buffers) {
  // In host memory all values are adjacent, the weight first (LayOut).
  const auto* const home = reinterpret_cast<const uint8_t*>(params.value(Param::kWeight));
  uint8_t* const here = pooled.Use(home);
  for (Param param : kAllParams) {
    const auto* const value = reinterpret_cast<const uint8_t*>(params.value(param));
    if (value == nullptr) continue;
    buffers.tensor({param, Role::kValue}) = reinterpret_cast<float*>(here + (value - home));
  }
}

}  // namespace

void CpuHead::Submit(Chunk* chunk, ChunkCallbacks callbacks) {
  absl::Status status = ValidateChunk(config_, chunk_rows_, *chunk);
  if (status.ok() && chunk->teacher != nullptr) status = CheckTeacher(*chunk->teacher);
  if (!status.ok()) {
    callbacks.on_results(status);
    callbacks.on_done(status);
    return;
  }
  const RowOrder order = OrderRows(chunk->slices, chunk->accumulate_gradients, buffers_.sources);
  if (order.rows > 0) {
    // CheckTeacher has made sure that the teacher is a CpuHead.
    for (CpuHead* head : {this, static_cast<CpuHead*>(chunk->teacher)}) {
      if (head != nullptr && head->pooled_ != nullptr)
        BringValues(*head->pooled_, head->params_, head->buffers_);
    }
  }
  const bool has_loss = !chunk->options.is_embedding();
  status = has_loss ? ComputeResults(*chunk, order) : EmbeddingRows(*chunk, order, this).Compute();
  callbacks.on_results(status);
  if (status.ok() && has_loss) AccumulateWeight(order);
  callbacks.on_done(status);
}

absl::Status CpuHead::ComputeResults(Chunk& chunk, const RowOrder& order) {
  Gather(chunk, order);
  LOSSD_RETURN_IF_ERROR(ComputeChunk(chunk, order));
  guard_.ClearFailedSlices(chunk, order);
  LOSSD_TRY(const RowRange with_hidden, ComputeGradHidden(chunk, order));
  ScatterResults(chunk, order);
  ScatterGradHidden(chunk, with_hidden);
  return absl::OkStatus();
}

void CpuHead::Gather(const Chunk& chunk, const RowOrder& order) {
  const int64_t d = config_.hidden_size;
  if (reports_) Retain(chunk, d);
  const NormParams norm = NormParamsOf(config_, buffers_);
  pool_->ParallelFor(order.rows, std::max<int64_t>(1, kElementGrain / d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowSource& source = buffers_.sources[i];
      const Slice& slice = chunk.slices[static_cast<size_t>(source.slice)];
      float* const hidden = buffers_.hidden + i * d;
      float* const raw = has_norm_ ? buffers_.unit + i * d : hidden;
      ToFloat(chunk.hidden_dtype, HiddenRow(chunk, slice, source.row, d), d, raw);
      if (has_norm_) buffers_.inverse_deviation[i] = NormForward(norm, raw, hidden);
    }
  });
}

namespace {

// The least number of rows of c >= 0 classes for which a thread is worth waking.
int64_t RowGrain(int64_t c) { return std::max<int64_t>(1, 4096 / std::max<int64_t>(c, 1)); }

}  // namespace

namespace {

// Delivers the logits and log-probabilities of single classes for a head that is split by vocabulary, some
// rows at a time. The statistics are merged already, and the logits are in the buffers. Only the part that
// has a given class brings its logit and the others bring 0, so the sum over the parts is the logit.
class ClassMerger {
 public:
  ClassMerger(const Chunk& chunk, const HeadBuffers& buffers, ShardRows classes, ThreadPool* pool)
      : chunk_(chunk), buffers_(buffers), classes_(classes), pool_(pool) {}

  // For the gathered rows `rows`, with room for `entries` entries.
  absl::Status Merge(const WantedClasses& wanted, RowRange rows, int64_t entries, int part, bool reports,
                     PartExchange& exchange) const {
    if (wanted.top_k > 0) {
      LOSSD_RETURN_IF_ERROR(MergeTop(rows, part, reports, wanted.top_k, entries, exchange));
    }
    return wanted.class_count > 0 ? MergeGiven(rows, part, wanted.class_count, entries, exchange)
                                  : absl::OkStatus();
  }

 private:
  absl::Status MergeTop(RowRange all, int part, bool reports, int64_t k, int64_t entries,
                        PartExchange& exchange) const {
    for (int64_t first = all.begin; first < all.end; first += entries / k) {
      const int64_t rows = std::min(entries / k, all.end - first);
      pool_->ParallelFor(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          SelectTop(SelectRowLoops(), LogitsOf(first + i), classes_.rows, classes_.first,
                    {buffers_.ranked + i * k, static_cast<size_t>(k)});
        }
      });
      LOSSD_RETURN_IF_ERROR(exchange.MergeTop(part, {buffers_.ranked, static_cast<size_t>(rows * k)}, k,
                                              reports, [&](int64_t i, absl::Span<const RankedClass> ranked) {
                                                StoreRanked(SliceOf(first + i), RowOf(first + i),
                                                            LseOf(first + i), ranked);
                                              }));
    }
    return absl::OkStatus();
  }

  absl::Status MergeGiven(RowRange all, int part, int64_t count, int64_t entries,
                          PartExchange& exchange) const {
    for (int64_t first = all.begin; first < all.end; first += entries / count) {
      const RowRange rows = {0, std::min(entries / count, all.end - first)};
      for (int64_t i = 0; i < rows.end; ++i) TakeGiven(first + i, buffers_.class_logits + i * count);
      LOSSD_RETURN_IF_ERROR(exchange.SumRows(part, buffers_.class_logits, rows, count).status());
      LOSSD_TRY(const RowRange here, exchange.CollectRows(part, buffers_.class_logits, rows, rows, count));
      for (int64_t i = here.begin; i < here.end; ++i) {
        StoreClasses(SliceOf(first + i), RowOf(first + i), LseOf(first + i),
                     buffers_.class_logits + i * count);
      }
    }
    return absl::OkStatus();
  }

  const Slice& SliceOf(int64_t i) const {
    return chunk_.slices[static_cast<size_t>(buffers_.sources[i].slice)];
  }
  int64_t RowOf(int64_t i) const { return buffers_.sources[i].row; }
  double LseOf(int64_t i) const { return LogSumExp(buffers_.merged[i]); }
  const float* LogitsOf(int64_t i) const { return buffers_.logits + i * classes_.rows; }
  void TakeGiven(int64_t i, float* logits) const {
    const Slice& slice = SliceOf(i);
    for (int32_t j = 0; j < slice.class_count; ++j) {
      const int64_t place = ClassesOf(slice, RowOf(i))[j] - classes_.first;
      logits[j] = place >= 0 && place < classes_.rows ? LogitsOf(i)[place] : 0.0f;
    }
  }

  const Chunk& chunk_;
  const HeadBuffers& buffers_;
  const ShardRows classes_;
  ThreadPool* const pool_;
};

}  // namespace

// Computes the rows of a chunk with a teacher. Each part of a split head computes its classes of both heads.
// The arguments outlive the object. Thread-compatible.
class CpuHead::Distiller {
 public:
  // options.gradients is kExact or kSampled.
  Distiller(const Chunk& chunk, const LossOptions& options, const RowOrder& order, CpuHead* student)
      : chunk_(chunk),
        order_(order),
        options_(options),
        distillation_(options.distillation),
        student_(*student),
        teacher_(*static_cast<CpuHead*>(chunk.teacher)),  // CheckTeacher: it is a CpuHead
        row_loss_(SelectRowLoops(), student->ContextFor(WithTarget(options))) {}

  // As CpuHead::ComputeRows, in blocks of rows that also fit into the teacher's workspace.
  absl::Status ComputeRows();

 private:
  // The request to the row loss, for the part of the loss with the target; and the factors of the whole loss.
  struct Request {
    RowRequest with_target;
    double row_weight = 1.0;  // weight of the whole loss
    double grad_loss = 1.0;
  };
  // The statistics of a row over the classes here.
  struct Summary {
    RowStatistics statistics;
    TaughtRow taught;
  };

  // The options of the part of the loss with the targets. It is exact here, because the sum of both parts is
  // sampled.
  static LossOptions WithTarget(LossOptions options) {
    options.gradients = Gradients::kExact;
    return options;
  }
  // Writes the teacher's logits of these rows into its workspace, from the first row on, without bias and
  // softcap.
  void ComputeTeacherLogits(absl::Span<const RowSource> sources);
  // Calls body(i) for the gathered rows of a block.
  void ForEachRow(int64_t first, int64_t rows, absl::FunctionRef<void(int64_t i)> body) const;
  // Compute the results and gradients of a block of rows whose logits are in the buffers: for a head that has
  // all classes, and for a split head.
  void ComputeBlock(int64_t first, int64_t rows) const;
  absl::Status ComputeSplitBlock(int64_t first, int64_t rows) const;

  // The steps for gathered row i, whose student's and teacher's logits are in the buffers. In the end the
  // gradient has replaced the student's logits.
  Request RequestOf(int64_t i) const;
  Summary Summarise(const Request& request, int64_t i, float* teacher_logits) const;
  DivergenceSums Sum(const TaughtRow& all, int64_t i, const float* teacher_logits) const;
  RowResult Finish(const Request& request, const RowStatistics& own, const RowStatistics& all,
                   const TaughtRow& taught, int64_t i, float* teacher_logits) const;
  // Adds the bias and applies the softcap. False if a dot product is not finite, which the softcap would
  // hide.
  bool Transform(float* teacher_logits) const;

  int64_t classes() const { return student_.classes_.rows; }
  float* LogitsOf(int64_t i) const { return student_.buffers_.logits + i * classes(); }
  // The teacher's logits of row i, in the block that begins with row `first`.
  float* TeacherLogitsOf(int64_t i, int64_t first) const {
    return teacher_.buffers_.logits + (i - first) * classes();
  }

  const Chunk& chunk_;
  const RowOrder& order_;
  const LossOptions& options_;
  const Distillation& distillation_;
  CpuHead& student_;
  CpuHead& teacher_;
  const RowLoss row_loss_;
};

// All parts of a head use the same blocks of rows, because they exchange data in each block. So the size of a
// block depends on all classes, not on the classes here. There is at least one block, even without rows: the
// parts wait for each other in it (RankExchange::MergeStatistics).
absl::Status CpuHead::Distiller::ComputeRows() {
  const int64_t d = student_.config_.hidden_size;
  const int64_t c = classes();
  const HeadBuffers& buffers = student_.buffers_;
  const int64_t row_bytes = student_.config_.vocab_size * int64_t{sizeof(float)};
  const int64_t block = std::min(teacher_.chunk_rows_, std::max(kLeastBlockRows, kBlockBytes / row_bytes));
  int64_t first = 0;
  do {
    const int64_t rows = std::min(block, order_.rows - first);
    Gemm(*student_.pool_, rows, c, d, options_.logit_scale, {buffers.hidden + first * d, d},
         {buffers.value(Param::kWeight), d, /*transposed=*/true}, 0.0f, buffers.logits + first * c, c);
    ComputeTeacherLogits({buffers.sources + first, static_cast<size_t>(rows)});
    if (student_.is_split_) {
      LOSSD_RETURN_IF_ERROR(ComputeSplitBlock(first, rows));
    } else {
      ComputeBlock(first, rows);
    }
    first += block;
  } while (first < order_.rows);
  return absl::OkStatus();
}

void CpuHead::Distiller::ForEachRow(int64_t first, int64_t rows,
                                    absl::FunctionRef<void(int64_t i)> body) const {
  student_.pool_->ParallelFor(rows, RowGrain(classes()), [&](int64_t begin, int64_t end) {
    for (int64_t i = first + begin; i < first + end; ++i) body(i);
  });
}

void CpuHead::Distiller::ComputeBlock(int64_t first, int64_t rows) const {
  ForEachRow(first, rows, [&](int64_t i) {
    float* const taught_logits = TeacherLogitsOf(i, first);
    std::array<RankedClass, kMostTopClasses> ranked;
    std::array<float, kMostGivenClasses> class_logits;
    Request request = RequestOf(i);
    request.with_target.top = ranked.data();
    request.with_target.class_logits = class_logits.data();
    Summary own = Summarise(request, i, taught_logits);
    if (!request.with_target.absent) own.taught.sums = Sum(own.taught, i, taught_logits);
    RowResult& row = student_.buffers_.results[i];
    row = Finish(request, own.statistics, own.statistics, own.taught, i, taught_logits);
    const RowSource& source = student_.buffers_.sources[i];
    const Slice& slice = chunk_.slices[static_cast<size_t>(source.slice)];
    StoreRanked(slice, source.row, row.lse, ranked);
    StoreClasses(slice, source.row, row.lse, class_logits.data());
  });
}

// Between the steps the parts exchange, in this order: the statistics of the student's rows, single classes,
// both softmaxes, the sums of the divergence, and the sums of the gradient.
absl::Status CpuHead::Distiller::ComputeSplitBlock(int64_t first, int64_t rows) const {
  const HeadBuffers& buffers = student_.buffers_;
  PartExchange& exchange = *student_.exchange_;
  const int part = student_.part_;
  const auto count = static_cast<size_t>(rows);
  ForEachRow(first, rows, [&](int64_t i) {
    Request request = RequestOf(i);
    request.with_target.top_k = request.with_target.class_count = 0;  // ClassMerger delivers them
    const Summary own = Summarise(request, i, TeacherLogitsOf(i, first));
    buffers.statistics[i] = own.statistics;
    buffers.taught[i] = own.taught;
  });
  LOSSD_RETURN_IF_ERROR(
      exchange.MergeStatistics(part, {buffers.statistics + first, count}, {buffers.merged + first, count}));
  LOSSD_RETURN_IF_ERROR(ClassMerger(chunk_, buffers, student_.classes_, student_.pool_)
                            .Merge(WantedOf(chunk_), {first, first + rows},
                                   ClassEntries(student_.chunk_rows_), part, student_.reports_, exchange));
  LOSSD_RETURN_IF_ERROR(exchange.MergeTaught(
      part, {buffers.taught + first, count}, [&](int64_t row, absl::Span<const TaughtRow* const> of_part) {
        buffers.merged_taught[first + row] = MergeSoftened(of_part, distillation_.temperature);
      }));
  ForEachRow(first, rows, [&](int64_t i) {
    buffers.taught[i].sums = Sum(buffers.merged_taught[i], i, TeacherLogitsOf(i, first));
  });
  LOSSD_RETURN_IF_ERROR(exchange.MergeTaught(
      part, {buffers.taught + first, count}, [&](int64_t row, absl::Span<const TaughtRow* const> of_part) {
        buffers.merged_taught[first + row].sums = AddDivergences(of_part);
      }));
  ForEachRow(first, rows, [&](int64_t i) {
    buffers.results[i] = Finish(RequestOf(i), buffers.statistics[i], buffers.merged[i],
                                buffers.merged_taught[i], i, TeacherLogitsOf(i, first));
    buffers.gradients[i] = buffers.results[i].gradient;
  });
  return exchange.MergeGradients(part, {buffers.gradients + first, count}, {buffers.results + first, count});
}

void CpuHead::Distiller::ComputeTeacherLogits(absl::Span<const RowSource> sources) {
  const int64_t d = teacher_.config_.hidden_size;
  const int64_t c = teacher_.classes_.rows;
  const HeadBuffers& buffers = teacher_.buffers_;
  const NormParams norm = NormParamsOf(teacher_.config_, buffers);
  const auto rows = static_cast<int64_t>(sources.size());
  const auto gather = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowSource& source = sources[static_cast<size_t>(i)];
      const Slice& slice = chunk_.slices[static_cast<size_t>(source.slice)];
      const auto* const from =
          static_cast<const uint8_t*>(slice.teacher_hidden) + SizeOf(source.row * d, chunk_.hidden_dtype);
      float* const hidden = buffers.hidden + i * d;
      float* const raw = teacher_.has_norm_ ? buffers.unit + i * d : hidden;
      ToFloat(chunk_.hidden_dtype, from, d, raw);
      if (teacher_.has_norm_) NormForward(norm, raw, hidden);
    }
  };
  teacher_.pool_->ParallelFor(rows, std::max<int64_t>(1, kElementGrain / d), gather);
  Gemm(*teacher_.pool_, rows, c, d, distillation_.teacher_logit_scale, {buffers.hidden, d},
       {buffers.value(Param::kWeight), d, /*transposed=*/true}, 0.0f, buffers.logits, c);
}

bool CpuHead::Distiller::Transform(float* teacher_logits) const {
  const int64_t c = teacher_.classes_.rows;
  const RowLoops& loops = SelectRowLoops();
  const float softcap = distillation_.teacher_softcap;
  const bool finite = softcap == 0.0f || loops.all_finite(teacher_logits, c);
  if (const float* const bias = teacher_.buffers_.value(Param::kBias); bias != nullptr) {
    loops.add_scaled(teacher_logits, bias, distillation_.teacher_logit_scale, c);
  }
  if (softcap > 0.0f) loops.softcap(teacher_logits, softcap, c);
  return finite;
}

// The loss with the target is computed if it counts, or if its log-probability is a result of the row.
CpuHead::Distiller::Request CpuHead::Distiller::RequestOf(int64_t i) const {
  Request request{.with_target = student_.RequestFor(chunk_, order_, i)};
  RowRequest& with_target = request.with_target;
  request.row_weight = double{with_target.row_weight};
  request.grad_loss = with_target.grad_loss;
  const Slice& slice = chunk_.slices[static_cast<size_t>(student_.buffers_.sources[i].slice)];
  with_target.counts_target = distillation_.target_weight != 0.0f || slice.out.target_logprob != nullptr;
  with_target.row_weight *= distillation_.target_weight;
  with_target.grad_loss *= double{distillation_.target_weight};
  return request;
}

CpuHead::Distiller::Summary CpuHead::Distiller::Summarise(const Request& request, int64_t i,
                                                          float* teacher_logits) const {
  Summary own{.statistics = row_loss_.Summarise(request.with_target, LogitsOf(i))};
  if (request.with_target.absent) return own;
  own.taught.teacher_finite = Transform(teacher_logits);
  own.taught.student = Soften(LogitsOf(i), classes(), distillation_.temperature);
  own.taught.teacher = Soften(teacher_logits, classes(), distillation_.temperature);
  return own;
}

DivergenceSums CpuHead::Distiller::Sum(const TaughtRow& all, int64_t i, const float* teacher_logits) const {
  return SumDivergence(distillation_, {LogitsOf(i), teacher_logits, classes()}, all);
}

// The gradient of the divergence is written over the teacher's logits, which are not needed after it. It
// comes first, because it reads the student's logits, and RowLoss::Finish then writes the gradient of the
// loss with the target over them. In the end both gradients are added up there.
RowResult CpuHead::Distiller::Finish(const Request& request, const RowStatistics& own,
                                     const RowStatistics& all, const TaughtRow& taught, int64_t i,
                                     float* teacher_logits) const {
  const RowRequest& with_target = request.with_target;
  float* const logits = LogitsOf(i);
  const int64_t c = classes();
  if (with_target.absent) return row_loss_.Finish(with_target, own, all, logits);
  const double divergence = taught.sums.value;
  const bool has_gradient = with_target.want_gradient && std::isfinite(divergence);
  if (has_gradient) {
    WriteDivergenceGradient(distillation_, {logits, teacher_logits, c}, taught, options_.softcap,
                            teacher_logits);
  }
  RowResult row = row_loss_.Finish(with_target, own, all, logits);
  row.divergence = request.row_weight * divergence;
  if (distillation_.target_weight != 0.0f) row.target_loss = row.loss / double{distillation_.target_weight};
  row.loss += double{distillation_.weight} * row.divergence;
  const double slope = request.grad_loss * double{distillation_.weight};
  const auto factor = static_cast<float>(slope * double{options_.logit_scale});
  row.finite = row.finite && taught.teacher_finite && std::isfinite(divergence) &&
               std::isfinite(static_cast<float>(row.loss)) && std::isfinite(factor);
  if (!with_target.want_gradient || !row.finite) return row;
  SelectRowLoops().add_scaled(logits, teacher_logits, factor, c);
  if (options_.gradients != Gradients::kSampled) return row;
  row.gradient_factor += std::fabs(slope) / double{distillation_.temperature};
  const int64_t target = with_target.target - student_.classes_.first;
  row.gradient = SampleGradient(options_, row.gradient_factor, with_target.sample,
                                own.has_target ? target : -1, c, logits);
  return row;
}

// With kAuto, the rows are computed with sampled gradients first. If these are not accurate enough, the rows
// are computed again.
absl::Status CpuHead::ComputeChunk(Chunk& chunk, const RowOrder& order) {
  LossOptions options = chunk.options;
  const bool is_auto = options.gradients == Gradients::kAuto;
  absl::string_view why_exact = WhyExact(options, AnyGradEntropy(chunk));
  if (why_exact.empty() && order.with_gradient() == 0) why_exact = "no gradient is wanted";
  options.gradients = why_exact.empty() && is_auto ? Gradients::kSampled : GradientsOf(options, why_exact);
  LOSSD_RETURN_IF_ERROR(ComputeRows(chunk, options, order));
  if (!why_exact.empty()) {
    chunk.choices = {GradientsChoice(Gradients::kExact, why_exact)};
    return absl::OkStatus();
  }
  const bool refused = is_auto && ExceedsError(chunk, order, buffers_);
  const Decision decision = refused ? Decision::kTooMuchError : Decision::kAsPlanned;
  chunk.choices = {GradientsChoice(chunk.options.gradients, decision)};
  chunk.gradients = GradientsOf(chunk.options.gradients, decision);
  if (chunk.gradients == Gradients::kSampled) {
    chunk.sample_threshold = options.sample_threshold;
    chunk.choices.push_back(ThresholdChoice(options.sample_threshold, chunk.sample_threshold));
  }
  if (!refused) return absl::OkStatus();
  options.gradients = Gradients::kExact;
  return ComputeRows(chunk, options, order);
}

// Computes logits [block, C] = t x W^T over the classes here, with the logit scale t. Then turns each row, in
// place, into its results and its gradient. If other parts have other classes, the second step waits for the
// merged statistics. Nothing is exchanged between blocks, so each part may have blocks of its own size.
absl::Status CpuHead::ComputeRows(const Chunk& chunk, const LossOptions& options, const RowOrder& order) {
  if (options.distillation.used()) return Distiller(chunk, options, order, this).ComputeRows();
  const int64_t d = config_.hidden_size;
  const int64_t c = classes_.rows;
  const RowLoss row_loss(SelectRowLoops(), ContextFor(options));
  const int64_t block =
      std::max(kLeastBlockRows, kBlockBytes / (std::max<int64_t>(c, 1) * int64_t{sizeof(float)}));
  const WantedClasses wanted = WantedOf(chunk);
  const auto request_for = [&](int64_t i, SoftRow& targets) {
    RowRequest request = RequestFor(chunk, order, i);
    if (options.has_soft_targets()) {
      const RowSource& source = buffers_.sources[i];
      SoftRowOf(options.rest, chunk.slices[static_cast<size_t>(source.slice)], source.row, targets);
      request.targets = &targets;
    }
    request.keeps_logits = is_split_ && wanted.any();
    return request;
  };
  for (int64_t first = 0; first < order.rows; first += block) {
    const int64_t rows = std::min(block, order.rows - first);
    Gemm(*pool_, rows, c, d, options.logit_scale, {buffers_.hidden + first * d, d},
         {buffers_.value(Param::kWeight), d, /*transposed=*/true}, 0.0f, buffers_.logits + first * c, c);
    pool_->ParallelFor(rows, RowGrain(c), [&](int64_t begin, int64_t end) {
      std::array<RankedClass, kMostTopClasses> ranked;
      std::array<float, kMostGivenClasses> class_logits;
      SoftRow targets;
      for (int64_t i = first + begin; i < first + end; ++i) {
        RowRequest request = request_for(i, targets);
        request.top = ranked.data();
        request.class_logits = class_logits.data();
        if (is_split_) {
          request.top_k = request.class_count = 0;  // ClassMerger delivers them
          buffers_.statistics[i] = row_loss.Summarise(request, buffers_.logits + i * c);
          continue;
        }
        const RowStatistics own = row_loss.Summarise(request, buffers_.logits + i * c);
        buffers_.results[i] = row_loss.Finish(request, own, own, buffers_.logits + i * c);
        const Slice& slice = chunk.slices[static_cast<size_t>(buffers_.sources[i].slice)];
        StoreRanked(slice, buffers_.sources[i].row, buffers_.results[i].lse, ranked);
        StoreClasses(slice, buffers_.sources[i].row, buffers_.results[i].lse, class_logits.data());
      }
    });
  }
  if (!is_split_) return absl::OkStatus();
  const auto all = static_cast<size_t>(order.rows);
  LOSSD_RETURN_IF_ERROR(
      exchange_->MergeStatistics(part_, {buffers_.statistics, all}, {buffers_.merged, all}));
  LOSSD_RETURN_IF_ERROR(
      ClassMerger(chunk, buffers_, classes_, pool_)
          .Merge(wanted, {0, order.rows}, ClassEntries(chunk_rows_), part_, reports_, *exchange_));
  pool_->ParallelFor(order.rows, RowGrain(c), [&](int64_t begin, int64_t end) {
    SoftRow targets;
    for (int64_t i = begin; i < end; ++i) {
      buffers_.results[i] = row_loss.Finish(request_for(i, targets), buffers_.statistics[i],
                                            buffers_.merged[i], buffers_.logits + i * c);
      buffers_.gradients[i] = buffers_.results[i].gradient;
    }
  });
  return exchange_->MergeGradients(part_, {buffers_.gradients, all}, {buffers_.results, all});
}

// Computes dy = ds W for the rows with grad_hidden; with a norm, also for the rows that add to the gradients
// of gain and shift. Then takes dy back through the norm.
absl::StatusOr<RowRange> CpuHead::ComputeGradHidden(const Chunk& chunk, const RowOrder& order) {
  const int64_t d = config_.hidden_size;
  const int64_t c = classes_.rows;
  const RowRange wanted = {order.hidden_begin, order.hidden_end};
  const RowRange rows = has_norm_ ? RowRange{0, order.with_gradient()} : wanted;
  if (rows.begin >= rows.end) return RowRange();
  float* const grad = buffers_.grad_hidden;
  Gemm(*pool_, rows.end - rows.begin, d, c, 1.0f, {buffers_.logits + rows.begin * c, c},
       {buffers_.value(Param::kWeight), d}, 0.0f, grad + rows.begin * d, d);
  const absl::StatusOr<RowRange> here = exchange_->SumRows(part_, grad, rows, d);
  if (!here.ok()) return here;
  absl::Status status = guard_.CheckGradients(chunk, order, rows, *here, part_, *exchange_);
  if (status.ok() && has_norm_) status = BackThroughNorm(order, *here);
  if (!status.ok()) return status;
  return exchange_->CollectRows(part_, grad, rows, wanted, d);
}

// The accumulated rows come first in the order. The gradients of gain and shift need dy, so they are added
// before dy becomes dx.
absl::Status CpuHead::BackThroughNorm(const RowOrder& order, RowRange here) {
  if (order.accumulated > 0)
    LOSSD_RETURN_IF_ERROR(AddNormGradients(Intersect({here.begin, order.accumulated}, here)));
  const int64_t d = config_.hidden_size;
  const RowRange hidden = Intersect({order.hidden_begin, order.hidden_end}, here);
  const NormParams norm = NormParamsOf(config_, buffers_);
  pool_->ParallelFor(hidden.end - hidden.begin, std::max<int64_t>(1, kElementGrain / d),
                     [&](int64_t from, int64_t to) {
                       for (int64_t i = hidden.begin + from; i < hidden.begin + to; ++i) {
                         NormBackward(norm, buffers_.unit + i * d, buffers_.inverse_deviation[i],
                                      buffers_.grad_hidden + i * d);
                       }
                     });
  return absl::OkStatus();
}

// Adds the gradients of gain and shift, which are sums over the rows of dy. Each part of a head has dy of
// some rows, so the parts add up their sums.
absl::Status CpuHead::AddNormGradients(RowRange rows) {
  const int64_t d = config_.hidden_size;
  const float* const grad = buffers_.grad_hidden + rows.begin * d;
  const float* const unit = buffers_.unit + rows.begin * d;
  float* const shift = buffers_.gradient(Param::kNormShift);
  if (!is_split_) {
    AddColumnSums(*pool_, grad, unit, rows.end - rows.begin, d, buffers_.gradient(Param::kNormGain));
    if (shift != nullptr) AddColumnSums(*pool_, grad, nullptr, rows.end - rows.begin, d, shift);
    return absl::OkStatus();
  }
  float* const sums = buffers_.norm_sums;
  std::fill_n(sums, 2 * d, 0.0f);
  AddColumnSums(*pool_, grad, unit, rows.end - rows.begin, d, sums);
  absl::Status status = exchange_->AddSums(part_, sums, buffers_.gradient(Param::kNormGain), d);
  if (!status.ok() || shift == nullptr) return status;
  AddColumnSums(*pool_, grad, nullptr, rows.end - rows.begin, d, sums + d);
  return exchange_->AddSums(part_, sums + d, shift, d);
}

void CpuHead::ScatterResults(const Chunk& chunk, const RowOrder& order) {
  if (!reports_) return;
  const RowResult ignored;
  for (Slice& slice : chunk.slices) {
    slice.sums = LossSums();
    for (int64_t row = 0; row < slice.rows; ++row) {
      if (slice.targets[row] != kIgnoredTarget) continue;
      StoreRow(slice.out, row, ignored);
      StoreNoClasses(slice, row);
    }
  }
  for (int64_t i = 0; i < order.rows; ++i) {
    const RowSource& source = buffers_.sources[i];
    Slice& slice = chunk.slices[static_cast<size_t>(source.slice)];
    StoreRow(slice.out, source.row, buffers_.results[i]);
    AddToSums(chunk.options.objective, slice, source.row, buffers_.results[i], slice.sums);
  }
}

// The first part also writes zeros for the rows without a gradient: rows without a target, and absent rows.
void CpuHead::ScatterGradHidden(const Chunk& chunk, RowRange rows) {
  const int64_t d = config_.hidden_size;
  const DType dtype = chunk.hidden_dtype;
  for (const Slice& slice : chunk.slices) {
    if (slice.grad_hidden == nullptr || !reports_) continue;
    for (int64_t row = 0; row < slice.rows; ++row) {
      if (slice.targets[row] != kIgnoredTarget && !IsAbsent(slice, row)) continue;
      std::fill_n(GradHiddenRow(slice, row, d, dtype), SizeOf(d, dtype), uint8_t{0});
    }
  }
  pool_->ParallelFor(
      rows.end - rows.begin, std::max<int64_t>(1, kElementGrain / d), [&](int64_t from, int64_t to) {
        for (int64_t i = rows.begin + from; i < rows.begin + to; ++i) {
          const RowSource& source = buffers_.sources[i];
          const Slice& slice = chunk.slices[static_cast<size_t>(source.slice)];
          FromFloat(dtype, buffers_.grad_hidden + i * d, d, GradHiddenRow(slice, source.row, d, dtype));
        }
      });
}

// Adds the weight gradient: dW [C, D] += ds^T x and db [C] += column sums of ds, over the accumulated rows.
void CpuHead::AccumulateWeight(const RowOrder& order) {
  if (order.accumulated == 0) return;
  const int64_t d = config_.hidden_size;
  const int64_t c = classes_.rows;
  Gemm(*pool_, c, d, order.accumulated, 1.0f, {buffers_.logits, c, /*transposed=*/true}, {buffers_.hidden, d},
       1.0f, buffers_.gradient(Param::kWeight), d);
  float* const bias = buffers_.gradient(Param::kBias);
  if (bias != nullptr) AddColumnSums(*pool_, buffers_.logits, nullptr, order.accumulated, c, bias);
}

RowRequest CpuHead::RequestFor(const Chunk& chunk, const RowOrder& order, int64_t gathered) const {
  const int64_t row = buffers_.sources[gathered].row;
  const Slice& slice = chunk.slices[static_cast<size_t>(buffers_.sources[gathered].slice)];
  RowRequest request;
  request.target = slice.targets[row];
  if (slice.row_weights != nullptr) request.row_weight = slice.row_weights[row];
  request.grad_loss = GradLossOf(slice, row);
  if (slice.grad_lse != nullptr) request.grad_lse = slice.grad_lse[row];
  request.grad_entropy = static_cast<float>(GradEntropyOf(chunk.options.objective, slice, row));
  request.numbers = NumbersOf(slice, row);
  request.want_gradient = gathered < order.with_gradient();
  request.want_entropy = slice.out.entropy != nullptr || chunk.options.objective.entropy_bonus != 0.0f;
  request.absent = IsAbsent(slice, row);
  request.top_k = slice.top_k;
  request.class_count = slice.class_count;
  if (slice.class_count > 0) request.classes = ClassesOf(slice, row);
  request.sample = SampleOf(slice.sample_seed, static_cast<uint64_t>(slice.first_row + row),
                            static_cast<uint64_t>(classes_.first));
  return request;
}

RowLossContext CpuHead::ContextFor(const LossOptions& options) const {
  RowLossContext context;
  context.options = options;
  context.vocab_size = config_.vocab_size;
  context.first_class = classes_.first;
  context.classes = classes_.rows;
  context.bias = buffers_.value(Param::kBias);
  context.class_weight_sum = static_cast<double>(config_.vocab_size);
  context.own_weight_sum = static_cast<double>(classes_.rows);
  if (!options.use_class_weights) return context;
  context.class_weights = buffers_.value(Param::kClassWeights);
  context.class_weight_sum = SumOf(context.class_weights, config_.vocab_size);
  context.own_weight_sum = SumOf(context.class_weights + classes_.first, classes_.rows);
  return context;
}

}  // namespace lossd::kernels
