// SPDX-License-Identifier: Apache-2.0
// The open streams of one head: their failures and their ends.
//
// Guarded by the engine's lock, which is held in all calls; observers are called by the notifier, without it.
#ifndef LOSSD_SERVER_ENGINE_STREAM_SET_H_
#define LOSSD_SERVER_ENGINE_STREAM_SET_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/engine/contribution.h"
#include "server/engine/deferred.h"
#include "server/engine/notifier.h"
#include "server/engine/runtime.h"
#include "server/engine/schedule.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {

class StreamSet {
 public:
  using Predicate = absl::FunctionRef<bool(const StreamState&)>;

  // All outlive the set.
  StreamSet(Schedule* schedule, DeferredMicrobatches* deferred, Notifier* notifier, Runtime* runtime)
      : schedule_(schedule), deferred_(deferred), notifier_(notifier), runtime_(runtime) {}

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
  DeferredMicrobatches* const deferred_;
  Notifier* const notifier_;
  Runtime* const runtime_;
  OnEnd on_end_ = [](StreamState&) {};
  std::vector<std::shared_ptr<StreamState>> streams_;
  const std::shared_ptr<CountedCall::Counter> contributions_ = std::make_shared<CountedCall::Counter>(0);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_SET_H_
