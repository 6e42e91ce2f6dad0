// SPDX-License-Identifier: Apache-2.0
// Calls that send and receive bytes instead of messages, for tests.
#ifndef LOSSD_TESTS_SERVER_SERVICE_BYTE_CALLS_H_
#define LOSSD_TESTS_SERVER_SERVICE_BYTE_CALLS_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/sync_stream.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lossd::app::testing {

using ByteStream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

inline grpc::ByteBuffer ToBuffer(absl::string_view bytes) {
  const grpc::Slice slice(bytes.data(), bytes.size());
  return grpc::ByteBuffer(&slice, 1);
}

inline std::string ToText(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const grpc::Slice& slice : slices)
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return text;
}

// The call fails at once if there is no connection. Zero: no deadline.
inline void SetDeadline(grpc::ClientContext* context, absl::Duration deadline) {
  context->set_wait_for_ready(false);
  if (deadline > absl::ZeroDuration())
    context->set_deadline(std::chrono::system_clock::now() + absl::ToChronoMicroseconds(deadline));
}

// Starts a call of a bidirectional method, such as "/lossd.v1.LossService/ComputeLoss".
inline std::unique_ptr<ByteStream> OpenByteStream(const std::shared_ptr<grpc::Channel>& channel,
                                                  const char* method, grpc::ClientContext* context) {
  return std::unique_ptr<ByteStream>(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          channel.get(), {method, grpc::internal::RpcMethod::BIDI_STREAMING, channel}, context));
}

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_BYTE_CALLS_H_
