// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tensor_messages.h"

#include <cstring>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "client/cpp/argument_error.h"
#include "client/cpp/server_sent.h"
#include "kernels/errors/bytes.h"

namespace lossd::client::internal {
namespace {

constexpr uint64_t kWriteBytes = 1 << 20;  // of payload per message

}  // namespace

size_t WireElementSize(v1::DType dtype) {
  return ElementSize(dtype == v1::DTYPE_UNSPECIFIED ? v1::DTYPE_FP32 : dtype);
}

uint64_t TensorMessageBytes(uint64_t row_bytes) {
  return std::max<uint64_t>(1, kWriteBytes / row_bytes) * row_bytes;
}

TensorReader::TensorReader(const v1::ReadTensorRequest& request, absl::Span<char> out,
                           std::optional<uint64_t> tensor_rows)
    : request_(request),
      element_size_(WireElementSize(request.dtype())),
      out_(out),
      tensor_rows_(tensor_rows) {}

absl::Status TensorReader::Handle(const grpc::ByteBuffer& message, absl::Span<const uint8_t> in_region,
                                  uint64_t first_row) {
  v1::TensorSlice slice;
  const absl::StatusOr<wire::PayloadView> payload = wire::Decode(message, &slice);
  if (!payload.ok()) return ServerSent("an unreadable message: ", payload.status().message());
  if (!begun_) {
    if (absl::Status status = Begin(slice); !status.ok()) return status;
  }
  if (absl::Status status = CheckVersion(slice.state()); !status.ok()) return status;
  if (slice.rows().begin() != next_row_ || slice.rows().end() < next_row_ || slice.rows().end() > end_row_) {
    return ServerSent("tensor rows [", slice.rows().begin(), ", ", slice.rows().end(), "); row ", next_row_,
                      " was expected next, of rows up to ", end_row_);
  }
  const uint64_t bytes = (slice.rows().end() - next_row_) * cols_ * element_size_;
  auto* const to = reinterpret_cast<uint8_t*>(out_.data()) + (next_row_ - first_row_) * cols_ * element_size_;
  if (slice.in_region()) {
    const uint8_t* const from = Find(slice, in_region, first_row, bytes);
    if (from == nullptr || !payload->empty()) {
      return ServerSent("rows in a region for tensor rows [", slice.rows().begin(), ", ", slice.rows().end(),
                        "), which are not in one");
    }
    std::memcpy(to, from, bytes);
  } else if (payload->size() != bytes) {
    return ServerSent(errors::ExactBytes(payload->size()), " of tensor; ", bytes, " were expected");
  } else {
    payload->CopyTo(to);
  }
  next_row_ = slice.rows().end();
  return absl::OkStatus();
}

const uint8_t* TensorReader::Find(const v1::TensorSlice& slice, absl::Span<const uint8_t> in_region,
                                  uint64_t first_row, uint64_t bytes) const {
  if (slice.rows().begin() < first_row) return nullptr;
  const uint64_t before = (slice.rows().begin() - first_row) * cols_ * element_size_;
  if (before > in_region.size() || bytes > in_region.size() - before) return nullptr;
  return in_region.data() + before;
}

absl::StatusOr<TensorShape> TensorReader::End() const {
  if (!begun_) {
    if (out_.empty()) return TensorShape{};
    return ServerSent("no tensor rows; ", errors::ExactBytes(out_.size()), " were expected");
  }
  if (next_row_ != end_row_) {
    return ServerSent("tensor rows up to ", next_row_, "; rows up to ", end_row_, " were expected");
  }
  return TensorShape{end_row_ - first_row_, cols_};
}

absl::Status TensorReader::Begin(const v1::TensorSlice& slice) {
  first_row_ = request_.has_rows() ? request_.rows().begin() : 0;
  end_row_ = request_.has_rows() ? request_.rows().end() : slice.tensor_rows();
  next_row_ = first_row_;
  cols_ = slice.tensor_cols();
  const uint64_t rows = end_row_ - first_row_;
  if (tensor_rows_.has_value() && *tensor_rows_ != slice.tensor_rows()) {
    return OtherShape(slice);
  }
  if (end_row_ < first_row_ || end_row_ > slice.tensor_rows() || cols_ == 0) {
    return ServerSent("a tensor of ", slice.tensor_rows(), " x ", cols_, " for rows up to ", end_row_);
  }
  // Divides rather than multiplies: the numbers are the server's and may overflow.
  if (out_.size() / element_size_ / cols_ != rows || out_.size() % (element_size_ * cols_) != 0) {
    if (tensor_rows_.has_value()) return OtherShape(slice);
    return ArgumentError("out", out_.size(),
                         absl::StrCat("has ", errors::ExactBytes(out_.size()), "; the rows have ", rows,
                                      " x ", cols_, " elements of ", element_size_, " bytes"));
  }
  begun_ = true;
  state_ = slice.state();
  return absl::OkStatus();
}

absl::Status TensorReader::OtherShape(const v1::TensorSlice& slice) const {
  return absl::AbortedError(
      absl::StrCat("head \"", request_.head(), "\" was made again during the call: its tensor has ",
                   slice.tensor_rows(), " x ", slice.tensor_cols(), " values, which is not what it had"));
}

absl::Status TensorReader::CheckVersion(const v1::HeadState& state) const {
  const auto version = [this](const v1::HeadState& at) {
    const uint64_t number = request_.role() == v1::ROLE_GRADIENT ? at.generation() : at.weights_version();
    return std::make_tuple(at.incarnation(), number, number != 0 ? 0 : at.step());
  };
  if (version(state_) == version(state)) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("the tensor of head \"", request_.head(), "\" changed while it was read"));
}

}  // namespace lossd::client::internal
