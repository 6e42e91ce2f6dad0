// SPDX-License-Identifier: Apache-2.0
#include "server/engine/stream_handle.h"

#include <utility>

#include "absl/synchronization/mutex.h"

namespace lossd::engine {

StreamHandle::~StreamHandle() {
  Cancel(absl::CancelledError("the stream was dropped"));
  EngineContext& context = session_->context();
  uint64_t ticket = 0;
  {
    absl::MutexLock lock(&context.mutex);
    ticket = state_->memory_ticket();
  }
  if (ticket != 0) context.staging->Forget(ticket);
}

void StreamHandle::Start() {
  absl::MutexLock lock(&session_->context().mutex);
  state_->Start();
  session_->streams().FinishIfReady(state_);
}

void StreamHandle::Receive(IncomingSlice incoming) {
  auto slice = std::make_unique<SliceWork>();  // outlives the lock if it is refused
  slice->stream = state_;
  slice->rows = incoming.rows;
  slice->bytes = state_->is_backward() ? state_->RowBytes(incoming.rows.size()) : incoming.bytes;
  slice->caller = std::move(incoming);
  bool has_memory = false;
  {
    absl::MutexLock lock(&session_->context().mutex);
    has_memory = session_->Receive(slice);
  }
  if (has_memory) session_->CopyAndQueue(std::move(slice));
}

void StreamHandle::HalfClose() {
  absl::MutexLock lock(&session_->context().mutex);
  if (state_->failed() || state_->finished()) return;
  if (absl::Status status = state_->HalfClose(); !status.ok()) {
    session_->streams().Fail(*state_, std::move(status));
  }
  session_->streams().FinishIfReady(state_);
}

void StreamHandle::Cancel(absl::Status why) {
  absl::MutexLock lock(&session_->context().mutex);
  state_->Start();  // so that OnFinished comes even if the caller gave up before starting
  if (!state_->finished()) session_->streams().Fail(*state_, std::move(why));
  session_->streams().FinishIfReady(state_);
}

}  // namespace lossd::engine
