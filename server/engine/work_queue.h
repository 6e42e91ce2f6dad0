// SPDX-License-Identifier: Apache-2.0
// What waits for the device on one head, in order: slices and operations, and the choice of what goes
// next.
//
// Peers share the device in rounds: of each peer that has slices here, about `round_rows` rows belong to a
// round, and the slices of a round come before those of the next one. Within a round the order is that of
// arrival. So a peer that queues much does not hold up the others, whose slices join the round that has
// begun. The slices of a peer keep their order, and none passes an operation.
//
// Plain state without locks; the engine's lock guards it.
#ifndef LOSSD_SERVER_ENGINE_WORK_QUEUE_H_
#define LOSSD_SERVER_ENGINE_WORK_QUEUE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "server/engine/chunk_policy.h"
#include "server/engine/ledger.h"
#include "server/engine/slice_work.h"
#include "server/head/head.h"

namespace lossd::engine {

// Something to run on the device thread while no chunk of the head is in flight. Owned by the thread
// that waits for `done`.
struct Operation {
  absl::FunctionRef<absl::Status(head::Head&)> run;
  absl::Status result;
  absl::Notification done;
  uint64_t arrival = 0;  // set when it is queued
};

class WorkQueue {
 public:
  // `round_rows`: those of a chunk, so that a round of one peer fills one.
  explicit WorkQueue(int64_t round_rows) : round_rows_(round_rows) {}

  void Push(std::unique_ptr<SliceWork> slice);
  void Push(Operation* operation);

  // Removes the slices of failed streams.
  std::vector<std::unique_ptr<SliceWork>> TakeFailed();
  // Removes all operations.
  std::vector<Operation*> TakeOperations();

  // The operation at the front; null if a slice is there or nothing.
  Operation* FrontOperation() const;
  // The same, removed.
  Operation* TakeOperation();
  // The next chunk: the front slice and those behind it, up to the next operation, that share its options,
  // dtype and kind, at most `chunk_rows` rows in all.
  NextChunk Next(int64_t chunk_rows) const;
  // Its slices, removed, with their rows reserved in the ledger; only those before the first one with rows
  // that another chunk is computing right now.
  std::vector<std::unique_ptr<SliceWork>> TakeChunk(int64_t chunk_rows, Ledger& ledger);

  bool empty() const { return items_.empty(); }
  int64_t slices() const { return slices_; }
  int64_t rows() const { return rows_; }
  int64_t operations() const { return static_cast<int64_t>(items_.size()) - slices_; }

 private:
  using Item = std::variant<std::unique_ptr<SliceWork>, Operation*>;

  // Calls fn(position) for the slices of the next chunk while it returns true; returns whether no further
  // slice can join them.
  template <typename Fn>
  bool ForEachOfNext(int64_t chunk_rows, Fn fn) const;

  // The round of a slice that is pushed now.
  int64_t RoundOf(const SliceWork& slice);
  // Forgets the peers that have nothing of the present round or a later one.
  void ForgetPeers();

  const int64_t round_rows_;
  int64_t round_ = 0;                     // that of the last chunk
  std::map<std::string, int64_t> given_;  // by peer: rows up to its last slice, round_rows_ for each round
  std::deque<Item> items_;
  int64_t slices_ = 0;
  int64_t rows_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_WORK_QUEUE_H_
