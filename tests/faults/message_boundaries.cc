// SPDX-License-Identifier: Apache-2.0
#include "tests/faults/message_boundaries.h"

#include <algorithm>

namespace lossd::test {
namespace {

constexpr size_t kPrefaceBytes = 24;
constexpr size_t kFrameHeaderBytes = 9;  // length (3), type, flags, stream (4)
constexpr size_t kPrefixBytes = 5;
constexpr uint8_t kData = 0;
constexpr uint8_t kHeaders = 1;
constexpr uint8_t kContinuation = 9;
constexpr uint8_t kEndHeaders = 4;  // a flag

}  // namespace

MessageBoundaries::MessageBoundaries(bool from_client) : preface_left_(from_client ? kPrefaceBytes : 0) {}

void MessageBoundaries::TakeHeaderByte(uint8_t byte) {
  if (header_bytes_ == 0) payload_left_ = stream_ = 0;
  if (header_bytes_ < 3) payload_left_ = payload_left_ << 8 | byte;
  if (header_bytes_ == 3) type_ = byte;
  if (header_bytes_ == 4) flags_ = byte;
  if (header_bytes_ > 4) stream_ = stream_ << 8 | byte;
  ++header_bytes_;
}

bool MessageBoundaries::TakeMessage(Message& message, absl::Span<const uint8_t> payload, size_t* taken) {
  *taken = 0;
  while (message.prefix_bytes < kPrefixBytes && *taken < payload.size()) {
    message.length = message.length << 8 | payload[(*taken)++];  // the first byte is shifted out
    if (++message.prefix_bytes == kPrefixBytes) message.bytes_left = message.length;
  }
  if (message.prefix_bytes < kPrefixBytes) return false;
  const size_t body = std::min<uint64_t>(message.bytes_left, payload.size() - *taken);
  *taken += body;
  message.bytes_left -= body;
  return message.bytes_left == 0;
}

std::vector<size_t> MessageBoundaries::Take(absl::Span<const uint8_t> bytes) {
  std::vector<size_t> boundaries;
  size_t i = std::min(preface_left_, bytes.size());
  preface_left_ -= i;
  while (i < bytes.size()) {
    if (header_bytes_ < kFrameHeaderBytes) {
      TakeHeaderByte(bytes[i++]);
    } else {
      const size_t most = std::min<size_t>(payload_left_, bytes.size() - i);
      size_t taken = most;
      bool boundary = false;
      if (type_ == kData) {
        Message& message = messages_[stream_];
        boundary = TakeMessage(message, bytes.subspan(i, most), &taken);
        if (boundary) message = Message();
      }
      i += taken;
      payload_left_ -= static_cast<uint32_t>(taken);
      if (boundary) boundaries.push_back(i);
    }
    if (header_bytes_ == kFrameHeaderBytes && payload_left_ == 0) {
      if (type_ == kHeaders) boundaries.push_back(i);
      if (type_ == kHeaders || type_ == kData) last_stream_ = stream_;
      if (type_ == kHeaders || type_ == kContinuation) continues_ = (flags_ & kEndHeaders) == 0;
      header_bytes_ = 0;
    }
  }
  return boundaries;
}

}  // namespace lossd::test
