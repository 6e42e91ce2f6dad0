// SPDX-License-Identifier: Apache-2.0
// The operations on a head: they close, reset and load its step, add rows of contributions, and read and
// write its tensors. Also here: checks of what an update would do to the weights.
//
// Threads. An operation runs on the device thread, without the engine's lock, while no chunk of the head is
// in flight. It checks the step under the lock, works on the device without the lock, and records the result
// under the lock. Only the device thread changes a step, so what was checked still holds at the end.
// Functions that run on other threads say so.
#ifndef LOSSD_SERVER_ENGINE_OPERATIONS_H_
#define LOSSD_SERVER_ENGINE_OPERATIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"
#include "server/engine/head_session.h"
#include "server/engine/ledger.h"
#include "server/engine/magnitudes.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// ---- Steps ----

// Checks the number of expected ids, sorts them and removes duplicates. May be called on any thread, because
// sorting many ids takes long.
absl::Status OrderExpected(const EngineOptions& options, StepRequest& request);

// Each of these operations does what the member of Engine with the same name promises. The caller has
// validated the optimizer's options.
absl::StatusOr<GradNormResult> GradNorm(HeadSession& session, std::optional<uint64_t> step,
                                        absl::string_view run);
absl::StatusOr<StepResult> ApplyStep(HeadSession& session, const StepRequest& request);
absl::StatusOr<HeadState> ZeroGradients(HeadSession& session, uint64_t step, absl::string_view run);
absl::StatusOr<HeadState> Reset(HeadSession& session, ResetScope scope);
absl::Status SetShares(HeadSession& session, const std::vector<int32_t>& shares);
absl::Status BeginLoad(HeadSession& session, const head::Progress& progress,
                       const std::optional<head::AppliedStep>& last_step, const head::History& history);
absl::Status EndLoad(HeadSession& session);

// ---- Contributions to the gradients of a head ----

// As Engine::OpenContribution. Called with the lock held.
absl::StatusOr<Contribution> OpenContribution(HeadSession& session, const ContributionSpec& spec);
// Ends the wait that Engine::AwaitTurn began. True if this keeps its `ready` from being called. Takes the
// lock; on any thread.
bool ForgetTurn(const Contribution& contribution, uint64_t ticket);

// Rows of a contribution that passed CheckRows. The views are valid as long as what they point to.
struct ContributionRows {
  RowRange rows;
  absl::Span<const uint8_t> values;      // [rows.size(), cols]
  absl::Span<const uint64_t> checksums;  // [rows.size()]
};
// Makes the checks of rows and values that do not need the head. INVALID_ARGUMENT or OUT_OF_RANGE names what
// is wrong. Without the lock, on any thread.
absl::Status CheckRows(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values);
// An operation: adds those of the rows that were not added before and enters them in the ledger. Errors as
// Engine::AddRows.
absl::StatusOr<AddedRows> AddRows(HeadSession& session, const Contribution& contribution,
                                  const ContributionRows& rows);

// ---- Bounds of an update ----
// These functions bound what an update may do to the weights before it is made. Options that overflow fp32
// are refused. If unusual options leave the result unbounded, the caller checks the weights after the update.
// The functions are stateless and thread-safe.

// INVALID_ARGUMENT names the field and its value if an option, or a factor that the update computes from
// options, overflows fp32.
absl::Status CheckOptionsFit(const kernels::OptimizerOptions& options, int64_t update);

enum class UpdateReach : uint8_t {
  kBounded,  // finite weights and moments stay finite, for any gradients of this norm
  kUnknown,  // they may not: the magnitudes are unknown or very large, or the options are unusual
};
struct Reach {
  UpdateReach reach = UpdateReach::kUnknown;
  Magnitudes after;  // bounds after the update, if it is bounded
};
// Bounds update number `update` of a head whose magnitudes are at most `before`. `norm`, finite: the 2-norm
// of the gradients. INVALID_ARGUMENT names the field if the update would change a weight by more than
// kMostChange, or if the moment of such a gradient overflows fp32.
absl::StatusOr<Reach> CheckReach(const kernels::OptimizerOptions& options, int64_t update, double norm,
                                 const Magnitudes& before);
// INVALID_ARGUMENT names the field if some values are infinite or NaN, as `measured` says, and the update's
// decay would turn them into NaN or another infinity.
absl::Status CheckDecay(const kernels::OptimizerOptions& options, const Magnitudes& measured);

// The largest change of a weight that is allowed. Added to any finite fp32 number, it gives a finite one,
// because it is less than half a unit in the last place of the largest.
inline constexpr double kMostChange = 1e30;

// ---- Reading and writing tensors ----
// A reader or writer takes some rows at a time, and all rows that it takes are of one version of the head.
// Engine::OpenReader and Engine::OpenWriter create them. docs/consistency.md says what may happen meanwhile.
//
// Thread-compatible. Read and Write block, as Engine::OnDevice. The objects must be destroyed before the
// engine. If the head is deleted, they return NOT_FOUND, even if a new head gets its name.

class TensorReader {
 public:
  explicit TensorReader(std::shared_ptr<HeadSession> session) : session_(std::move(session)) {}

  const kernels::HeadConfig& config() const;
  // Copies rows of a tensor to `out`, as head::Head::ReadRows, and returns the state of the head at that
  // moment. All rows of one reader are of one version: of the weights for values and moments, of the
  // accumulated gradients for gradients. ABORTED if that version has changed since the first call.
  // UNAVAILABLE if values or moments are being written at the first call.
  absl::StatusOr<HeadState> Read(kernels::TensorId id, RowRange rows, kernels::DType dtype,
                                 absl::Span<uint8_t> out);
  // Notes in the head's history that the tensors of the snapshot `saved` are now in a checkpoint. Does
  // nothing if the head has been loaded or reset since. Does not block.
  void NoteSaved(const HeadSnapshot& saved, absl::string_view checkpoint, absl::Time saved_at);

 private:
  const std::shared_ptr<HeadSession> session_;
  std::optional<Binding> binding_;  // set by the first call
};

// Writes rows of one tensor, from the first to the last. In between the tensor is of no version, and calls
// that would use it are refused. A writer that is destroyed before its last row leaves the rows written so
// far.
class TensorWriter {
 public:
  explicit TensorWriter(std::shared_ptr<HeadSession> session) : session_(std::move(session)) {}
  ~TensorWriter();
  TensorWriter(const TensorWriter&) = delete;
  TensorWriter& operator=(const TensorWriter&) = delete;

  const kernels::HeadConfig& config() const;
  // Says which rows the writer will replace in all. Call once, before Write.
  void SetRows(kernels::TensorId id, RowRange rows);
  // Writes the next rows, as head::Head::WriteRows, and returns the state of the head at that moment. ABORTED
  // if a checkpoint was loaded, or the head was reset, since the first rows.
  absl::StatusOr<HeadState> Write(RowRange rows, kernels::DType dtype, absl::Span<const uint8_t> in);

 private:
  // On the device thread.
  absl::StatusOr<HeadState> WriteOnDevice(RowRange rows, kernels::DType dtype, absl::Span<const uint8_t> in);

  const std::shared_ptr<HeadSession> session_;
  kernels::TensorId id_;
  RowRange rows_;
  std::optional<uint64_t> token_;  // from HeadVersions::BeginWrite, since the first rows
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_OPERATIONS_H_
