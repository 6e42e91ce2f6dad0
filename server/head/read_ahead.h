// Bytes on their way from a producer (the device) to a consumer (the disk) on another thread, through buffers
// of one size that are used again. The producer may be ahead by as many buffers as there may be.
//
// Thread-safe, for one producer and one consumer. Buffers are allocated when they are first needed.
#ifndef LOSSD_SERVER_HEAD_READ_AHEAD_H_
#define LOSSD_SERVER_HEAD_READ_AHEAD_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace lossd::head {

class ReadAhead {
 public:
  // A buffer, and of it the part that is in use.
  struct Block {
    std::unique_ptr<uint8_t[]> buffer;
    size_t bytes = 0;
    size_t tensor = 0;  // which one they belong to; the producer's and the consumer's affair

    absl::Span<uint8_t> span() const { return {buffer.get(), bytes}; }
  };

  // `buffer_bytes` and `most_buffers` are at least 1.
  ReadAhead(size_t buffer_bytes, int64_t most_buffers);

  // ---- Producer ----
  // A block without content; nullopt if none is free by `deadline` or the consumer has failed.
  std::optional<Block> Take(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void Put(Block block) ABSL_LOCKS_EXCLUDED(mutex_);
  // Nothing more will come; not OK: and what is there is to be dropped.
  void Close(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  // True once the consumer has ended, at the latest by `deadline`.
  bool WaitUntilEnded(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // What the consumer ended with; OK while it has not.
  absl::Status result() const ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Consumer ----
  // The next block in the order of Put; nullopt after the last one. Blocks.
  std::optional<Block> Next() ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(Block block) ABSL_LOCKS_EXCLUDED(mutex_);
  // What the producer closed with.
  absl::Status closed_with() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Last.
  void End(absl::Status result) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool CanTake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return ended_ || !free_.empty() || buffers_ < most_buffers_;
  }
  bool CanGo() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closed_ || !filled_.empty(); }
  bool Ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_; }

  const size_t buffer_bytes_;
  const int64_t most_buffers_;

  mutable absl::Mutex mutex_;
  std::vector<std::unique_ptr<uint8_t[]>> free_ ABSL_GUARDED_BY(mutex_);
  std::deque<Block> filled_ ABSL_GUARDED_BY(mutex_);
  int64_t buffers_ ABSL_GUARDED_BY(mutex_) = 0;  // allocated so far
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status closed_with_ ABSL_GUARDED_BY(mutex_);
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_READ_AHEAD_H_
