// SPDX-License-Identifier: Apache-2.0
// Measures the magnitudes of a head by reading its tensors in pieces (magnitudes.h).
#include "server/engine/magnitudes.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/types/span.h"
#include "server/head/manifest.h"

namespace lossd::engine {
namespace {

constexpr int64_t kReadBytes = int64_t{1} << 20;

// The field of `most` that a tensor counts for; null if no update changes the tensor.
double* PlaceOf(kernels::TensorId id, Magnitudes* most) {
  if (id.role == kernels::Role::kMoment1) return &most->moment1;
  if (id.role == kernels::Role::kMoment2) return &most->moment2;
  if (id.param == kernels::Param::kClassWeights) return nullptr;
  return id.param == kernels::Param::kWeight ? &most->matrix : &most->vectors;
}

void Add(absl::Span<const float> values, double* most, NotFinite* not_finite) {
  float largest = 0.0f;
  int64_t odd = 0, nan = 0, minus_infinite = 0;  // odd: not finite
  for (const float value : values) {
    const bool finite = std::isfinite(value);
    odd += finite ? 0 : 1;
    nan += std::isnan(value) ? 1 : 0;
    minus_infinite += value == -std::numeric_limits<float>::infinity() ? 1 : 0;
    largest = std::max(largest, finite ? std::fabs(value) : 0.0f);
  }
  not_finite->nan += nan;
  not_finite->infinite += odd - nan - minus_infinite;
  not_finite->minus_infinite += minus_infinite;
  if (most == nullptr) return;
  *most = odd > 0 ? Magnitudes::kUnknown : std::max(*most, double{largest});
}

}  // namespace

int64_t NotFinite::MoreThan(const NotFinite& before) const {
  return std::max<int64_t>(0, nan - before.nan) + std::max<int64_t>(0, infinite - before.infinite) +
         std::max<int64_t>(0, minus_infinite - before.minus_infinite);
}

absl::StatusOr<Measurement> Measure(head::Head& head) {
  const kernels::HeadConfig& config = head.config();
  Measurement measured{.most = {.matrix = 0.0, .vectors = 0.0}};
  std::vector<float> values;
  for (const kernels::TensorId id : head::CheckpointTensors(config)) {
    const kernels::TensorShape shape = kernels::ShapeOf(config, id.param);
    const int64_t row_bytes = shape.cols * static_cast<int64_t>(sizeof(float));
    const int64_t at_once = std::max<int64_t>(1, kReadBytes / row_bytes);
    for (int64_t row = 0; row < shape.rows; row += at_once) {
      const int64_t rows = std::min(at_once, shape.rows - row);
      values.resize(static_cast<size_t>(rows * shape.cols));
      const auto bytes =
          absl::MakeSpan(reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float));
      const absl::Status read = head.ReadRows(id, row, rows, kernels::DType::kFloat32, bytes);
      if (!read.ok()) return read;
      Add(values, PlaceOf(id, &measured.most), &measured.not_finite);
    }
  }
  return measured;
}

void ForgetWritten(head::Head& head, Magnitudes* magnitudes) {
  const head::Head::Written written = head.TakeWritten();
  if (written.values) magnitudes->matrix = magnitudes->vectors = Magnitudes::kUnknown;
  if (written.moments) magnitudes->moment1 = magnitudes->moment2 = Magnitudes::kUnknown;
}

}  // namespace lossd::engine
