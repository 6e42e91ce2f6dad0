// SPDX-License-Identifier: Apache-2.0
#include "server/engine/tensor_access.h"

#include <utility>

#include "absl/synchronization/mutex.h"
#include "server/engine/head_session.h"

namespace lossd::engine {
namespace {

Binding BindingOf(kernels::Role role, const HeadVersions& versions) {
  if (role == kernels::Role::kGradient) return {.accumulation = versions.accumulation()};
  Binding binding{.weights = versions.weights()};
  if (role != kernels::Role::kValue) binding.moments = versions.moments();
  return binding;
}

}  // namespace

// ---- TensorReader ----

const kernels::HeadConfig& TensorReader::config() const { return session_->config(); }

absl::StatusOr<HeadState> TensorReader::Read(kernels::TensorId id, RowRange rows, kernels::DType dtype,
                                             absl::Span<uint8_t> out) {
  HeadState state;
  const absl::Status status = session_->Run([&]() -> absl::Status {
    {
      absl::MutexLock lock(&session_->context().mutex);
      OpenStep& step = session_->step();
      if (!binding_.has_value()) {
        const bool gradient = id.role == kernels::Role::kGradient;
        if (auto usable = gradient ? step.CheckGradients() : step.CheckTensors(); !usable.ok()) return usable;
        binding_ = BindingOf(id.role, step.versions());
      }
      if (auto same = step.CheckBound(*binding_); !same.ok()) return same;
      state = step.state();
    }
    return session_->context().NoteIfLost(session_->head().ReadRows(id, rows.begin, rows.size(), dtype, out));
  });
  if (!status.ok()) return status;
  return state;
}

void TensorReader::NoteSaved(const HeadSnapshot& saved, absl::string_view checkpoint, absl::Time saved_at) {
  absl::MutexLock lock(&session_->context().mutex);
  session_->step().history().OnSaved(saved.origin, checkpoint, saved.state.step, saved_at);
}

// ---- TensorWriter ----

TensorWriter::~TensorWriter() {
  if (!token_.has_value()) return;
  absl::MutexLock lock(&session_->context().mutex);
  session_->step().versions().EndWrite(*token_, /*several=*/true);
}

const kernels::HeadConfig& TensorWriter::config() const { return session_->config(); }

void TensorWriter::SetRows(kernels::TensorId id, RowRange rows) {
  id_ = id;
  rows_ = rows;
}

absl::StatusOr<HeadState> TensorWriter::Write(RowRange rows, kernels::DType dtype,
                                              absl::Span<const uint8_t> in) {
  absl::StatusOr<HeadState> state;
  const absl::Status status = session_->Run([&] {
    state = WriteOnDevice(rows, dtype, in);
    return state.status();
  });
  if (!status.ok()) return status;
  return state;
}

absl::StatusOr<HeadState> TensorWriter::WriteOnDevice(RowRange rows, kernels::DType dtype,
                                                      absl::Span<const uint8_t> in) {
  absl::Mutex& mutex = session_->context().mutex;
  HeadVersions& versions = session_->step().versions();
  const bool is_first = !token_.has_value();
  {
    absl::MutexLock lock(&mutex);
    if (is_first) {
      token_ = versions.BeginWrite(id_.role == kernels::Role::kValue ? Written::kValue : Written::kMoment);
      session_->EndStale();
    } else if (!versions.IsWriting(*token_)) {
      return absl::AbortedError("a checkpoint was loaded, or the head was reset, during the call");
    }
  }
  const absl::Status written =
      session_->context().NoteIfLost(session_->head().WriteRows(id_, rows.begin, rows.size(), dtype, in));
  absl::MutexLock lock(&mutex);
  if (!written.ok() || rows.end == rows_.end) versions.EndWrite(*token_, /*several=*/!is_first);
  if (!written.ok()) return written;
  return session_->step().state();
}

}  // namespace lossd::engine
