// SPDX-License-Identifier: Apache-2.0
// Reading and writing the tensors of a head, some rows at a time, so that all rows of a call are of one
// version. Engine::OpenReader and OpenWriter make these; docs/consistency.md says what may happen meanwhile.
//
// Thread-compatible. Read and Write block, as Engine::OnDevice. The objects must be destroyed before the
// engine; the head may be deleted, and then they answer NOT_FOUND, also if another head gets its name.
#ifndef LOSSD_SERVER_ENGINE_TENSOR_ACCESS_H_
#define LOSSD_SERVER_ENGINE_TENSOR_ACCESS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/engine/snapshots.h"
#include "server/engine/stream.h"
#include "server/engine/versions.h"

namespace lossd::engine {

class HeadSession;

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

#endif  // LOSSD_SERVER_ENGINE_TENSOR_ACCESS_H_
