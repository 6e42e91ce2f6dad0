// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_params.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/parallel_for.h"
#include "kernels/validation.h"

namespace lossd::kernels {
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

// What is on every device counts once.
bool CpuParams::CountsInNorm(Param param) const {
  const bool of_classes = param == Param::kWeight || param == Param::kBias;
  return of_classes || replica_.index == 0 || !IsSplitByVocabulary(config_, replica_);
}

absl::Status CpuParams::ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                   absl::Span<uint8_t> out) {
  absl::Status status = ValidateReplicaAccess(config_, replica_, id, row_begin, rows, dtype, out.size());
  if (!status.ok()) return status;
  const int64_t cols = ShapeOf(config_, id.param).cols;
  const float* const from = RowOf(id, row_begin);
  pool_->ParallelFor(rows * cols, kElementGrain, [&](int64_t begin, int64_t end) {
    FromFloat(dtype, from + begin, end - begin, out.data() + SizeOf(begin, dtype));
  });
  return absl::OkStatus();
}

absl::Status CpuParams::WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                    absl::Span<const uint8_t> in) {
  absl::Status status = ValidateReplicaAccess(config_, replica_, id, row_begin, rows, dtype, in.size());
  if (!status.ok()) return status;
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
  absl::Status status = ValidateReplicaAccess(config_, replica_, id, row_begin, rows, dtype, in.size());
  if (!status.ok()) return status;
  const int64_t cols = ShapeOf(config_, param).cols;
  float* const to = RowOf(id, row_begin);
  pool_->ParallelFor(rows * cols, kElementGrain, [&](int64_t begin, int64_t end) {
    AddScaled(dtype, in.data() + SizeOf(begin, dtype), end - begin, scale, to + begin);
  });
  return absl::OkStatus();
}

// Sums of fixed blocks, added in their order: the result does not depend on the number of threads.
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

absl::Status CpuParams::ApplyStep(const OptimizerOptions& options, int64_t update) {
  if (absl::Status status = ValidateStep(config_, options, update); !status.ok()) return status;
  for (Param param : kTrainedParams) {
    if (gradient(param) == nullptr) continue;
    const ShardRows own = shard(param);
    const auto at = [&](Role role, int64_t offset) {
      return buffers_.tensor({param, role}) == nullptr ? nullptr : RowOf({param, role}, own.first) + offset;
    };
    const int64_t elements = own.rows * ShapeOf(config_, param).cols;
    pool_->ParallelFor(elements, kElementGrain, [&](int64_t begin, int64_t end) {
      UpdateParams(options, update, param != Param::kWeight,
                   {at(Role::kValue, begin), at(Role::kGradient, begin), at(Role::kMoment1, begin),
                    at(Role::kMoment2, begin), end - begin});
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
    // A parameter without any gradient so far stays, even with epsilon 0.
    const float step = m == 0.0f ? 0.0f : rate * m / (std::sqrt(v) * root + epsilon);
    range.value[i] = keep * range.value[i] - step;
    range.gradient[i] = 0.0f;
  }
}

// A value of -infinity, which masks a class, stays without decay: 0 times it would be NaN.
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

// The first update sets the buffer to the gradient, without dampening.
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

}  // namespace lossd::kernels
