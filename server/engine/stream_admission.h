// SPDX-License-Identifier: Apache-2.0
// The streams of one head, from their beginning to their end. StreamAdmission checks and admits a new stream,
// and gives back its memory and place at its end. StreamSet holds the open streams, and fails and ends them.
//
// Threads. The engine's lock guards all of it and is held in all calls.
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

// The open streams of one head. It fails streams and ends them; the notifier calls their observers, without
// the lock.
class StreamSet {
 public:
  using Predicate = absl::FunctionRef<bool(const StreamState&)>;

  // All arguments outlive the set. `order`: HeadSession::order, may be null.
  StreamSet(Schedule* schedule, const DeterministicSchedule* order, DeferredMicrobatches* deferred,
            Notifier* notifier, Runtime* runtime)
      : schedule_(schedule), order_(order), deferred_(deferred), notifier_(notifier), runtime_(runtime) {}

  // Called at the end of every stream, after it has left the set.
  using OnEnd = std::function<void(StreamState&)>;
  void set_on_end(OnEnd on_end) { on_end_ = std::move(on_end); }

  // The parts of the stream's rows that belong to no other stream in the set that accumulates the same
  // microbatch. `shared` becomes true if there is such another stream.
  std::vector<RowRange> OwnRows(const StreamState& stream, bool* shared) const;

  void Add(std::shared_ptr<StreamState> stream) { streams_.push_back(std::move(stream)); }
  int64_t size() const { return static_cast<int64_t>(streams_.size()); }
  int64_t accumulating() const;  // streams that accumulate and have not failed
  // Counts the open AddGradient calls, which are no streams. Thread-safe.
  const std::shared_ptr<CountedCall::Counter>& contributions() const { return contributions_; }

  // Fails a stream with `why` (not OK) and drops its slices that are not on the device. Does nothing if the
  // stream has failed or finished.
  void Fail(StreamState& stream, absl::Status why);
  // Fails every stream for which `why` returns an error, and ends those of them that are ready to finish.
  void FailEach(absl::FunctionRef<absl::Status(const StreamState&)> why);
  // As FailEach, with the error `why` for every stream that `wanted` accepts.
  void FailIf(Predicate wanted, const absl::Status& why);
  // Fails every stream, including streams that were not started.
  void EndAll(const absl::Status& why);
  // As DeferredMicrobatches::CheckAdd, against the rows that open streams are going to retain.
  absl::Status CheckRetaining(uint64_t id, const MicrobatchTerms& terms, RowRange rows) const;
  // Ends the stream if it is ready to finish: keeps the rows that it retained, and tells its observer.
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

// StreamAdmission begins and ends a stream for the other parts of the head. At the beginning it checks the
// stream, takes memory for its rows from RowMemory, enters the rows in the ledger, and takes one of the
// peer's places. At the end it gives memory and place back, and the rows stay in the ledger or are withdrawn.
// A stream that is refused changes nothing.
class StreamAdmission {
 public:
  // The parts of the head. All outlive this object.
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

  // As Engine::Open and Engine::OpenBackward, for this head. `teacher`: from CheckDistillation, or none.
  absl::StatusOr<std::shared_ptr<StreamState>> Open(StreamSpec spec, std::shared_ptr<StreamObserver> observer,
                                                    TeacherOf teacher = {});
  absl::StatusOr<std::shared_ptr<StreamState>> OpenBackward(BackwardSpec spec,
                                                            std::shared_ptr<StreamObserver> observer);
  // Called when the stream has ended and left the set.
  void OnEnd(StreamState& stream);

 private:
  // RESOURCE_EXHAUSTED if the peer may not open one more stream.
  absl::Status CheckPlaces(absl::string_view peer) const;
  // Checks that the step that a call names, if it names one, is open.
  absl::Status CheckStep(absl::string_view field, std::optional<uint64_t> named, absl::string_view run) const;
  absl::StatusOr<std::shared_ptr<StreamState>> MakeStream(StreamSpec spec,
                                                          std::shared_ptr<StreamObserver> observer,
                                                          TeacherOf teacher = {});
  // Reserves retained memory for the hidden states of a stream that retains them.
  absl::Status ReserveRetained(StreamState& stream);
  // `size`: the hidden size that the caller expects; 0: none.
  absl::Status CheckHiddenSize(absl::string_view field, uint64_t size) const;
  // Enters a checked stream in the ledger and in the set.
  absl::StatusOr<std::shared_ptr<StreamState>> Admit(std::shared_ptr<StreamState> stream);
  // The account that pays for what is known of the stream's rows.
  RowMemory::Account AccountOf(const StreamState& stream);
  // Enters the stream's rows in the ledger.
  absl::Status Declare(const StreamState& stream);

  const Parts parts_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_ADMISSION_H_
