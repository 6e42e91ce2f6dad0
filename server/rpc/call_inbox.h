// SPDX-License-Identifier: Apache-2.0
// What the engine tells a ComputeLoss call. The call is given it one piece after another, in order: what
// takes microseconds by the engine's thread that brings it, since waking another thread takes longer, and all
// else in turns on a pool of workers.
//
// Thread-safe. The handler is never called by two threads at a time; it is called by a worker, or by the
// thread that leaves an event if that is quick or the workers take no more tasks. Lifetime: shared by the
// engine (until OnFinished) and turns that are scheduled; it keeps the handler.
#ifndef LOSSD_SERVER_RPC_CALL_INBOX_H_
#define LOSSD_SERVER_RPC_CALL_INBOX_H_

#include <deque>
#include <memory>
#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/engine/stream.h"
#include "server/rpc/worker_pool.h"

namespace lossd::rpc {

class CallInbox final : public engine::StreamObserver, public std::enable_shared_from_this<CallInbox> {
 public:
  struct Slice {
    engine::SliceOutput output;
    absl::Time ready;  // when the engine had it
  };
  struct End {
    absl::Status status;
    engine::StreamSummary summary;
  };
  class Handler {
   public:
    virtual ~Handler() = default;
    // Whether Handle takes only microseconds. Called by one thread at a time, and with slices in their order.
    virtual bool IsQuick(const Slice& slice) = 0;
    virtual void Handle(Slice slice) = 0;
    // The last call.
    virtual void Handle(End end) = 0;
  };

  // `workers` outlives the inbox.
  CallInbox(std::shared_ptr<Handler> handler, WorkerPool* workers)
      : handler_(std::move(handler)), workers_(workers) {}

  // engine::StreamObserver. A slice that has got its memory is received in a turn, too.
  void OnMemory(absl::AnyInvocable<void()> receive) override;
  void OnSlice(engine::SliceOutput output) override;
  void OnFinished(absl::Status status, const engine::StreamSummary& summary) override;

 private:
  using Event = std::variant<absl::AnyInvocable<void()>, Slice, End>;

  void Post(Event event) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the thread that brings an event may deliver it.
  bool IsQuick(const Event& event);
  // Delivers what there is.
  void TakeTurn() ABSL_LOCKS_EXCLUDED(mutex_);
  // The same on the thread that brings an event: leaves the rest to a worker from the first one on that takes
  // its time.
  void TakeQuickTurn() ABSL_LOCKS_EXCLUDED(mutex_);
  void ScheduleTurn();
  void Deliver(Event event);

  const std::shared_ptr<Handler> handler_;
  WorkerPool* const workers_;
  absl::Mutex mutex_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  bool turn_scheduled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALL_INBOX_H_
