// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tensor_transfer.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/argument_error.h"
#include "client/cpp/blocking_stream.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/payload_holds.h"
#include "client/cpp/shared_region.h"
#include "client/cpp/tensor_messages.h"
#include "kernels/errors/bytes.h"
#include "proto/wire/payload_codec.h"

namespace lossd::client::internal {
namespace {

constexpr char kReadMethod[] = "/lossd.v1.HeadService/ReadTensor";
constexpr char kWriteMethod[] = "/lossd.v1.HeadService/WriteTensor";
constexpr char kAddMethod[] = "/lossd.v1.HeadService/AddGradient";

constexpr uint64_t kLeastShared = 1 << 20;  // bytes of a tensor that is worth a region
constexpr uint64_t kPieceBytes = 16 << 20;  // for larger pieces no larger region is asked for
constexpr uint64_t kPiecesPerRegion = 4;    // so that loss computations find room beside it

// Sends the payload in messages of whole rows, the first of which has `open`; returns early if the call ends.
template <typename Request, typename Open>
void WritePayload(const Open& open, absl::Span<const char> payload, uint64_t row_bytes, PayloadHolds* holds,
                  BlockingStream* stream) {
  uint64_t sent = 0;
  do {
    if (!stream->Write(EncodeRows<Request>(open, payload, row_bytes, sent, holds->Take()))) return;
    sent += TensorMessageBytes(row_bytes);
  } while (sent < payload.size());
  stream->WritesDone();
}

// The one answer of a call, unless its status is an error.
template <typename Response>
absl::StatusOr<Response> ReadResponse(BlockingStream* stream) {
  std::vector<grpc::ByteBuffer> answers;
  grpc::ByteBuffer buffer;
  while (stream->Read(&buffer)) answers.push_back(buffer);
  absl::Status status = stream->Finish();
  if (!status.ok()) return status;
  return OneAnswer<Response>(answers);
}

absl::Status NoDType(v1::DType dtype) {
  return ArgumentError("dtype", static_cast<int>(dtype),
                       absl::StrCat("is ", static_cast<int>(dtype), ", not a dtype"));
}

// The bytes of a row of `cols` elements, if the payload has exactly `rows` of them.
absl::StatusOr<uint64_t> RowBytes(v1::DType dtype, uint64_t cols, uint64_t rows,
                                  absl::Span<const char> payload) {
  const uint64_t row_bytes = cols * WireElementSize(dtype);
  if (WireElementSize(dtype) == 0) {
    return NoDType(dtype);
  }
  if (row_bytes == 0 || payload.size() % row_bytes != 0 || payload.size() / row_bytes != rows) {
    return ArgumentError("payload", payload.size(),
                         absl::StrCat("has ", errors::ExactBytes(payload.size()), "; ", rows, " rows of ",
                                      errors::ExactBytes(row_bytes), " were expected"));
  }
  return row_bytes;
}

template <typename Request, typename Response, typename Open>
absl::StatusOr<Response> SendRows(const Core& core, const char* method, const Open& open, uint64_t row_bytes,
                                  absl::Span<const char> payload, absl::Time deadline) {
  const auto holds = PayloadHolds::Create();
  absl::StatusOr<Response> response = absl::UnknownError("");
  {
    BlockingStream stream(core.connections().channel(0), method, core.connections().peer(), deadline);
    WritePayload<Request>(open, payload, row_bytes, holds.get(), &stream);
    response = ReadResponse<Response>(&stream);
  }
  holds->WaitUntilFree();
  return response;
}

// What one ReadTensor call answers. `in_region`: where its rows may lie.
absl::Status ReadRows(const Core& core, const v1::ReadTensorRequest& request,
                      absl::Span<const uint8_t> in_region, absl::Time deadline, TensorReader* reader) {
  BlockingStream stream(core.connections().channel(0), kReadMethod, core.connections().peer(), deadline);
  if (stream.Write(wire::Encode(request))) stream.WritesDone();
  grpc::ByteBuffer buffer;
  while (stream.Read(&buffer)) {
    absl::Status status = reader->Handle(buffer, in_region, request.rows().begin());
    if (!status.ok()) return status;  // leaving cancels the call
  }
  return stream.Finish();
}

// Reads the rows piece by piece, each by a call of its own, for which there is room in the region; what finds
// none comes in messages.
absl::StatusOr<TensorShape> ReadThroughRegion(const Core& core, const v1::ReadTensorRequest& request,
                                              absl::Span<char> out, SharedRegion* region, absl::Time deadline,
                                              std::optional<uint64_t> tensor_rows) {
  const Rows all{request.rows().begin(), request.rows().end()};
  if (all.end <= all.begin || out.size() % all.size() != 0) return absl::InvalidArgumentError("");
  const uint64_t row_bytes = out.size() / all.size();
  const uint64_t most = std::max<uint64_t>(1, region->size() / kPiecesPerRegion / row_bytes);
  TensorReader reader(request, out, tensor_rows);
  v1::ReadTensorRequest piece = request;
  for (uint64_t row = all.begin; row < all.end; row = piece.rows().end()) {
    const uint64_t rows = std::min(most, all.end - row);
    const std::optional<uint64_t> offset = region->Take(rows * row_bytes);
    piece.mutable_rows()->set_begin(row);
    piece.mutable_rows()->set_end(offset.has_value() ? row + rows : all.end);
    piece.clear_region();
    piece.clear_in_region();
    absl::Span<const uint8_t> place;
    if (offset.has_value()) {
      piece.set_region(region->id());
      piece.mutable_in_region()->set_offset(*offset);
      piece.mutable_in_region()->set_bytes(rows * row_bytes);
      place = absl::MakeConstSpan(region->At(*offset), rows * row_bytes);
    }
    const absl::Status status = ReadRows(core, piece, place, deadline, &reader);
    if (!status.ok()) region->AfterFailure(status, offset.has_value() && !absl::IsInvalidArgument(status));
    if (offset.has_value() && region->usable()) region->Give(*offset);
    if (!status.ok()) return status;
  }
  return reader.End();
}

}  // namespace

absl::StatusOr<TensorShape> ParamShape(const v1::HeadSpec& spec, v1::Param param) {
  switch (param) {
    case v1::PARAM_WEIGHT:
      return TensorShape{spec.vocab_size(), spec.hidden_size()};
    case v1::PARAM_BIAS:
    case v1::PARAM_CLASS_WEIGHTS:
      return TensorShape{spec.vocab_size(), 1};
    case v1::PARAM_NORM_GAIN:
    case v1::PARAM_NORM_SHIFT:
      return TensorShape{spec.hidden_size(), 1};
    default:
      return ArgumentError("param", static_cast<int>(param),
                           absl::StrCat("is ", static_cast<int>(param), ", not a parameter"));
  }
}

absl::StatusOr<TensorShape> ReadTensor(const Core& core, const v1::ReadTensorRequest& request,
                                       absl::Span<char> out, absl::Time deadline,
                                       std::optional<uint64_t> tensor_rows) {
  if (WireElementSize(request.dtype()) == 0) {
    return NoDType(request.dtype());
  }
  if (out.size() >= kLeastShared && request.has_rows()) {
    const std::shared_ptr<SharedRegion> region =
        core.connections().regions().Get(std::min<uint64_t>(out.size(), kPieceBytes));
    auto read = region == nullptr
                    ? absl::InvalidArgumentError("")
                    : ReadThroughRegion(core, request, out, region.get(), deadline, tensor_rows);
    core.connections().regions().DropUnusable();
    // Whatever is wrong with the arguments, it is told without the region's.
    if (!absl::IsInvalidArgument(read.status())) return read;
  }
  TensorReader reader(request, out, tensor_rows);
  if (absl::Status status = ReadRows(core, request, {}, deadline, &reader); !status.ok()) return status;
  return reader.End();
}

absl::StatusOr<v1::WriteTensorResponse> WriteTensor(const Core& core, const v1::OpenTensor& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline) {
  const uint64_t rows = open.has_rows() ? open.rows().end() - open.rows().begin() : shape.rows;
  const absl::StatusOr<uint64_t> row_bytes = RowBytes(open.dtype(), shape.cols, rows, payload);
  if (!row_bytes.ok()) return row_bytes.status();
  return SendRows<v1::WriteTensorRequest, v1::WriteTensorResponse>(core, kWriteMethod, open, *row_bytes,
                                                                   payload, deadline);
}

absl::StatusOr<v1::AddGradientResponse> AddGradient(const Core& core, const v1::OpenGradient& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline) {
  uint64_t rows = shape.rows;
  if (open.has_contribution_rows()) rows = open.contribution_rows().end() - open.contribution_rows().begin();
  if (open.has_rows()) rows = open.rows().end() - open.rows().begin();
  const absl::StatusOr<uint64_t> row_bytes = RowBytes(open.dtype(), shape.cols, rows, payload);
  if (!row_bytes.ok()) return row_bytes.status();
  return SendRows<v1::AddGradientRequest, v1::AddGradientResponse>(core, kAddMethod, open, *row_bytes,
                                                                   payload, deadline);
}

}  // namespace lossd::client::internal
