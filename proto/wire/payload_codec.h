// SPDX-License-Identifier: Apache-2.0
// Messages that carry a tensor (`bytes payload = 1000`), encoded to and decoded from gRPC byte buffers
// without protobuf touching the tensor.
//
// A message is a protobuf message like any other; only the way from memory to the wire and back is
// shorter. Sending copies no payload byte: the buffer references the caller's memory. Receiving copies
// each payload byte once, from gRPC's slices to where the caller wants it.
//
// All functions are thread-safe; a PayloadView is thread-compatible.
#ifndef LOSSD_PROTO_WIRE_PAYLOAD_CODEC_H_
#define LOSSD_PROTO_WIRE_PAYLOAD_CODEC_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::wire {

// The field number of `payload`, the same in every message that has one.
inline constexpr int kPayloadField = v1::ComputeLossRequest::kPayloadFieldNumber;

// Encodes `header`, whose payload must be unset, followed by the payload field. The bytes equal
// protobuf's own encoding of the message with the payload set (an empty payload is left out).
// Together they must stay below 2 GiB, protobuf's limit.
// The result references `payload`; its bytes must not change while the buffer or a copy of it lives.
grpc::ByteBuffer Encode(const google::protobuf::MessageLite& header, const grpc::Slice& payload);

// The same over memory of the caller. `release` runs exactly once, when no buffer references `payload`
// any more: on any thread, possibly before Encode returns; it must not block.
grpc::ByteBuffer Encode(const google::protobuf::MessageLite& header, absl::Span<const uint8_t> payload,
                        absl::AnyInvocable<void()> release);

// The same without a payload.
grpc::ByteBuffer Encode(const google::protobuf::MessageLite& header);

// The payload of a received message. Holds references to the gRPC slices it lies in.
class PayloadView {
 public:
  PayloadView() = default;
  // `size` bytes starting at `offset` of the first slice; the slices hold at least that much.
  PayloadView(std::vector<grpc::Slice> slices, size_t offset, size_t size);

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // Writes size() bytes, one memcpy a slice.
  void CopyTo(uint8_t* destination) const;

 private:
  std::vector<grpc::Slice> slices_;
  size_t offset_ = 0;
  size_t size_ = 0;
};

// Replaces `message` by the received fields except the payload, which is returned and left unset in
// `message`. Takes any field order; of several payloads the last one counts, as in protobuf. The result
// does not need `buffer` any more.
// INVALID_ARGUMENT if the bytes are no message of this type; then `message` is unspecified.
absl::StatusOr<PayloadView> Decode(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_PAYLOAD_CODEC_H_
