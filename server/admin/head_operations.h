// SPDX-License-Identifier: Apache-2.0
// What HeadService's methods do, apart from gRPC: each takes a request and blocks until its answer is
// known. Large tensors go to and from the device in slices of about 8 MiB, so that rows of other heads
// and streams are computed in between.
//
// Thread-safe. Calls that change a head take turns per head, and wait while a save reads its tensors
// (checkpoints.h); no call sees a head half created.
#ifndef LOSSD_SERVER_ADMIN_HEAD_OPERATIONS_H_
#define LOSSD_SERVER_ADMIN_HEAD_OPERATIONS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/dtype.h"
#include "kernels/head_config.h"
#include "lossd/v1/head.pb.h"
#include "server/admin/checkpoints.h"
#include "server/admin/done_calls.h"
#include "server/admin/initial_values.h"
#include "server/admin/named_locks.h"
#include "server/admin/reset_log.h"
#include "server/engine/engine.h"
#include "server/head/checkpoint.h"
#include "server/metrics/metrics.h"

namespace lossd::admin {

struct HeadOperationsOptions {
  CheckpointOptions checkpoints;
  kernels::DType default_compute_dtype = kernels::DType::kFloat32;
  int64_t transfer_bytes = int64_t{8} << 20;  // per operation on the device; at least one row
};

// Rows of one tensor, checked against its head.
struct TensorRows {
  std::string head;
  kernels::TensorId id;
  kernels::TensorShape shape;  // of the whole tensor
  engine::RowRange rows;
  kernels::DType dtype = kernels::DType::kFloat32;  // outside the device
  int64_t row_bytes() const { return shape.cols * static_cast<int64_t>(kernels::SizeOf(dtype)); }
};

// Such rows, and the way to them.
struct TensorRead {
  TensorRows tensor;
  std::unique_ptr<engine::TensorReader> reader;
};
struct TensorWrite {
  TensorRows tensor;
  std::unique_ptr<engine::TensorWriter> writer;
};

class HeadOperations {
 public:
  // `engine` and `metrics` outlive this.
  HeadOperations(const HeadOperationsOptions& options, engine::Engine* engine, metrics::Metrics* metrics);

  absl::StatusOr<v1::HeadDescription> CreateHead(const v1::CreateHeadRequest& request);
  // What CreateHead would answer, or its error.
  absl::StatusOr<v1::HeadDescription> PlanHead(const v1::CreateHeadRequest& request);
  absl::StatusOr<v1::HeadDescription> DescribeHead(const v1::DescribeHeadRequest& request);
  absl::StatusOr<v1::ListHeadsResponse> ListHeads(const v1::ListHeadsRequest& request);
  absl::StatusOr<v1::DeleteHeadResponse> DeleteHead(const v1::DeleteHeadRequest& request);
  absl::StatusOr<v1::ResetHeadResponse> ResetHead(const v1::ResetHeadRequest& request);
  absl::StatusOr<v1::SetSharesResponse> SetShares(const v1::SetSharesRequest& request);
  absl::StatusOr<v1::GradNormResponse> GradNorm(const v1::GradNormRequest& request);
  absl::StatusOr<v1::ApplyStepResponse> ApplyStep(const v1::ApplyStepRequest& request);
  absl::StatusOr<v1::ZeroGradientsResponse> ZeroGradients(const v1::ZeroGradientsRequest& request);
  absl::StatusOr<v1::HeadDescription> LoadCheckpoint(const v1::LoadCheckpointRequest& request);
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(const v1::ListCheckpointsRequest& request) {
    return checkpoints_.List(request);
  }
  absl::StatusOr<v1::DeleteCheckpointResponse> DeleteCheckpoint(const v1::DeleteCheckpointRequest& request) {
    return checkpoints_.Delete(request);
  }
  Checkpoints& checkpoints() { return checkpoints_; }

  // Opens a ReadTensor or WriteTensor call. FAILED_PRECONDITION for writing gradients.
  absl::StatusOr<TensorRead> OpenRead(const v1::ReadTensorRequest& request);
  absl::StatusOr<TensorWrite> OpenWrite(const v1::OpenTensor& open);
  // Copies the next `rows` of the tensor; the span has exactly their bytes in its dtype. The head's state at
  // that moment; errors as engine::TensorReader and TensorWriter.
  static absl::StatusOr<v1::HeadState> ReadRows(const TensorRead& read, engine::RowRange rows,
                                                absl::Span<uint8_t> out);
  absl::StatusOr<v1::HeadState> WriteRows(const TensorWrite& write, engine::RowRange rows,
                                          absl::Span<const uint8_t> in);
  absl::StatusOr<v1::HeadState> State(absl::string_view head);

 private:
  // Makes a head, has `fill` fill it and publishes it; on failure nothing is left of it.
  absl::Status CreateFilled(const std::string& name, const kernels::HeadConfig& config,
                            absl::FunctionRef<absl::Status()> fill);
  // As InitialValues::Fill.
  absl::Status FillHead(const std::string& head, const InitialValues& values, bool used);
  // The reset of a head, whose lock is held and which has not been reset under this id.
  absl::Status ResetInTurn(const v1::ResetHeadRequest& request, const engine::HeadSnapshot& head);
  absl::StatusOr<v1::HeadDescription> Description(absl::string_view head);
  // `kind` of the event, and what the log says: "head_created", "head created".
  void LogHead(absl::string_view kind, const v1::HeadDescription& head);
  // `is_new`: nothing is left of the head if this fails.
  absl::Status WriteLoaded(const std::string& head, const kernels::HeadConfig& config,
                           const head::CheckpointReader& reader, bool is_new);
  // Makes a new head as saved; if the server has other devices, without the shares and the replicas that do
  // not suit them.
  absl::Status CreateLoaded(const std::string& head, kernels::HeadConfig config,
                            const head::CheckpointReader& reader);

  const HeadOperationsOptions options_;
  engine::Engine* const engine_;
  metrics::Metrics* const metrics_;
  NamedLocks locks_;
  ResetLog resets_;
  DoneCalls<v1::SetSharesResponse> divisions_{"change_id", "change of shares"};
  Checkpoints checkpoints_;
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_HEAD_OPERATIONS_H_
