// SPDX-License-Identifier: Apache-2.0
// Bytes on their way from producers to consumers on other threads, through buffers of one size that are used
// again: from the device to the disk in a save, the other way round in a load. The producers may be ahead of
// the consumers by as many buffers as there may be.
//
// Blocks go in lanes. Each lane has one consumer, which gets its blocks in the order of Put; all lanes share
// the buffers.
//
// Thread-safe. Buffers are aligned for direct writes and allocated when they are first needed.
#ifndef LOSSD_SERVER_HEAD_READ_AHEAD_H_
#define LOSSD_SERVER_HEAD_READ_AHEAD_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/tensorfile/direct_file.h"
#include "server/head/shards.h"

namespace lossd::head {

class ReadAhead {
 public:
  // A buffer, and of it the part that is in use.
  struct Block {
    formats::AlignedBuffer buffer;
    size_t bytes = 0;
    TensorPart part;  // what the bytes are; the producers' and the consumers' affair

    absl::Span<uint8_t> span() const { return {buffer.get(), bytes}; }
  };

  // All are at least 1.
  ReadAhead(int64_t buffer_bytes, int64_t most_buffers, size_t lanes = 1);

  // ---- Producers ----
  // A block without content; nullopt if none is free by `deadline` or a consumer has failed.
  std::optional<Block> Take(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void Put(Block block, size_t lane = 0) ABSL_LOCKS_EXCLUDED(mutex_);
  // Of the lanes for which `open` is true, at least one, the one with the fewest blocks that wait.
  size_t ShortestLane(const std::vector<bool>& open) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Nothing more will come; not OK: and what is there is to be dropped. The first call counts, but an error
  // counts more than OK.
  void Close(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  // True once the consumers have ended, at the latest by `deadline`.
  bool WaitUntilEnded(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // What the consumers failed or ended with; OK while they have not.
  absl::Status result() const ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Consumers ----
  // The next block of the lane; nullopt after the last one, or when a consumer has failed. Blocks.
  std::optional<Block> Next(size_t lane = 0) ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(Block block) ABSL_LOCKS_EXCLUDED(mutex_);
  // What the producers closed with, or a consumer failed with.
  absl::Status closed_with() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Producers and the other consumers have no reason to go on. The first error counts.
  void Fail(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Last, once for all consumers.
  void End(absl::Status result) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Lane = std::deque<Block>;

  bool Over() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_ || !result_.ok(); }
  bool CanTake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return Over() || !free_.empty() || buffers_ < most_buffers_;
  }
  bool Ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_; }

  const int64_t buffer_bytes_;
  const int64_t most_buffers_;

  mutable absl::Mutex mutex_;
  std::vector<formats::AlignedBuffer> free_ ABSL_GUARDED_BY(mutex_);
  std::vector<Lane> lanes_ ABSL_GUARDED_BY(mutex_);
  int64_t buffers_ ABSL_GUARDED_BY(mutex_) = 0;  // allocated so far
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status closed_with_ ABSL_GUARDED_BY(mutex_);
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_READ_AHEAD_H_
