// SPDX-License-Identifier: Apache-2.0
// Transfers of tensors (tensor_transfer.h): the calls, their messages, and the blocking stream.
#include "client/cpp/tensor_transfer.h"

#include <cstring>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cpp/loss_call.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/regions.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::client::internal {

// ---- Transfers ----

namespace {

constexpr char kReadMethod[] = "/lossd.v1.HeadService/ReadTensor";
constexpr char kWriteMethod[] = "/lossd.v1.HeadService/WriteTensor";
constexpr char kAddMethod[] = "/lossd.v1.HeadService/AddGradient";

constexpr uint64_t kLeastShared = 1 << 20;  // smaller tensors do not use a region
constexpr uint64_t kPieceBytes = 16 << 20;  // reads ask for a region for at most such pieces
constexpr uint64_t kPiecesPerRegion = 4;    // leaves room for loss computations

// Sends the payload in messages of whole rows; the first message has `open`. Returns early if the call ends.
template <typename Request, typename Open>
void WritePayload(const Open& open, absl::Span<const char> payload, uint64_t row_bytes, PayloadHolds* holds,
                  BlockingStream* stream) {
  uint64_t sent = 0;
  do {  // an empty payload also takes one message
    if (!stream->Write(EncodeRows<Request>(open, payload, row_bytes, sent, holds->Take()))) return;
    sent += TensorMessageBytes(row_bytes);
  } while (sent < payload.size());
  stream->WritesDone();
}

// Reads the one answer of a call, and its status.
template <typename Response>
absl::StatusOr<Response> ReadResponse(BlockingStream* stream) {
  std::vector<grpc::ByteBuffer> answers;
  grpc::ByteBuffer buffer;
  while (stream->Read(&buffer)) answers.push_back(buffer);
  LOSSD_RETURN_IF_ERROR(stream->Finish());
  return OneAnswer<Response>(answers);
}

absl::Status NoDType(v1::DType dtype) {
  return ArgumentError("dtype", static_cast<int>(dtype),
                       absl::StrCat("is ", static_cast<int>(dtype), ", not a dtype"));
}

// The bytes of one row of `cols` elements. INVALID_ARGUMENT unless the payload has exactly `rows` rows.
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
  // The call has ended, but gRPC may still refer to the caller's payload.
  holds->WaitUntilFree();
  return response;
}

// Makes one ReadTensor call, and gives its answers to `reader`. `in_region`: the part of a region where the
// rows may lie.
absl::Status ReadRows(const Core& core, const v1::ReadTensorRequest& request,
                      absl::Span<const uint8_t> in_region, absl::Time deadline, TensorReader* reader) {
  BlockingStream stream(core.connections().channel(0), kReadMethod, core.connections().peer(), deadline);
  if (stream.Write(wire::Encode(request))) stream.WritesDone();
  grpc::ByteBuffer buffer;
  while (stream.Read(&buffer)) {
    absl::Status status = reader->Handle(buffer, in_region, request.rows().begin());
    if (!status.ok()) return status;  // the stream's destructor cancels the call
  }
  return stream.Finish();
}

// Reads the rows through the region, piece by piece, each with a call of its own. When a piece finds no room
// in the region, all the rows that are left come in messages. nullopt: the arguments are wrong. A read
// without a region then says why, in an error that does not name the region's fields.
absl::StatusOr<std::optional<TensorShape>> ReadThroughRegion(const Core& core,
                                                             const v1::ReadTensorRequest& request,
                                                             absl::Span<char> out, SharedRegion* region,
                                                             absl::Time deadline,
                                                             std::optional<uint64_t> tensor_rows) {
  const Rows all{request.rows().begin(), request.rows().end()};
  if (all.end <= all.begin || out.size() % all.size() != 0) return std::nullopt;
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
    // After most errors the server may still write to the piece's place. Not if it has refused the arguments.
    if (!status.ok()) region->AfterFailure(status, offset.has_value() && !absl::IsInvalidArgument(status));
    if (offset.has_value() && region->usable()) region->Give(*offset);
    if (absl::IsInvalidArgument(status)) return std::nullopt;
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

absl::Status CheckShape(absl::string_view head, v1::Param param, const v1::RowRange* rows, TensorShape whole,
                        absl::Span<const uint64_t> values) {
  const std::string name =
      absl::AsciiStrToLower(absl::StripPrefix(v1::Param_Name(param), "PARAM_"));  // "norm_gain"
  const std::string of_head = absl::StrCat(name, " of head \"", head, "\"");
  if (rows != nullptr && (rows->begin() > rows->end() || rows->end() > whole.rows)) {
    const std::string text = absl::StrCat("[", rows->begin(), ", ", rows->end(), ")");
    return ArgumentError("rows", text,
                         absl::StrCat("is ", text, "; ", of_head, " has rows [0, ", whole.rows, ")"));
  }
  if (values.empty()) return absl::OkStatus();
  std::vector<uint64_t> wanted = {rows == nullptr ? whole.rows : rows->end() - rows->begin()};
  if (param == v1::PARAM_WEIGHT) wanted.push_back(whole.cols);
  if (values == absl::MakeConstSpan(wanted)) return absl::OkStatus();
  const std::string text = absl::StrCat("[", absl::StrJoin(values, ", "), "]");
  return ArgumentError(
      "values", text,
      absl::StrCat("has shape ", text, "; ", of_head, " takes [", absl::StrJoin(wanted, ", "), "]"));
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
    absl::StatusOr<std::optional<TensorShape>> read = std::nullopt;
    if (region != nullptr) read = ReadThroughRegion(core, request, out, region.get(), deadline, tensor_rows);
    core.connections().regions().DropUnusable();
    if (!read.ok()) return read.status();
    if (read->has_value()) return **read;
  }
  TensorReader reader(request, out, tensor_rows);
  LOSSD_RETURN_IF_ERROR(ReadRows(core, request, {}, deadline, &reader));
  return reader.End();
}

absl::StatusOr<v1::WriteTensorResponse> WriteTensor(const Core& core, const v1::OpenTensor& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline) {
  const uint64_t rows = open.has_rows() ? open.rows().end() - open.rows().begin() : shape.rows;
  LOSSD_TRY(const uint64_t row_bytes, RowBytes(open.dtype(), shape.cols, rows, payload));
  return SendRows<v1::WriteTensorRequest, v1::WriteTensorResponse>(core, kWriteMethod, open, row_bytes,
                                                                   payload, deadline);
}

absl::StatusOr<v1::AddGradientResponse> AddGradient(const Core& core, const v1::OpenGradient& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline) {
  uint64_t rows = shape.rows;
  if (open.has_contribution_rows()) rows = open.contribution_rows().end() - open.contribution_rows().begin();
  if (open.has_rows()) rows = open.rows().end() - open.rows().begin();
  LOSSD_TRY(const uint64_t row_bytes, RowBytes(open.dtype(), shape.cols, rows, payload));
  return SendRows<v1::AddGradientRequest, v1::AddGradientResponse>(core, kAddMethod, open, row_bytes, payload,
                                                                   deadline);
}

// ---- Messages ----

namespace {

constexpr uint64_t kWriteBytes = 1 << 20;  // payload of a message

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
  if (!begun_) LOSSD_RETURN_IF_ERROR(Begin(slice));
  LOSSD_RETURN_IF_ERROR(CheckVersion(slice.state()));
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
  // Divides and does not multiply, because the numbers come from the server and products may overflow.
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
  // A server that sends no number of the version (0) is compared by its step.
  const auto version = [this](const v1::HeadState& at) {
    const uint64_t number = request_.role() == v1::ROLE_GRADIENT ? at.generation() : at.weights_version();
    return std::make_tuple(at.incarnation(), number, number != 0 ? 0 : at.step());
  };
  if (version(state_) == version(state)) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("the tensor of head \"", request_.head(), "\" changed while it was read"));
}

// ---- BlockingStream ----

BlockingStream::BlockingStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                               const Peer& peer, absl::Time deadline)
    : peer_(peer), stub_(channel) {
  SetDeadline(deadline, &context_);
  stub_.PrepareBidiStreamingCall(&context_, method, {}, &reactor_);
  reactor_.AddHold();  // needed, because operations start outside of reactions
  reactor_.StartCall();
}

BlockingStream::~BlockingStream() {
  if (finished_) return;
  Cancel();
  (void)Finish();
}

bool BlockingStream::Write(const grpc::ByteBuffer& buffer) {
  reactor_.StartWrite(&buffer);
  return reactor_.Await();
}

bool BlockingStream::WritesDone() {
  reactor_.StartWritesDone();
  return reactor_.Await();
}

bool BlockingStream::Read(grpc::ByteBuffer* buffer) {
  reactor_.StartRead(buffer);
  return reactor_.Await();
}

absl::Status BlockingStream::Finish() {
  finished_ = true;
  reactor_.RemoveHold();
  return CallStatus(reactor_.AwaitDone(), peer_);
}

void BlockingStream::Reactor::OnDone(const grpc::Status& status) {
  absl::MutexLock lock(&mu_);
  status_ = status;
  done_ = true;
}

void BlockingStream::Reactor::Complete(bool ok) {
  absl::MutexLock lock(&mu_);
  ok_ = ok;
  complete_ = true;
}

bool BlockingStream::Reactor::Await() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&complete_));
  complete_ = false;
  return ok_;
}

grpc::Status BlockingStream::Reactor::AwaitDone() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&done_));
  return status_;
}

}  // namespace lossd::client::internal
