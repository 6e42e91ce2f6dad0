// SPDX-License-Identifier: Apache-2.0
// HeadOperations does what HeadService's methods ask for, without gRPC. Each method takes a request and
// blocks until its answer is known. Large tensors go to and from the device in slices of about 8 MiB, so that
// rows of other heads and streams are computed in between. RestoreLatest loads every head when the server
// starts.
//
// All classes and functions are thread-safe. Calls that change a head take turns per head, and wait while a
// save reads the head's tensors (checkpoints.h); no call sees a head that is half created.
#ifndef LOSSD_SERVER_ADMIN_HEAD_OPERATIONS_H_
#define LOSSD_SERVER_ADMIN_HEAD_OPERATIONS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/errors/field_error.h"
#include "kernels/head_config.h"
#include "lossd/v1/head.pb.h"
#include "server/admin/checkpoints.h"
#include "server/admin/head_source.h"
#include "server/engine/engine.h"
#include "server/head/checkpoint.h"
#include "server/metrics/metrics.h"

namespace lossd::admin {

// The calls on each head that were done last and that have an id from the client (resets, changes of shares).
// A repeat of a call is recognised by its id and gets the same answer. `Response` is the type of the answer.
template <typename Response>
class DoneCalls {
 public:
  static constexpr size_t kRemembered = 64;  // of each head

  // `id_field`: of the request, which has the id. `kind`: of the calls, for people: "reset".
  DoneCalls(std::string id_field, std::string kind)
      : id_field_(std::move(id_field)), kind_(std::move(kind)) {}

  // What the call of that id was answered with, if it is known. FAILED_PRECONDITION for the id's field if
  // that call asked for something else. `content`: the request without its id and without the head it names.
  absl::StatusOr<std::optional<Response>> Find(absl::string_view head, absl::string_view id,
                                               absl::string_view content) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto found = done_.find(head);
    if (found == done_.end()) return std::nullopt;
    for (const Done& done : found->second) {
      if (done.id != id) continue;
      if (done.content == content) return done.response;
      return errors::FieldError(
          id_field_, absl::StrCat("be another one for another ", kind_, ": this one has been done"), id,
          absl::StatusCode::kFailedPrecondition);
    }
    return std::nullopt;
  }
  void Add(absl::string_view head, absl::string_view id, std::string content, const Response& response)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    std::deque<Done>& done = done_[std::string(head)];
    done.push_back({std::string(id), std::move(content), response});
    if (done.size() > kRemembered) done.pop_front();
  }
  // The head was deleted.
  void Forget(absl::string_view head) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (const auto found = done_.find(head); found != done_.end()) done_.erase(found);
  }

 private:
  struct Done {
    std::string id;
    std::string content;
    Response response;
  };

  const std::string id_field_, kind_;
  mutable absl::Mutex mutex_;
  std::map<std::string, std::deque<Done>, std::less<>> done_ ABSL_GUARDED_BY(mutex_);  // by head, in order
};

// The resets of heads that were done last.
class ResetLog {
 public:
  static constexpr size_t kRemembered = DoneCalls<v1::ResetHeadResponse>::kRemembered;  // of each head

  // As DoneCalls::Find, for the field "reset_id".
  absl::StatusOr<std::optional<v1::ResetHeadResponse>> Find(const v1::ResetHeadRequest& request) const;
  void Add(const v1::ResetHeadRequest& request, const v1::ResetHeadResponse& response);
  // The head was deleted.
  void Forget(absl::string_view head) { done_.Forget(head); }

 private:
  DoneCalls<v1::ResetHeadResponse> done_{"reset_id", "reset"};
};

// Logs what the backend chose, a debug event for each choice.
void LogChoices(absl::string_view event, absl::string_view head, absl::Span<const kernels::Choice> choices);

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

// The methods of HeadService, one function each, and the reading and writing of tensors.
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

// Loads the newest checkpoint of each head that has checkpoints below the directory, when the server starts.
// A checkpoint whose manifest cannot be read is passed over with a warning in the log, since its head is not
// known. A checkpoint that is damaged in another way, or does not fit, is an error that names the checkpoint,
// and no older checkpoint is tried in its place. Blocks. Heads that were loaded before an error stay.
absl::Status RestoreLatest(HeadOperations& operations);

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_HEAD_OPERATIONS_H_
