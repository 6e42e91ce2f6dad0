// SPDX-License-Identifier: Apache-2.0
// HeadOperations implements the methods of HeadService, without gRPC. Each method takes a request and blocks
// until its answer is known. Large tensors are copied to and from the device in slices of about 8 MiB, so
// that the device computes rows of other heads and streams in between. RestoreLatest loads every head when
// the server starts.
//
// All classes and functions are thread-safe. Calls that change the same head run one at a time, and wait
// while a save reads the head's tensors (checkpoints.h). No call sees a head whose creation has not ended.
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

// Remembers the last calls of one kind on each head (resets, or changes of shares), with the ids that clients
// gave them. A repeated call is recognized by its id and gets the same answer. `Response` is the type of the
// answer.
template <typename Response>
class DoneCalls {
 public:
  static constexpr size_t kRemembered = 64;  // remembered calls of each head

  // `id_field`: the field of the request that has the id. `kind`: the kind of the calls, for messages:
  // "reset".
  DoneCalls(std::string id_field, std::string kind)
      : id_field_(std::move(id_field)), kind_(std::move(kind)) {}

  // The answer to the earlier call with this id, if it is remembered. FAILED_PRECONDITION naming the id's
  // field if that call had another content. `content`: the request without its id and its head's name.
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
  std::map<std::string, std::deque<Done>, std::less<>> done_ ABSL_GUARDED_BY(mutex_);  // by head, oldest
                                                                                       // first
};

// Remembers the last resets of each head.
class ResetLog {
 public:
  static constexpr size_t kRemembered = DoneCalls<v1::ResetHeadResponse>::kRemembered;  // resets of each head

  // As DoneCalls::Find, for the field "reset_id".
  absl::StatusOr<std::optional<v1::ResetHeadResponse>> Find(const v1::ResetHeadRequest& request) const;
  void Add(const v1::ResetHeadRequest& request, const v1::ResetHeadResponse& response);
  // The head was deleted.
  void Forget(absl::string_view head) { done_.Forget(head); }

 private:
  DoneCalls<v1::ResetHeadResponse> done_{"reset_id", "reset"};
};

// Logs the choices of the backend, one debug line for each choice.
void LogChoices(absl::string_view event, absl::string_view head, absl::Span<const kernels::Choice> choices);

struct HeadOperationsOptions {
  CheckpointOptions checkpoints;
  kernels::DType default_compute_dtype = kernels::DType::kFloat32;
  // Bytes that are copied in one operation on the device; at least one row.
  int64_t transfer_bytes = int64_t{8} << 20;
};

// Rows of one tensor. They have been checked against the head's configuration.
struct TensorRows {
  std::string head;
  kernels::TensorId id;
  kernels::TensorShape shape;  // the shape of the whole tensor
  engine::RowRange rows;
  kernels::DType dtype = kernels::DType::kFloat32;  // the type on the host
  int64_t row_bytes() const { return shape.cols * static_cast<int64_t>(kernels::SizeOf(dtype)); }
};

// Rows of a tensor with the object that reads or writes them.
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
  // `engine` and `metrics` outlive the object.
  HeadOperations(const HeadOperationsOptions& options, engine::Engine* engine, metrics::Metrics* metrics);

  absl::StatusOr<v1::HeadDescription> CreateHead(const v1::CreateHeadRequest& request);
  // The answer or error that CreateHead would give. Creates nothing.
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

  // Open a ReadTensor or WriteTensor call. Writing gradients is refused with FAILED_PRECONDITION.
  absl::StatusOr<TensorRead> OpenRead(const v1::ReadTensorRequest& request);
  absl::StatusOr<TensorWrite> OpenWrite(const v1::OpenTensor& open);
  // Copy the next `rows` of the tensor. The span has exactly the size of these rows in the tensor's dtype.
  // Return the head's state at that moment; errors as engine::TensorReader and TensorWriter.
  static absl::StatusOr<v1::HeadState> ReadRows(const TensorRead& read, engine::RowRange rows,
                                                absl::Span<uint8_t> out);
  absl::StatusOr<v1::HeadState> WriteRows(const TensorWrite& write, engine::RowRange rows,
                                          absl::Span<const uint8_t> in);
  absl::StatusOr<v1::HeadState> State(absl::string_view head);

 private:
  // Creates a head, calls `fill` to fill it, and publishes it. After a failure the head does not exist.
  absl::Status CreateFilled(const std::string& name, const kernels::HeadConfig& config,
                            absl::FunctionRef<absl::Status()> fill);
  // Fills a head as InitialValues::Fill does.
  absl::Status FillHead(const std::string& head, const InitialValues& values, bool used);
  // Resets a head. The caller holds the head's lock, and has checked that this reset_id is new.
  absl::Status ResetInTurn(const v1::ResetHeadRequest& request, const engine::HeadSnapshot& head);
  absl::StatusOr<v1::HeadDescription> Description(absl::string_view head);
  // Adds an event of `kind`, such as "head_created", and logs the same words: "head created".
  void LogHead(absl::string_view kind, const v1::HeadDescription& head);
  // Writes the tensors of a checkpoint into a head. `is_new`: the caller removes the head if this fails.
  absl::Status WriteLoaded(const std::string& head, const kernels::HeadConfig& config,
                           const head::CheckpointReader& reader, bool is_new);
  // Creates a head with the saved configuration. If the server has other devices, leaves out shares, replicas
  // and residency that do not fit them.
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

// Loads the newest checkpoint of each head that has checkpoints below the directory. Called when the server
// starts; blocks. If the manifest of a checkpoint cannot be read, the head is not known: the checkpoint is
// skipped with a warning in the log. If a checkpoint is damaged in another way, or does not fit, the result
// is an error that names it; older checkpoints are not tried. Heads that were loaded before the error stay.
absl::Status RestoreLatest(HeadOperations& operations);

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_HEAD_OPERATIONS_H_
