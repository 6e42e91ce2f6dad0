// SPDX-License-Identifier: Apache-2.0
// TestClient: a plain client of lossd's services for tests. It uses generated stubs, protobuf's own encoding
// and blocking calls, and does not keep a test from breaking the protocol's rules.
//
// TestClient is thread-safe; a LossStream belongs to one thread.
#ifndef LOSSD_TESTS_SERVER_SERVICE_SERVICE_CLIENT_H_
#define LOSSD_TESTS_SERVER_SERVICE_SERVICE_CLIENT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/server.pb.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace lossd::app::testing {

// The answers to a ComputeLoss call. Errors carry their lossd.v1.ErrorDetail (wire::GetErrorDetail).
struct LossAnswers {
  absl::Status status;
  std::optional<v1::MicrobatchAccepted> accepted;
  struct Slice {
    v1::SliceResult result;
    std::string payload;
  };
  std::vector<Slice> slices;  // in order of arrival
  std::optional<v1::MicrobatchSummary> summary;
  std::vector<std::string> order;  // "accepted", "slice" and "summary" in the order in which they came
};

// One ComputeLoss call.
class LossStream {
 public:
  virtual ~LossStream() = default;
  // False if the call is over; Finish returns the reason.
  virtual bool Send(const v1::ComputeLossRequest& request) = 0;
  virtual bool SendOpen(const v1::OpenMicrobatch& open) = 0;
  virtual bool SendSlice(int64_t begin, int64_t end, absl::string_view payload) = 0;
  // Sends bytes that need not be a message.
  virtual bool SendRaw(absl::string_view bytes) = 0;
  virtual void HalfClose() = 0;
  // Reads one answer; false at the end of the call.
  virtual bool ReadOne() = 0;
  // Reads the remaining answers and the status.
  virtual LossAnswers Finish() = 0;
  virtual void Cancel() = 0;
};

// One WriteTensor call, message by message. If it is destroyed before Finish, the call is cancelled.
class WriteStream {
 public:
  virtual ~WriteStream() = default;
  // False if the call is over; Finish returns the reason. `open` is for the first message only.
  virtual bool Send(const v1::OpenTensor* open, absl::string_view payload) = 0;
  virtual absl::StatusOr<v1::WriteTensorResponse> Finish() = 0;
};

// The deadline of a call; zero: none.
inline constexpr absl::Duration kTestDeadline = absl::Seconds(60);

class TestClient {
 public:
  // Connects to "host:port" with a connection of its own.
  static std::unique_ptr<TestClient> Connect(const std::string& target);
  static std::unique_ptr<TestClient> Over(std::shared_ptr<grpc::Channel> channel);
  virtual ~TestClient() = default;

  std::unique_ptr<LossStream> OpenLoss(absl::Duration deadline = kTestDeadline) {
    return StartLoss(deadline);
  }

  virtual absl::StatusOr<v1::HeadDescription> CreateHead(const v1::CreateHeadRequest& request) = 0;
  virtual absl::StatusOr<v1::HeadDescription> DescribeHead(const std::string& head) = 0;
  virtual absl::StatusOr<v1::ListHeadsResponse> ListHeads() = 0;
  virtual absl::Status DeleteHead(const std::string& head) = 0;
  virtual absl::Status SetShares(const v1::SetSharesRequest& request) = 0;
  virtual absl::StatusOr<double> GradNorm(const std::string& head) = 0;
  virtual absl::StatusOr<v1::ApplyStepResponse> ApplyStep(const v1::ApplyStepRequest& request) = 0;
  virtual absl::Status ZeroGradients(const std::string& head, uint64_t step) = 0;
  virtual absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(const std::string& head,
                                                                    const std::string& name) = 0;
  // Cancels the call when `on_progress` returns false.
  virtual absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(
      const v1::SaveCheckpointRequest& request,
      const std::function<bool(const v1::SaveProgress&)>& on_progress) = 0;
  virtual absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(const std::string& head) = 0;
  virtual absl::StatusOr<v1::DeleteCheckpointResponse> DeleteCheckpoint(const std::string& checkpoint,
                                                                        const std::string& deletion_id) = 0;
  virtual absl::StatusOr<v1::HeadDescription> LoadCheckpoint(const std::string& checkpoint,
                                                             const std::string& head) = 0;
  virtual absl::StatusOr<v1::ServerDescription> GetServer() = 0;
  virtual absl::StatusOr<v1::ListStreamsResponse> ListStreams(uint32_t max_streams) = 0;
  // The status grpc.health.v1 reports: "SERVING", "NOT_SERVING", ...
  virtual absl::StatusOr<std::string> Health(const std::string& service) = 0;
  // Services the reflection service lists.
  virtual absl::StatusOr<std::vector<std::string>> ReflectedServices() = 0;

  // The tensor's bytes in request.dtype, put together from all slices.
  virtual absl::StatusOr<std::string> ReadTensor(const v1::ReadTensorRequest& request) = 0;
  virtual std::unique_ptr<WriteStream> OpenWrite() = 0;
  // WriteTensor and AddGradient send the payload in messages of `message_bytes`.
  absl::Status WriteTensor(const v1::OpenTensor& open, absl::string_view payload,
                           size_t message_bytes = kMessageBytes) {
    return SendTensor(open, payload, message_bytes);
  }
  absl::StatusOr<v1::AddGradientResponse> AddGradient(const v1::OpenGradient& open, absl::string_view payload,
                                                      size_t message_bytes = kMessageBytes,
                                                      absl::Duration deadline = kTestDeadline) {
    return SendGradient(open, payload, message_bytes, deadline);
  }

  // Shorthands for fp32.
  absl::StatusOr<std::vector<float>> Read(const std::string& head, v1::Param param, v1::Role role);
  absl::Status Write(const std::string& head, v1::Param param, absl::Span<const float> values);

 private:
  static constexpr size_t kMessageBytes = size_t{1} << 20;

  virtual std::unique_ptr<LossStream> StartLoss(absl::Duration deadline) = 0;
  virtual absl::Status SendTensor(const v1::OpenTensor& open, absl::string_view payload,
                                  size_t message_bytes) = 0;
  virtual absl::StatusOr<v1::AddGradientResponse> SendGradient(const v1::OpenGradient& open,
                                                               absl::string_view payload,
                                                               size_t message_bytes,
                                                               absl::Duration deadline) = 0;
};

// The values as bytes.
template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_SERVICE_CLIENT_H_
