// SPDX-License-Identifier: Apache-2.0
// The messages of tensor transfers, apart from gRPC: rows on their way to the server, rows that come from it,
// and its one answer.
//
// client/python/src/lossd/_tensor_messages.py does the same; tests/client/golden/wire.json and answers.json
// hold both to it.
#ifndef LOSSD_CLIENT_CPP_TENSOR_MESSAGES_H_
#define LOSSD_CLIENT_CPP_TENSOR_MESSAGES_H_

#include <grpcpp/support/byte_buffer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/server_sent.h"
#include "lossd/v1/head.pb.h"
#include "proto/wire/payload_codec.h"

namespace lossd::client::internal {

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
  // All slices are of one version: of the gradients or of the weights; of the step, if the server says
  // neither.
  // ABORTED: the tensor is not the one that was described before the call.
  absl::Status OtherShape(const v1::TensorSlice& slice) const;
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

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_TENSOR_MESSAGES_H_
