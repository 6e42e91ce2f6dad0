// SPDX-License-Identifier: Apache-2.0
// Reads and writes of a head's tensors, and their initial values (head.h).
#include "server/head/head.h"

#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::head {

std::string TensorName(kernels::TensorId id) {
  if (id.role == kernels::Role::kValue) return std::string(kernels::Name(id.param));
  return absl::StrCat(kernels::Name(id.param), ".", kernels::Name(id.role));
}

Head::Head(std::string name, std::unique_ptr<kernels::HeadKernels> kernels)
    : name_(std::move(name)), config_(kernels->config()), kernels_(std::move(kernels)) {}

absl::Status Head::ReadRows(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                            absl::Span<uint8_t> out) {
  absl::Status status = CheckRows(id, row_begin, rows, dtype, out.size());
  if (status.ok()) status = kernels_->ReadTensor(id, row_begin, rows, dtype, out);
  return Named(id, status);
}

absl::Status Head::WriteRows(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                             absl::Span<const uint8_t> in) {
  absl::Status status = CheckRows(id, row_begin, rows, dtype, in.size());
  if (id.role == kernels::Role::kValue) written_.values = true;
  if (kernels::IsMoment(id.role)) written_.moments = true;
  if (status.ok()) status = kernels_->WriteTensor(id, row_begin, rows, dtype, in);
  return Named(id, status);
}

absl::Status Head::CheckRows(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                             size_t bytes) const {
  if (!kernels::HasTensor(config_, id)) return absl::NotFoundError("there is no such tensor");
  const kernels::TensorShape shape = kernels::ShapeOf(config_, id.param);
  if (row_begin < 0 || rows < 0 || row_begin > shape.rows || rows > shape.rows - row_begin) {
    return absl::OutOfRangeError(
        absl::StrCat(rows, " rows from row ", row_begin, " on leave its ", shape.rows, " rows"));
  }
  const auto expected = static_cast<size_t>(rows * shape.cols) * kernels::SizeOf(dtype);
  if (bytes == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(rows, " rows take ", errors::ExactBytes(expected), ", not ", errors::ExactBytes(bytes)));
}

absl::Status Head::Named(kernels::TensorId id, const absl::Status& status) const {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("head '", name_, "', tensor ", TensorName(id), ": ", status.message()));
}

// ---- Initial values ----

namespace {

constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15u;

// SplitMix64's output function: a bijection of 64 bits.
uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The start of a parameter's counter. Mixed twice, so that counters of neighboring seeds or of neighboring
// parameters do not overlap.
uint64_t StreamStart(uint64_t seed, kernels::Param param) {
  return Mix(Mix(seed + kGoldenGamma) + (static_cast<uint64_t>(param) + 1) * kGoldenGamma);
}

}  // namespace

float KaimingBound(int64_t hidden_size) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(hidden_size)));
}

void FillUniform(uint64_t seed, kernels::Param param, int64_t first_element, float bound,
                 absl::Span<float> out) {
  const uint64_t start = StreamStart(seed, param);
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t counter = static_cast<uint64_t>(first_element) + i + 1;
    const auto bits = static_cast<int64_t>(Mix(start + counter * kGoldenGamma) >> 40);
    // An odd number in (-2^24, 2^24). The product below is exact in double, so the only rounding is the
    // one to float, which is the same everywhere.
    const auto odd = static_cast<double>(2 * bits + 1 - (int64_t{1} << 24));
    out[i] = static_cast<float>(odd * 0x1p-24 * static_cast<double>(bound));
  }
}

}  // namespace lossd::head
