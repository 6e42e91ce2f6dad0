// SPDX-License-Identifier: Apache-2.0
// The operations on a head: closing, resetting and loading its step, adding rows of contributions, and
// reading and writing its tensors. Checks of what an update would do to the weights are here, too.
//
// Threads. An operation runs on the device thread, without the engine's lock, while no chunk of the head is
// in flight. It checks under the lock, works on the device without the lock, and books under the lock. Only
// the device thread changes a step, so what was checked still holds when the operation books. Functions that
// run elsewhere say so.
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

// Checks the number of expected ids and puts them in order, which is much work for many. On any thread.
absl::Status OrderExpected(const EngineOptions& options, StepRequest& request);

// Each of these operations does what the member of Engine with its name promises; the caller has validated
// the optimizer's options.
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

// As Engine::OpenContribution, with the lock held.
absl::StatusOr<Contribution> OpenContribution(HeadSession& session, const ContributionSpec& spec);
// Ends the wait of Engine::AwaitTurn: true if its `ready` will not be called any more because of this. Takes
// the lock; on any thread.
bool ForgetTurn(const Contribution& contribution, uint64_t ticket);

// Rows of a contribution that have been checked as far as that needs no head. Views live as long as the
// arguments.
struct ContributionRows {
  RowRange rows;
  absl::Span<const uint8_t> values;      // [rows.size(), cols]
  absl::Span<const uint64_t> checksums;  // [rows.size()]
};
// INVALID_ARGUMENT or OUT_OF_RANGE naming what is wrong. Without the lock, on any thread.
absl::Status CheckRows(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values);
// An operation: adds those of the rows that had not been added before, together with their entries in the
// ledger. The rest as Engine::AddRows.
absl::StatusOr<AddedRows> AddRows(HeadSession& session, const Contribution& contribution,
                                  const ContributionRows& rows);

// ---- Bounds of an update ----
// What an update may do to the weights, before it is made: options that no fp32 arithmetic can take are
// refused, and updates that only strange options make possible are looked at afterwards. The functions are
// stateless and thread-safe.

// INVALID_ARGUMENT naming the field and its value if an option, or the factor of an update that follows from
// some, is no fp32 number.
absl::Status CheckOptionsFit(const kernels::OptimizerOptions& options, int64_t update);

enum class UpdateReach : uint8_t {
  kBounded,  // weights and moments that are finite stay so, whatever the gradients are
  kUnknown,  // they may not: what the head holds is not known, or it or the options are unusual
};
struct Reach {
  UpdateReach reach = UpdateReach::kUnknown;
  Magnitudes after;  // of what is bounded
};
// For an update of what is at most `before`, with gradients of the 2-norm `norm`, finite. INVALID_ARGUMENT
// naming the field if it would change a weight by more than kMostChange, or if fp32 has no moment for such a
// gradient.
absl::StatusOr<Reach> CheckReach(const kernels::OptimizerOptions& options, int64_t update, double norm,
                                 const Magnitudes& before);
// INVALID_ARGUMENT naming the field if the update decays values of which some are infinite or NaN, as
// `measured` says, so that they would become NaN or another infinity.
absl::Status CheckDecay(const kernels::OptimizerOptions& options, const Magnitudes& measured);

// Added to any finite fp32 number it leaves a finite one: it is less than half of the last place of the
// largest.
inline constexpr double kMostChange = 1e30;

// ---- Reading and writing tensors ----
// A reader or writer takes some rows at a time, and all rows of it are of one version. Engine::OpenReader and
// OpenWriter make them; docs/consistency.md says what may happen meanwhile.
//
// Thread-compatible. Read and Write block, as Engine::OnDevice. The objects must be destroyed before the
// engine; the head may be deleted, and then they answer NOT_FOUND, also if another head gets its name.

class TensorReader {
 public:
  explicit TensorReader(std::shared_ptr<HeadSession> session) : session_(std::move(session)) {}

  const kernels::HeadConfig& config() const;
  // Copies rows of a tensor, as head::Head::ReadRows, and returns the state of the head at that moment. All
  // rows that a reader reads are of one version: of the weights for values and moments, of the accumulated
  // gradients for gradients. ABORTED if it has changed since the first call, UNAVAILABLE if a first call
  // finds values or moments being written.
  absl::StatusOr<HeadState> Read(kernels::TensorId id, RowRange rows, kernels::DType dtype,
                                 absl::Span<uint8_t> out);
  // The tensors that a snapshot of the head is of are in a checkpoint: the head's history says so, unless it
  // has been loaded or reset since. Does not block.
  void NoteSaved(const HeadSnapshot& saved, absl::string_view checkpoint, absl::Time saved_at);

 private:
  const std::shared_ptr<HeadSession> session_;
  std::optional<Binding> binding_;  // since the first call
};

// One write: rows of one tensor, from the first to the last. Between the two the tensor is of no version, and
// calls that would see it are refused. A writer that is destroyed before its last row leaves the rows written
// so far.
class TensorWriter {
 public:
  explicit TensorWriter(std::shared_ptr<HeadSession> session) : session_(std::move(session)) {}
  ~TensorWriter();
  TensorWriter(const TensorWriter&) = delete;
  TensorWriter& operator=(const TensorWriter&) = delete;

  const kernels::HeadConfig& config() const;
  // All rows that the write is going to replace. Call once, before Write.
  void SetRows(kernels::TensorId id, RowRange rows);
  // Writes the next rows, as head::Head::WriteRows, and returns the state of the head at that moment. ABORTED
  // if a checkpoint has been loaded since the first rows.
  absl::StatusOr<HeadState> Write(RowRange rows, kernels::DType dtype, absl::Span<const uint8_t> in);

 private:
  // On the device thread.
  absl::StatusOr<HeadState> WriteOnDevice(RowRange rows, kernels::DType dtype, absl::Span<const uint8_t> in);

  const std::shared_ptr<HeadSession> session_;
  kernels::TensorId id_;
  RowRange rows_;
  std::optional<uint64_t> token_;  // HeadVersions::BeginWrite's, since the first rows
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_OPERATIONS_H_
