// SPDX-License-Identifier: Apache-2.0
// Calls back about the chunks of a head in the order of their submission, whichever member of the group is
// ready first: the results of a chunk after those of the chunks before it, and its end after theirs.
//
// Thread-safe. Callbacks run on whatever thread brought the news, one at a time and without the lock.
#ifndef LOSSD_KERNELS_GROUP_CHUNK_ORDER_H_
#define LOSSD_KERNELS_GROUP_CHUNK_ORDER_H_

#include <cstddef>
#include <deque>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/group/group_chunk.h"

namespace lossd::kernels {

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

#endif  // LOSSD_KERNELS_GROUP_CHUNK_ORDER_H_
