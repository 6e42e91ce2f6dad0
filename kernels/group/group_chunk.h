// SPDX-License-Identifier: Apache-2.0
// The chunks of a group while its members compute them: which member computes which slices (Divide), one
// chunk in its parts (GroupChunk), and the order in which chunks are called back (ChunkOrder).
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

// Slices that one member computes as one chunk of its own.
struct ChunkPart {
  int member = 0;
  int64_t rows = 0;
  std::vector<size_t> slices;  // indices, ascending

  friend bool operator==(const ChunkPart&, const ChunkPart&) = default;
};

struct DivisionLimits {
  int members = 1;
  int64_t member_rows = 0;  // the most rows of a part; no slice has more
  // Chunks of fewer rows than this go to one member: each pass over the weight gradient costs a member the
  // same, however few rows it is for.
  int64_t least_rows = 0;
};

// Which of several members computes which slices of a chunk; a member is a device, or a replica of several
// devices. A pure function; thread-safe.
//
// Slices stay whole and in order. Each goes to the member that has the fewest rows so far, the largest slices
// first; so members differ by the rows of one slice at most. Of members that have as few, it is the first
// from `first_member` on; a chunk that is not divided is `first_member`'s. A member's slices become several
// parts if they have more rows than a chunk of its may. An empty chunk is one part without slices.
//
// `homes`: the member that each slice goes to whatever the others have, -1: none; or empty: where hidden
// states are makes no difference. A chunk that is not divided goes to the home of most of its rows.
std::vector<ChunkPart> Divide(absl::Span<const Slice> slices, const DivisionLimits& limits, int first_member,
                              absl::Span<const int> homes = {});

// One chunk of a group: each part has a chunk of its own over copies of its slices, and what came of the
// parts is put together.
//
// Threads. The members call OnResults and OnDone of their parts from threads of their own; everything else is
// for one thread at a time, CallResults and CallDone after all parts have called.
class GroupChunk {
 public:
  // `parts` hold each slice of `whole`: once, or every part all of them. What is said of a slice comes from
  // the first part that has it.
  GroupChunk(Chunk* whole, ChunkCallbacks callbacks, std::vector<ChunkPart> parts);
  // A chunk that is refused.
  GroupChunk(absl::Status refusal, ChunkCallbacks callbacks);
  GroupChunk(const GroupChunk&) = delete;
  GroupChunk& operator=(const GroupChunk&) = delete;

  size_t parts() const { return parts_.size(); }
  int member(size_t part) const { return divided_[part].member; }
  int64_t rows(size_t part) const { return divided_[part].rows; }
  Chunk* chunk(size_t part) { return &parts_[part].chunk; }

  // What a part's callbacks say. True for the last of the parts.
  bool OnResults(size_t part, const absl::Status& status);
  bool OnDone(size_t part, const absl::Status& status);

  // All parts have results: writes them into the whole chunk and calls its on_results; the first error in the
  // order of the parts is that of the chunk.
  void CallResults();
  // All parts are done: calls the whole chunk's on_done with the first error, or with DATA_LOSS if some parts
  // failed before they had results and others accumulated.
  void CallDone();

 private:
  struct Part {
    Chunk chunk;
    std::vector<Slice> slices;
    absl::Status results;
    absl::Status done;
  };

  void CollectSlices();
  // How the chunk was computed is what is said of the part with the most rows that count.
  void CollectChoices();
  absl::Status DoneStatus() const;

  Chunk* const whole_;
  ChunkCallbacks callbacks_;
  const absl::Status refusal_;
  const std::vector<ChunkPart> divided_;
  std::vector<Part> parts_;  // one of `divided_` each
  absl::Mutex mutex_;
  size_t without_results_ ABSL_GUARDED_BY(mutex_);
  size_t unfinished_ ABSL_GUARDED_BY(mutex_);
};

// Calls back about the chunks of a head in the order of their submission, whichever member of the group is
// ready first: the results of a chunk after those of the chunks before it, and its end after theirs.
//
// Thread-safe. Callbacks run on whatever thread brought the news, one at a time and without the lock.
class ChunkOrder {
 public:
  // Takes its place. A chunk without parts is called back when its turn comes.
  void Add(std::shared_ptr<GroupChunk> chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  // All parts of a chunk have results, or are done.
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
  // Makes the callbacks that are due; unless another thread is at it, which then makes them.
  void Advance() ABSL_LOCKS_EXCLUDED(mutex_);
  bool CallNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  size_t told_ ABSL_GUARDED_BY(mutex_) = 0;  // the first entries, whose on_results has been called
  bool calling_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_GROUP_CHUNK_H_
