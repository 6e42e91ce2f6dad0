// SPDX-License-Identifier: Apache-2.0
// The chunks of a group (group_backend.h) while its members compute them. Divide decides which member
// computes which slices of a chunk. GroupChunk is a chunk that is divided into parts. ChunkOrder calls the
// callbacks of a head's chunks in order.
#ifndef LOSSD_KERNELS_GROUP_GROUP_CHUNK_H_
#define LOSSD_KERNELS_GROUP_GROUP_CHUNK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::kernels {

// The slices of a chunk that one member computes together, as a chunk of its own.
struct ChunkPart {
  int member = 0;
  int64_t rows = 0;
  std::vector<size_t> slices;  // indexes into the whole chunk's slices, ascending

  friend bool operator==(const ChunkPart&, const ChunkPart&) = default;
};

// The limits of Divide.
struct DivisionLimits {
  int members = 1;
  int64_t member_rows = 0;  // the most rows of a part; no slice has more rows
  // A chunk of fewer rows than this goes to one member, because a pass over the weight gradient costs each
  // member the same for any number of rows.
  int64_t least_rows = 0;
};

// Decides which of several members computes which slices of a chunk. A member is a device, or a replica of
// several devices. A pure function; thread-safe.
//
// Slices are not divided, and keep their order. Each slice, the largest first, goes to the member that has
// the fewest rows so far, so the members' rows differ by at most one slice. If several members have equally
// few rows, the first of them, counted from `first_member` on, gets the slice. A chunk that is not divided
// goes to `first_member`. If a member's slices together have more rows than a part may have, they become
// several parts. An empty chunk is one part without slices.
//
// `homes`: for each slice, the member that must compute it, because its device has the hidden states; -1: any
// member. Empty: any member for all slices. A chunk that is not divided goes to the home of most of its rows.
std::vector<ChunkPart> Divide(absl::Span<const Slice> slices, const DivisionLimits& limits, int first_member,
                              absl::Span<const int> homes = {});

// One chunk of a group. Each part has a chunk of its own with copies of its slices. The results of the parts
// are combined in the whole chunk.
//
// Threads. The members call OnResults and OnDone of their parts on their own threads. Everything else is for
// one thread at a time. CallResults and CallDone come after all parts have called OnResults or OnDone.
class GroupChunk {
 public:
  // Either each slice of `whole` is in one of the `parts`, or every part has all slices. The results of a
  // slice are taken from the first part that has the slice.
  GroupChunk(Chunk* whole, ChunkCallbacks callbacks, std::vector<ChunkPart> parts);
  // A chunk that is refused with an error.
  GroupChunk(absl::Status refusal, ChunkCallbacks callbacks);
  GroupChunk(const GroupChunk&) = delete;
  GroupChunk& operator=(const GroupChunk&) = delete;

  size_t parts() const { return parts_.size(); }
  int member(size_t part) const { return divided_[part].member; }
  int64_t rows(size_t part) const { return divided_[part].rows; }
  Chunk* chunk(size_t part) { return &parts_[part].chunk; }

  // The callbacks of a part. Each returns true if all other parts have called it before.
  bool OnResults(size_t part, const absl::Status& status);
  bool OnDone(size_t part, const absl::Status& status);

  // Called when all parts have results: writes the results into the whole chunk and calls its on_results,
  // with the first error in the order of the parts if there is one.
  void CallResults();
  // Called when all parts are done: calls the whole chunk's on_done with the first error, or with DATA_LOSS
  // if some parts failed before they had results and other parts accumulated.
  void CallDone();

 private:
  struct Part {
    Chunk chunk;
    std::vector<Slice> slices;
    absl::Status results;
    absl::Status done;
  };

  void CollectSlices();
  // Takes the description of how the chunk was computed from the part with the most rows that count.
  void CollectChoices();
  absl::Status DoneStatus() const;

  Chunk* const whole_;
  ChunkCallbacks callbacks_;
  const absl::Status refusal_;
  const std::vector<ChunkPart> divided_;
  std::vector<Part> parts_;  // parallel to divided_
  absl::Mutex mutex_;
  size_t without_results_ ABSL_GUARDED_BY(mutex_);
  size_t unfinished_ ABSL_GUARDED_BY(mutex_);
};

// Calls the callbacks of a head's chunks in the order of submission, even if the members finish the chunks in
// another order. on_results of a chunk is called after on_results of all chunks before it. The same holds for
// on_done.
//
// Thread-safe. Callbacks run on the threads that call this object, one at a time and without the lock.
class ChunkOrder {
 public:
  // Adds a submitted chunk. A refused chunk has no parts; its callbacks run when its turn comes.
  void Add(std::shared_ptr<GroupChunk> chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  // All parts of the chunk have results (OnResults), or are done (OnDone).
  void OnResults(const GroupChunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone(const GroupChunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the last callback of every chunk has returned.
  void WaitUntilIdle() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::shared_ptr<GroupChunk> chunk;
    bool has_results = false;
    bool is_done = false;
  };

  Entry& EntryOf(const GroupChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Runs the callbacks that are due. If another thread is running callbacks, that thread runs the due
  // callbacks, too.
  void Advance() ABSL_LOCKS_EXCLUDED(mutex_);
  bool CallNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  // The number of entries, from the front, whose on_results has been called.
  size_t told_ ABSL_GUARDED_BY(mutex_) = 0;
  bool calling_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_GROUP_CHUNK_H_
