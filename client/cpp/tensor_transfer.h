// SPDX-License-Identifier: Apache-2.0
// Reads, writes and adds to a head's tensors in slices, between the wire and the caller's memory: the
// transfers, their messages (TensorReader, EncodeRows), and the blocking gRPC call below them
// (BlockingStream).
//
// The transfers block, and try once. Functions are thread-safe; the classes are thread-compatible.
#ifndef LOSSD_CLIENT_CPP_TENSOR_TRANSFER_H_
#define LOSSD_CLIENT_CPP_TENSOR_TRANSFER_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/byte_buffer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client_options.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "lossd/v1/head.pb.h"
#include "proto/wire/payload_codec.h"

namespace lossd::client::internal {

// The shape of a parameter of a head. INVALID_ARGUMENT if the value is no parameter.
absl::StatusOr<TensorShape> ParamShape(const v1::HeadSpec& spec, v1::Param param);

// INVALID_ARGUMENT, naming "rows" or "values", if a parameter of the shape `whole` has not these rows (null:
// all), or if `values` is not the shape of an array for them; empty: it is not known.
absl::Status CheckShape(absl::string_view head, v1::Param param, const v1::RowRange* rows, TensorShape whole,
                        absl::Span<const uint64_t> values);

// INTERNAL if the tensor has not `tensor_rows` rows, if that is known.
absl::StatusOr<TensorShape> ReadTensor(const Core& core, const v1::ReadTensorRequest& request,
                                       absl::Span<char> out, absl::Time deadline,
                                       std::optional<uint64_t> tensor_rows = std::nullopt);

// `shape` is the whole tensor's.
absl::StatusOr<v1::WriteTensorResponse> WriteTensor(const Core& core, const v1::OpenTensor& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline);

// The same for a gradient.
absl::StatusOr<v1::AddGradientResponse> AddGradient(const Core& core, const v1::OpenGradient& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline);

// The functions below and TensorReader are the messages of tensor transfers, apart from gRPC: rows on their
// way to the server, rows that come from it, and its one answer. tests/client/golden/messages.json and
// tensor_answers.json have cases.

// Bytes of one element of a tensor on the wire; unspecified is fp32. 0 for unknown values.
size_t WireElementSize(v1::DType dtype);

// Bytes of whole rows of `row_bytes` that one message carries: about 1 MiB, at least one row.
uint64_t TensorMessageBytes(uint64_t row_bytes);

// The message that continues `payload`, whole rows, behind its first `sent` bytes; the first one, at 0, has
// `open` and is sent even if the payload is empty. Request is WriteTensorRequest or AddGradientRequest.
// References the payload; `release` runs once, on any thread, when nothing refers to it any more.
template <typename Request, typename Open>
grpc::ByteBuffer EncodeRows(const Open& open, absl::Span<const char> payload, uint64_t row_bytes,
                            uint64_t sent, absl::AnyInvocable<void()> release) {
  Request request;
  if (sent == 0) *request.mutable_open() = open;
  const uint64_t size = std::min<uint64_t>(TensorMessageBytes(row_bytes), payload.size() - sent);
  const auto* bytes = reinterpret_cast<const uint8_t*>(payload.data()) + sent;
  return wire::Encode(request, absl::MakeConstSpan(bytes, size), std::move(release));
}

// The one answer to a tensor that was sent. INTERNAL if there is another number of them.
template <typename Response>
absl::StatusOr<Response> OneAnswer(const std::vector<grpc::ByteBuffer>& answers) {
  if (answers.size() != 1) {
    return ServerSent(answers.size(), " answers to one tensor");
  }
  Response response;
  const absl::StatusOr<wire::PayloadView> payload = wire::Decode(answers[0], &response);
  if (payload.ok()) return response;
  return ServerSent("an unreadable message: ", payload.status().message());
}

// Puts the slices of ReadTensor calls where they belong: of one call, or of several that read the rows piece
// by piece.
//
// Thread-compatible. Errors are INTERNAL and say what the server sent, but for INVALID_ARGUMENT if `out` has
// not the size of the rows asked for, and ABORTED if the tensor has changed under the calls. After an error
// the contents of `out` are unspecified.
class TensorReader {
 public:
  // `request` and `out` must outlive this. request.dtype is one of the known ones. `tensor_rows`: how many
  // the tensor has, if that is known.
  TensorReader(const v1::ReadTensorRequest& request, absl::Span<char> out,
               std::optional<uint64_t> tensor_rows = std::nullopt);

  // `in_region`: the rows of the call that begin with `first_row` lie there if the message says so; empty: it
  // may not say so.
  absl::Status Handle(const grpc::ByteBuffer& message, absl::Span<const uint8_t> in_region = {},
                      uint64_t first_row = 0);
  // The shape read, once the server has ended the last call with OK.
  absl::StatusOr<TensorShape> End() const;

 private:
  absl::Status Begin(const v1::TensorSlice& slice);
  // The rows of a slice where they lie in the region, `bytes` of them; null: they do not lie in it.
  const uint8_t* Find(const v1::TensorSlice& slice, absl::Span<const uint8_t> in_region, uint64_t first_row,
                      uint64_t bytes) const;
  // ABORTED: the tensor is not the one that was described before the call.
  absl::Status OtherShape(const v1::TensorSlice& slice) const;
  // All slices are of one version: of the gradients or of the weights; of the step, if the server says
  // neither.
  absl::Status CheckVersion(const v1::HeadState& state) const;

  const v1::ReadTensorRequest& request_;
  const uint64_t element_size_;
  const absl::Span<char> out_;
  const std::optional<uint64_t> tensor_rows_;
  bool begun_ = false;
  v1::HeadState state_;  // of the first slice
  uint64_t first_row_ = 0;
  uint64_t next_row_ = 0;
  uint64_t end_row_ = 0;
  uint64_t cols_ = 0;
};

// A bidirectional gRPC call over raw byte buffers, used from one thread that blocks: for tensor transfers,
// where the generated stubs would copy payloads through strings.
//
// Thread-compatible. One thread writes and reads, in any order.
class BlockingStream {
 public:
  BlockingStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const Peer& peer,
                 absl::Time deadline);
  // Cancels if Finish was not called.
  ~BlockingStream();
  BlockingStream(const BlockingStream&) = delete;
  BlockingStream& operator=(const BlockingStream&) = delete;

  // False if the call has ended; Finish tells why. Write takes the buffer's references until it returns, the
  // transport possibly longer.
  bool Write(const grpc::ByteBuffer& buffer);
  bool WritesDone();
  bool Read(grpc::ByteBuffer* buffer);

  void Cancel() { context_.TryCancel(); }
  // The server's status. Waits for it: call after Read returned false, or after Cancel.
  absl::Status Finish();

 private:
  class Reactor : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    void OnReadDone(bool ok) override { Complete(ok); }
    void OnWriteDone(bool ok) override { Complete(ok); }
    void OnWritesDoneDone(bool ok) override { Complete(ok); }
    void OnDone(const grpc::Status& status) override;

    // The outcome of the one operation under way.
    bool Await();
    grpc::Status AwaitDone();

   private:
    void Complete(bool ok);

    absl::Mutex mu_;
    bool complete_ ABSL_GUARDED_BY(mu_) = false;
    bool ok_ ABSL_GUARDED_BY(mu_) = false;
    bool done_ ABSL_GUARDED_BY(mu_) = false;
    grpc::Status status_ ABSL_GUARDED_BY(mu_);
  };

  const Peer peer_;
  grpc::ClientContext context_;
  const CancellableContext cancellable_{&context_};
  grpc::GenericStub stub_;
  Reactor reactor_;
  bool finished_ = false;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_TENSOR_TRANSFER_H_
