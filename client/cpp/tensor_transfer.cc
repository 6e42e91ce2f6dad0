#include "client/cpp/tensor_transfer.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "client/cpp/blocking_stream.h"
#include "client/cpp/payload_holds.h"
#include "proto/wire/payload_codec.h"

namespace lossd::client::internal {
namespace {

constexpr char kReadMethod[] = "/lossd.v1.HeadService/ReadTensor";
constexpr char kWriteMethod[] = "/lossd.v1.HeadService/WriteTensor";
constexpr char kAddMethod[] = "/lossd.v1.HeadService/AddGradient";
constexpr uint64_t kWriteBytes = 1 << 20;  // of payload per message

template <typename... Args>
absl::Status ServerSent(const Args&... args) {
  return absl::InternalError(absl::StrCat("server sent ", args...));
}

size_t WireElementSize(v1::DType dtype) {
  return ElementSize(dtype == v1::DTYPE_UNSPECIFIED ? v1::DTYPE_FP32 : dtype);
}

// Puts the slices of one ReadTensor call where they belong.
class Reader {
 public:
  Reader(const v1::ReadTensorRequest& request, absl::Span<char> out)
      : request_(request), element_size_(WireElementSize(request.dtype())), out_(out) {}

  absl::Status Handle(const v1::TensorSlice& slice, const wire::PayloadView& payload) {
    if (!begun_) {
      if (absl::Status status = Begin(slice); !status.ok()) return status;
    }
    if (slice.rows().begin() != next_row_ || slice.rows().end() < next_row_ ||
        slice.rows().end() > end_row_) {
      return ServerSent("tensor rows [", slice.rows().begin(), ", ", slice.rows().end(), "); row ", next_row_,
                        " was expected next, of rows up to ", end_row_);
    }
    const uint64_t bytes = (slice.rows().end() - next_row_) * cols_ * element_size_;
    if (payload.size() != bytes)
      return ServerSent(payload.size(), " bytes of tensor; ", bytes, " were expected");
    payload.CopyTo(reinterpret_cast<uint8_t*>(out_.data()) +
                   (next_row_ - first_row_) * cols_ * element_size_);
    next_row_ = slice.rows().end();
    return absl::OkStatus();
  }

  absl::StatusOr<TensorShape> End() const {
    if (!begun_) {
      if (out_.empty()) return TensorShape{};
      return ServerSent("no tensor rows; ", out_.size(), " bytes were expected");
    }
    if (next_row_ != end_row_) {
      return ServerSent("tensor rows up to ", next_row_, "; rows up to ", end_row_, " were expected");
    }
    return TensorShape{end_row_ - first_row_, cols_};
  }

 private:
  absl::Status Begin(const v1::TensorSlice& slice) {
    first_row_ = request_.has_rows() ? request_.rows().begin() : 0;
    end_row_ = request_.has_rows() ? request_.rows().end() : slice.tensor_rows();
    next_row_ = first_row_;
    cols_ = slice.tensor_cols();
    const uint64_t rows = end_row_ - first_row_;
    if (end_row_ < first_row_ || end_row_ > slice.tensor_rows() || cols_ == 0) {
      return ServerSent("a tensor of ", slice.tensor_rows(), " x ", cols_, " for rows up to ", end_row_);
    }
    // Divides rather than multiplies: the numbers are the server's and may overflow.
    if (out_.size() / element_size_ / cols_ != rows || out_.size() % (element_size_ * cols_) != 0) {
      return absl::InvalidArgumentError(absl::StrCat("out has ", out_.size(), " bytes; the rows have ", rows,
                                                     " x ", cols_, " elements of ", element_size_, " bytes"));
    }
    begun_ = true;
    return absl::OkStatus();
  }

  const v1::ReadTensorRequest& request_;
  const uint64_t element_size_;
  const absl::Span<char> out_;
  bool begun_ = false;
  uint64_t first_row_ = 0;
  uint64_t next_row_ = 0;
  uint64_t end_row_ = 0;
  uint64_t cols_ = 0;
};

// Sends the payload in messages of whole rows, the first of which has `open`; returns early if the call ends.
template <typename Request, typename Open>
void WritePayload(const Open& open, absl::Span<const char> payload, uint64_t row_bytes, PayloadHolds* holds,
                  BlockingStream* stream) {
  const uint64_t chunk = std::max<uint64_t>(1, kWriteBytes / row_bytes) * row_bytes;
  const auto* bytes = reinterpret_cast<const uint8_t*>(payload.data());
  uint64_t sent = 0;
  do {
    Request request;
    if (sent == 0) *request.mutable_open() = open;
    const uint64_t size = std::min<uint64_t>(chunk, payload.size() - sent);
    if (!stream->Write(wire::Encode(request, absl::MakeConstSpan(bytes + sent, size), holds->Take()))) return;
    sent += size;
  } while (sent < payload.size());
  stream->WritesDone();
}

// The one answer of a call, then its status.
template <typename Response>
absl::StatusOr<Response> ReadResponse(BlockingStream* stream) {
  grpc::ByteBuffer buffer;
  std::optional<Response> response;
  absl::Status unreadable;
  while (stream->Read(&buffer)) {
    response.emplace();
    unreadable.Update(wire::Decode(buffer, &*response).status());
  }
  absl::Status status = stream->Finish();
  if (!status.ok()) return status;
  if (!unreadable.ok()) return ServerSent("an unreadable message: ", unreadable.message());
  if (!response.has_value()) return ServerSent("no answer before it ended the call");
  return *std::move(response);
}

// The bytes of a row of `cols` elements, if the payload has exactly `rows` of them.
absl::StatusOr<uint64_t> RowBytes(v1::DType dtype, uint64_t cols, uint64_t rows,
                                  absl::Span<const char> payload) {
  const uint64_t row_bytes = cols * WireElementSize(dtype);
  if (WireElementSize(dtype) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("dtype is ", static_cast<int>(dtype), ", not a dtype"));
  }
  if (row_bytes == 0 || payload.size() % row_bytes != 0 || payload.size() / row_bytes != rows) {
    return absl::InvalidArgumentError(absl::StrCat("payload has ", payload.size(), " bytes; ", rows,
                                                   " rows of ", row_bytes, " bytes were expected"));
  }
  return row_bytes;
}

template <typename Request, typename Response, typename Open>
absl::StatusOr<Response> SendRows(const Core& core, const char* method, const Open& open, uint64_t row_bytes,
                                  absl::Span<const char> payload, absl::Time deadline) {
  const auto holds = PayloadHolds::Create();
  absl::StatusOr<Response> response = absl::UnknownError("");
  {
    BlockingStream stream(core.connections().channel(0), method, core.options().target, deadline);
    WritePayload<Request>(open, payload, row_bytes, holds.get(), &stream);
    response = ReadResponse<Response>(&stream);
  }
  holds->WaitUntilFree();
  return response;
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
      return absl::InvalidArgumentError(
          absl::StrCat("param is ", static_cast<int>(param), ", not a parameter"));
  }
}

absl::StatusOr<TensorShape> ReadTensor(const Core& core, const v1::ReadTensorRequest& request,
                                       absl::Span<char> out, absl::Time deadline) {
  if (WireElementSize(request.dtype()) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype is ", static_cast<int>(request.dtype()), ", not a dtype"));
  }
  BlockingStream stream(core.connections().channel(0), kReadMethod, core.options().target, deadline);
  if (stream.Write(wire::Encode(request))) stream.WritesDone();
  Reader reader(request, out);
  grpc::ByteBuffer buffer;
  while (stream.Read(&buffer)) {
    v1::TensorSlice slice;
    absl::StatusOr<wire::PayloadView> payload = wire::Decode(buffer, &slice);
    if (!payload.ok()) return ServerSent("an unreadable message: ", payload.status().message());
    absl::Status status = reader.Handle(slice, *payload);
    if (!status.ok()) return status;  // leaving cancels the call
  }
  absl::Status status = stream.Finish();
  if (!status.ok()) return status;
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
