// SPDX-License-Identifier: Apache-2.0
// Encodes messages that carry a tensor (`bytes payload = 1000`) to gRPC byte buffers, and decodes them,
// without protobuf copying the tensor.
//
// The bytes on the wire are those of ordinary protobuf messages. Sending copies no payload byte: the buffer
// references the caller's memory. Receiving copies each payload byte once, from gRPC's slices to where the
// caller wants it.
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

// Encodes `header`, whose payload must be unset, followed by the payload field. The bytes equal protobuf's
// own encoding of the message with the payload set (an empty payload is left out). Header and payload
// together must stay below 2 GiB, protobuf's limit. The result references `payload`, whose bytes must not
// change while the buffer or a copy of it lives.
grpc::ByteBuffer Encode(const google::protobuf::MessageLite& header, const grpc::Slice& payload);

// The same for memory of the caller. `release` runs exactly once, when no buffer references `payload`
// anymore: on any thread, possibly before Encode returns. It must not block.
grpc::ByteBuffer Encode(const google::protobuf::MessageLite& header, absl::Span<const uint8_t> payload,
                        absl::AnyInvocable<void()> release);

// The same without a payload.
grpc::ByteBuffer Encode(const google::protobuf::MessageLite& header);

// The payload of a received message. It holds references to the gRPC slices that contain it.
class PayloadView {
 public:
  PayloadView() = default;
  // The payload has `size` bytes, starting at `offset` in the first slice. The slices must hold that many.
  PayloadView(std::vector<grpc::Slice> slices, size_t offset, size_t size);

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // Copies size() bytes to `destination`, with one memcpy for each slice.
  void CopyTo(uint8_t* destination) const;

 private:
  std::vector<grpc::Slice> slices_;
  size_t offset_ = 0;
  size_t size_ = 0;
};

// Decodes a received message: sets all fields of `message` except the payload, which is returned and stays
// unset in `message`. Accepts any order of fields; of several payloads the last one counts, as in protobuf.
// The result does not depend on `buffer`. INVALID_ARGUMENT if the bytes are not a message of this type;
// `message` is then unspecified.
absl::StatusOr<PayloadView> Decode(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_PAYLOAD_CODEC_H_
