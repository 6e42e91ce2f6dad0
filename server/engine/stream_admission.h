// SPDX-License-Identifier: Apache-2.0
// The streams of one head, from their beginning to their end. StreamAdmission lets a stream begin and gives
// back at its end what it had; StreamSet has the streams that are open, and ends them.
//
// Guarded by the engine's lock, which is held in all calls.
#ifndef LOSSD_SERVER_ENGINE_STREAM_ADMISSION_H_
#define LOSSD_SERVER_ENGINE_STREAM_ADMISSION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "server/engine/deterministic_schedule.h"
#include "server/engine/device_loop.h"
#include "server/engine/engine_context.h"
#include "server/engine/ledger.h"
#include "server/engine/open_step.h"
#include "server/engine/schedule.h"
#include "server/engine/staging.h"
#include "server/engine/stream.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {

// The open streams of one head: their failures and their ends. The notifier calls their observers, without
// the lock.
class StreamSet {
 public:
  using Predicate = absl::FunctionRef<bool(const StreamState&)>;

  // All outlive the set. `order`: HeadSession::order.
  StreamSet(Schedule* schedule, const DeterministicSchedule* order, DeferredMicrobatches* deferred,
            Notifier* notifier, Runtime* runtime)
      : schedule_(schedule), order_(order), deferred_(deferred), notifier_(notifier), runtime_(runtime) {}

  // Called at the end of every stream, when it is no longer in the set.
  using OnEnd = std::function<void(StreamState&)>;
  void set_on_end(OnEnd on_end) { on_end_ = std::move(on_end); }

  // The parts of the stream's rows that no other stream in the set has that accumulates the same microbatch.
  // `shared`: there is such a stream.
  std::vector<RowRange> OwnRows(const StreamState& stream, bool* shared) const;

  void Add(std::shared_ptr<StreamState> stream) { streams_.push_back(std::move(stream)); }
  int64_t size() const { return static_cast<int64_t>(streams_.size()); }
  int64_t accumulating() const;  // of them, those that accumulate and have not failed
  // Counts the calls of contributions, which are open beside the streams. Thread-safe.
  const std::shared_ptr<CountedCall::Counter>& contributions() const { return contributions_; }

  // Fails a stream with `why` (not OK) and drops its slices that are not on the device; nothing if it is
  // over.
  void Fail(StreamState& stream, absl::Status why);
  // The same for every stream for which `why` is not OK; ends those that are ready to.
  void FailEach(absl::FunctionRef<absl::Status(const StreamState&)> why);
  void FailIf(Predicate wanted, const absl::Status& why);
  // Fails every stream, also those that have not been started.
  void EndAll(const absl::Status& why);
  // As DeferredMicrobatches::CheckAdd, for rows that open streams are going to retain.
  absl::Status CheckRetaining(uint64_t id, const MicrobatchTerms& terms, RowRange rows) const;
  // Ends the stream if all is done: keeps the rows that it retained, and tells its observer.
  void FinishIfReady(const std::shared_ptr<StreamState>& stream);

 private:
  void DropFailed();

  Schedule* const schedule_;
  const DeterministicSchedule* const order_;
  DeferredMicrobatches* const deferred_;
  Notifier* const notifier_;
  Runtime* const runtime_;
  OnEnd on_end_ = [](StreamState&) {};
  std::vector<std::shared_ptr<StreamState>> streams_;
  const std::shared_ptr<CountedCall::Counter> contributions_ = std::make_shared<CountedCall::Counter>(0);
};

// How a stream begins and ends for the rest of the head. A new stream is checked, pays for its rows, is
// entered in the ledger and takes one of its peer's places. At its end it gives the memory and the place
// back, and its rows stay in the ledger or leave it. A stream that is refused leaves no trace.
class StreamAdmission {
 public:
  // What a stream is admitted to. All outlive this.
  struct Parts {
    EngineContext* context;
    const kernels::HeadConfig* config;
    OpenStep* step;
    DeferredMicrobatches* deferred;
    Schedule* schedule;
    DeterministicSchedule* order;  // HeadSession::order
    StreamSet* streams;
  };

  explicit StreamAdmission(const Parts& parts) : parts_(parts) {}

  // As Engine::Open and Engine::OpenBackward, for this head. `teacher`: CheckDistillation's, or none.
  absl::StatusOr<std::shared_ptr<StreamState>> Open(StreamSpec spec, std::shared_ptr<StreamObserver> observer,
                                                    TeacherOf teacher = {});
  absl::StatusOr<std::shared_ptr<StreamState>> OpenBackward(BackwardSpec spec,
                                                            std::shared_ptr<StreamObserver> observer);
  // The stream is over and has left the set.
  void OnEnd(StreamState& stream);

 private:
  // RESOURCE_EXHAUSTED if the peer may not open one stream more.
  absl::Status CheckPlaces(absl::string_view peer) const;
  // The step that a call names, if it names one, is open.
  absl::Status CheckStep(absl::string_view field, std::optional<uint64_t> named, absl::string_view run) const;
  absl::StatusOr<std::shared_ptr<StreamState>> MakeStream(StreamSpec spec,
                                                          std::shared_ptr<StreamObserver> observer,
                                                          TeacherOf teacher = {});
  // Finds a place for the hidden states of a stream that retains them.
  absl::Status ReserveRetained(StreamState& stream);
  // `size`: what a caller takes for the head's D.
  absl::Status CheckHiddenSize(absl::string_view field, uint64_t size) const;
  // Enters a checked stream into the ledger and the set.
  absl::StatusOr<std::shared_ptr<StreamState>> Admit(std::shared_ptr<StreamState> stream);
  // The account that pays for what is known of the stream's rows.
  RowMemory::Account AccountOf(const StreamState& stream);
  // Enters the stream's rows in the ledger.
  absl::Status Declare(const StreamState& stream);

  const Parts parts_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_ADMISSION_H_
