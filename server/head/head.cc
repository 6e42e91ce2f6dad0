// SPDX-License-Identifier: Apache-2.0
#include "server/head/head.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/bytes.h"

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

}  // namespace lossd::head
