// SPDX-License-Identifier: Apache-2.0
// The transfers of tensors between a Client (client.h) and its server: ReadTensor, WriteTensor and
// AddGradient, each in slices of rows, from or to the caller's memory. Below them are their messages
// (TensorReader, EncodeRows) and the blocking gRPC call that carries them (BlockingStream).
//
// The transfers block, and do not repeat a call that fails. Functions are thread-safe; the classes are
// thread-compatible.
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

// The shape of a parameter of a head. INVALID_ARGUMENT if `param` is not a parameter.
absl::StatusOr<TensorShape> ParamShape(const v1::HeadSpec& spec, v1::Param param);

// Checks a write to a parameter with the shape `whole`. `rows`: the rows to write; null: all rows. `values`:
// the shape of the caller's array; empty: not known, and not checked. INVALID_ARGUMENT, naming "rows", if the
// parameter does not have these rows; or naming "values", if the array does not have the shape of these rows.
absl::Status CheckShape(absl::string_view head, v1::Param param, const v1::RowRange* rows, TensorShape whole,
                        absl::Span<const uint64_t> values);

// Reads the rows that `request` names into `out`, and returns the shape of what was read. `tensor_rows` is
// the number of rows of the tensor, if the caller knows it; ABORTED if the tensor has another shape by now.
absl::StatusOr<TensorShape> ReadTensor(const Core& core, const v1::ReadTensorRequest& request,
                                       absl::Span<char> out, absl::Time deadline,
                                       std::optional<uint64_t> tensor_rows = std::nullopt);

// Writes `payload` to the rows that `open` names. `shape` is the shape of the whole tensor.
absl::StatusOr<v1::WriteTensorResponse> WriteTensor(const Core& core, const v1::OpenTensor& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline);

// Adds `payload` to a gradient, in the same way.
absl::StatusOr<v1::AddGradientResponse> AddGradient(const Core& core, const v1::OpenGradient& open,
                                                    TensorShape shape, absl::Span<const char> payload,
                                                    absl::Time deadline);

// The functions below and TensorReader encode and decode the messages of tensor transfers, without gRPC: rows
// that go to the server, rows that come from it, and its one answer. tests/client/golden/messages.json and
// tensor_answers.json have cases.

// Bytes of one element of a tensor on the wire. DTYPE_UNSPECIFIED means fp32; 0 for unknown values.
size_t WireElementSize(v1::DType dtype);

// The bytes of payload in one message: as many whole rows of `row_bytes` as fit into about 1 MiB, at least
// one row.
uint64_t TensorMessageBytes(uint64_t row_bytes);

// Encodes the message that follows after the first `sent` bytes of `payload` have been sent. Payloads and
// messages have whole rows. The first message (`sent` is 0) contains `open`, and is sent even if the payload
// is empty. Request is WriteTensorRequest or AddGradientRequest. The message references the payload;
// `release` runs once, on any thread, when the message does not need it any more.
template <typename Request, typename Open>
grpc::ByteBuffer EncodeRows(const Open& open, absl::Span<const char> payload, uint64_t row_bytes,
                            uint64_t sent, absl::AnyInvocable<void()> release) {
  Request request;
  if (sent == 0) *request.mutable_open() = open;
  const uint64_t size = std::min<uint64_t>(TensorMessageBytes(row_bytes), payload.size() - sent);
  const auto* bytes = reinterpret_cast<const uint8_t*>(payload.data()) + sent;
  return wire::Encode(request, absl::MakeConstSpan(bytes, size), std::move(release));
}

// Decodes the one answer to a tensor that was sent. INTERNAL if there is not exactly one answer.
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

// Copies the slices that ReadTensor calls receive to their places in the caller's memory. The slices may come
// from one call, or from several calls that read the rows piece by piece.
//
// Thread-compatible. Errors: INVALID_ARGUMENT if `out` does not have the size of the requested rows; ABORTED
// if the tensor has changed during the calls; all others are INTERNAL and say what the server sent. After an
// error the contents of `out` are unspecified.
class TensorReader {
 public:
  // `request` and `out` must outlive this object. request.dtype must be a known dtype. `tensor_rows` is the
  // number of rows of the tensor, if the caller knows it.
  TensorReader(const v1::ReadTensorRequest& request, absl::Span<char> out,
               std::optional<uint64_t> tensor_rows = std::nullopt);

  // Handles one message. Its rows are in the message, or the message says that the server has written them to
  // shared memory (a region). `in_region` is the part of the region that the call offered for its rows, and
  // begins with row `first_row`. Empty: the call offered none, so rows in a region are an error.
  absl::Status Handle(const grpc::ByteBuffer& message, absl::Span<const uint8_t> in_region = {},
                      uint64_t first_row = 0);
  // The shape that was read. Call it when the server has ended the last call with OK.
  absl::StatusOr<TensorShape> End() const;

 private:
  absl::Status Begin(const v1::TensorSlice& slice);
  // The address in the region of the rows of a slice, which have `bytes`; null: they do not lie there.
  const uint8_t* Find(const v1::TensorSlice& slice, absl::Span<const uint8_t> in_region, uint64_t first_row,
                      uint64_t bytes) const;
  // The ABORTED error that the tensor does not have the shape that was described before the call.
  absl::Status OtherShape(const v1::TensorSlice& slice) const;
  // Checks that all slices are of one version: of the gradients or of the weights, or of the step if the
  // server sends neither version.
  absl::Status CheckVersion(const v1::HeadState& state) const;

  const v1::ReadTensorRequest& request_;
  const uint64_t element_size_;
  const absl::Span<char> out_;
  const std::optional<uint64_t> tensor_rows_;
  bool begun_ = false;
  v1::HeadState state_;  // the state in the first slice
  uint64_t first_row_ = 0;
  uint64_t next_row_ = 0;
  uint64_t end_row_ = 0;
  uint64_t cols_ = 0;
};

// A bidirectional gRPC call over raw byte buffers, for one thread that blocks. Tensor transfers use it,
// because the generated stubs would copy payloads through strings.
//
// Thread-compatible. One thread writes and reads, in any order.
class BlockingStream {
 public:
  BlockingStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const Peer& peer,
                 absl::Time deadline);
  // Cancels the call if Finish was not called.
  ~BlockingStream();
  BlockingStream(const BlockingStream&) = delete;
  BlockingStream& operator=(const BlockingStream&) = delete;

  // These return false if the call has ended; Finish returns the reason. Write does not need `buffer` after
  // it has returned, but the transport may hold references to the buffer's slices for longer.
  bool Write(const grpc::ByteBuffer& buffer);
  bool WritesDone();
  bool Read(grpc::ByteBuffer* buffer);

  void Cancel() { context_.TryCancel(); }
  // Waits for the server's status and returns it. Call it after Read has returned false, or after Cancel.
  absl::Status Finish();

 private:
  class Reactor : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    void OnReadDone(bool ok) override { Complete(ok); }
    void OnWriteDone(bool ok) override { Complete(ok); }
    void OnWritesDoneDone(bool ok) override { Complete(ok); }
    void OnDone(const grpc::Status& status) override;

    // Waits for the one operation under way; whether it succeeded.
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
