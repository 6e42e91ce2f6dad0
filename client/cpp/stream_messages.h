// SPDX-License-Identifier: Apache-2.0
// The messages of one ComputeLoss call, apart from gRPC: the bytes of a slice, and what the server's answers
// mean.
//
// client/python/src/lossd/_stream_messages.py does the same; tests/client/golden/wire.json and answers.json
// hold both to it.
#ifndef LOSSD_CLIENT_CPP_STREAM_MESSAGES_H_
#define LOSSD_CLIENT_CPP_STREAM_MESSAGES_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <optional>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/answer_tracker.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/loss_work.h"
#include "client/cpp/slice_places.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/payload_codec.h"

namespace lossd::client::internal {

// The message of one of the work's slices. References the hidden states, or a copy of those of a GPU;
// `release` runs once, on any thread, when nothing refers to them any more. UNAVAILABLE if the driver cannot
// copy them.
absl::StatusOr<grpc::ByteBuffer> EncodeSlice(const StreamWork& work, Rows rows,
                                             absl::AnyInvocable<void()> release);

// The message of a slice that lies in the call's region, at `offset`.
grpc::ByteBuffer EncodeSliceInRegion(const StreamWork& work, Rows rows, uint64_t offset);

// The hidden states of these rows, where the caller has them.
absl::Span<const uint8_t> HiddenOf(const StreamWork& work, Rows rows);

// Takes the answers of one call in their order, checks them and scatters results into the caller's memory.
//
// Thread-compatible. Errors are INTERNAL and say what the server sent, or UNAVAILABLE if the driver of a GPU
// fails; after one the outputs are unspecified.
class StreamAnswers {
 public:
  // Decides whether to go on from where the server stands; an error ends the call with it.
  using AcceptFn = absl::AnyInvocable<absl::Status(const v1::HeadState&)>;

  // `work` and `places` must outlive this. Null: no slice lies in a region.
  StreamAnswers(const StreamWork& work, AcceptFn accept, SlicePlaces* places = nullptr);

  absl::Status Handle(const grpc::ByteBuffer& message);
  // One of the slices is sent in parts.
  void Replace(Rows whole, const std::vector<Rows>& parts) { answers_.Replace(whole, parts); }
  // Whether the server may end the call with OK now.
  absl::Status CheckEnd() const;

  // Nullopt before it has come.
  const std::optional<v1::MicrobatchSummary>& summary() const { return summary_; }
  uint64_t received_bytes() const { return received_bytes_; }  // of payload
  uint64_t received_in_messages() const { return received_in_messages_; }

 private:
  absl::Status HandleAccepted(const v1::MicrobatchAccepted& accepted);
  absl::Status HandleSlice(const v1::SliceResult& result, const wire::PayloadView& payload);
  absl::Status HandleSummary(const v1::MicrobatchSummary& summary);
  absl::Status CheckSizes(const v1::SliceResult& result, size_t gradient_bytes, uint64_t rows) const;
  absl::Status TakeGradients(const wire::PayloadView& payload, const uint8_t* in_region, Rows rows) const;
  void Scatter(const v1::SliceResult& result, Rows rows) const;

  const StreamWork& work_;
  AcceptFn accept_;
  SlicePlaces* const places_;
  std::optional<v1::MicrobatchAccepted> accepted_;
  AnswerTracker answers_;
  std::optional<v1::MicrobatchSummary> summary_;
  uint64_t received_bytes_ = 0;
  uint64_t received_in_messages_ = 0;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_STREAM_MESSAGES_H_
