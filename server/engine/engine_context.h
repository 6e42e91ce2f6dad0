// SPDX-License-Identifier: Apache-2.0
// EngineContext holds what all parts of one engine share: options, memory, the lock and the threads.
//
// The engine has one lock, EngineContext::mutex. The engine never calls an observer, a caller's copy function
// or the backend with the lock held. It destroys slices, which gives their memory back, without the lock.
#ifndef LOSSD_SERVER_ENGINE_ENGINE_CONTEXT_H_
#define LOSSD_SERVER_ENGINE_ENGINE_CONTEXT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "server/engine/device_loop.h"
#include "server/engine/engine_options.h"
#include "server/engine/staging.h"
#include "server/engine/stream.h"

namespace lossd::engine {

struct EngineContext {
  // Checks the options and allocates staging and retained memory. INVALID_ARGUMENT, or the backend's error.
  // `backend`, the observers and `runtime` outlive the context. The device loop is not started.
  static absl::StatusOr<std::unique_ptr<EngineContext>> Create(const EngineOptions& options,
                                                               kernels::Backend* backend,
                                                               uint64_t incarnation,
                                                               std::vector<EngineObserver*> observers,
                                                               Runtime* runtime = SystemRuntime());
  EngineContext(const EngineOptions& options, kernels::Backend* backend, uint64_t incarnation,
                std::vector<EngineObserver*> observers, std::unique_ptr<StagingPool> staging,
                std::unique_ptr<kernels::RetainedMemory> retained, Runtime* runtime);

  // Tells the observers if the device is lost, which the backend says by UNAVAILABLE. Takes the status that a
  // call of the backend returned, and returns it unchanged. It is not for statuses that the engine itself
  // makes. Called without the lock.
  absl::Status NoteIfLost(absl::Status from_backend) const;

  const EngineOptions options;
  kernels::Backend* const backend;
  const uint64_t incarnation;
  const EngineObservers observers;
  Runtime* const runtime;
  const std::unique_ptr<StagingPool> staging;
  const std::unique_ptr<kernels::RetainedMemory> retained;  // null: the engine retains no rows
  RangeAllocator retained_ranges;                           // of `retained`

  absl::Mutex mutex;                               // the engine's lock
  VersionCounter versions ABSL_GUARDED_BY(mutex);  // versions of all heads
  FairShare stream_places ABSL_GUARDED_BY(mutex);  // places for open streams, shared by peer
  RowMemory row_memory ABSL_GUARDED_BY(mutex);     // the budget for what is remembered of rows
  // The next two members are for deterministic mode. A contribution that waits for its turn has a ticket, by
  // which the wait can be dropped (Engine::AwaitTurn); this is the last ticket that was given.
  uint64_t last_turn_ticket ABSL_GUARDED_BY(mutex) = 0;
  // An area is memory with a place for each row of a group, in which the group is put together and computed
  // (GroupAssembly). This counts the slices that hold places in an area, while they are received, computed or
  // sent.
  int64_t area_buffers_lent ABSL_GUARDED_BY(mutex) = 0;

  DeviceLoop loop;
  Notifier notifier;  // destroyed first, because its events use the other members
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_CONTEXT_H_
