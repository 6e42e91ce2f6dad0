// SPDX-License-Identifier: Apache-2.0
// Creates an EngineContext: checks the options and allocates staging and retained memory.
#include "server/engine/engine_context.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "server/engine/errors.h"

namespace lossd::engine {

absl::StatusOr<std::unique_ptr<EngineContext>> EngineContext::Create(const EngineOptions& options,
                                                                     kernels::Backend* backend,
                                                                     uint64_t incarnation,
                                                                     std::vector<EngineObserver*> observers,
                                                                     Runtime* runtime) {
  if (incarnation == 0) return InvalidField("incarnation", "must not be 0", "0");
  if (options.slice_bytes <= 0)
    return InvalidField("slice_bytes", "must be positive", absl::StrCat(options.slice_bytes));
  if (options.staging_bytes / options.slice_bytes < 2) {
    return InvalidField(
        "staging_bytes",
        absl::StrCat("must hold at least two slices of ", errors::ExactBytes(options.slice_bytes)),
        absl::StrCat(options.staging_bytes));
  }
  if (options.ledger_bytes <= 0)
    return InvalidField("ledger_bytes", "must be positive", absl::StrCat(options.ledger_bytes));
  if (!(options.peer_share > 0.0 && options.peer_share <= 1.0))
    return InvalidField("peer_share", "must be in (0, 1]", absl::StrCat(options.peer_share));
  auto planned = backend->PlanHostMemory(kernels::MemoryKind::kLedger, options.ledger_bytes);
  if (!planned.ok()) return planned;
  auto staging = StagingPool::Create(backend, options.staging_bytes, options.slice_bytes, options.peer_share);
  if (!staging.ok()) return staging.status();
  if (options.retained_bytes < 0) {
    return InvalidField("retained_bytes", "must not be negative", absl::StrCat(options.retained_bytes));
  }
  std::unique_ptr<kernels::RetainedMemory> retained;
  if (options.retained_bytes > 0) {
    auto allocated = backend->AllocateRetained(options.retained_bytes);
    if (!allocated.ok()) return allocated.status();
    retained = *std::move(allocated);
  }
  return std::make_unique<EngineContext>(options, backend, incarnation, std::move(observers),
                                         *std::move(staging), std::move(retained), runtime);
}

EngineContext::EngineContext(const EngineOptions& engine_options, kernels::Backend* engine_backend,
                             uint64_t engine_incarnation, std::vector<EngineObserver*> engine_observers,
                             std::unique_ptr<StagingPool> staging_pool,
                             std::unique_ptr<kernels::RetainedMemory> retained_memory,
                             Runtime* engine_runtime)
    : options(engine_options),
      backend(engine_backend),
      incarnation(engine_incarnation),
      observers(std::move(engine_observers)),
      runtime(engine_runtime),
      staging(std::move(staging_pool)),
      retained(std::move(retained_memory)),
      retained_ranges(retained == nullptr ? 0 : retained->size(), RangeAllocator::kAlignment,
                      options.peer_share),
      stream_places(options.max_streams, options.peer_share),
      row_memory(options.ledger_bytes, options.peer_share),
      loop(&mutex, backend->max_chunks_in_flight(), runtime),
      notifier(runtime) {}

absl::Status EngineContext::NoteIfLost(absl::Status from_backend) const {
  if (absl::IsUnavailable(from_backend)) observers.Tell(&EngineObserver::OnDeviceError, from_backend);
  return from_backend;
}

}  // namespace lossd::engine
