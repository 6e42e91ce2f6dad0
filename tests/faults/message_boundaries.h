// SPDX-License-Identifier: Apache-2.0
// Finds in the bytes that one side of an HTTP/2 connection sends where headers and gRPC messages end: the
// places between two messages, at which a connection may break or a process may die.
//
// Thread-compatible.
#ifndef LOSSD_TESTS_FAULTS_MESSAGE_BOUNDARIES_H_
#define LOSSD_TESTS_FAULTS_MESSAGE_BOUNDARIES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/types/span.h"

namespace lossd::test {

class MessageBoundaries {
 public:
  // `from_client`: the side that starts with HTTP/2's connection preface.
  explicit MessageBoundaries(bool from_client);

  // Takes the next bytes of the connection. Returns how many of them stand before each boundary, ascending,
  // each in [1, bytes.size()].
  std::vector<size_t> Take(absl::Span<const uint8_t> bytes);

  // Whether a frame could follow what was taken, and the stream of the last frame that had a header or data;
  // 0 if there was none.
  bool between_frames() const { return preface_left_ == 0 && header_bytes_ == 0 && !continues_; }
  uint32_t last_stream() const { return last_stream_; }

 private:
  // What has been seen of the gRPC message a stream is in: five bytes (compressed?, length), then the
  // message.
  struct Message {
    size_t prefix_bytes = 0;
    uint32_t length = 0;
    uint64_t bytes_left = 0;
  };

  void TakeHeaderByte(uint8_t byte);
  // Takes bytes of a DATA frame's payload up to the end of the message, if it is among them, and says how
  // many that were; true if the message ended.
  static bool TakeMessage(Message& message, absl::Span<const uint8_t> payload, size_t* taken);

  size_t preface_left_;
  // The frame under way.
  size_t header_bytes_ = 0;  // of 9
  uint32_t payload_left_ = 0;
  uint8_t type_ = 0;
  uint8_t flags_ = 0;
  uint32_t stream_ = 0;
  uint32_t last_stream_ = 0;
  bool continues_ = false;                // a CONTINUATION has to follow
  std::map<uint32_t, Message> messages_;  // by stream
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_FAULTS_MESSAGE_BOUNDARIES_H_
