// SPDX-License-Identifier: Apache-2.0
// The leader's table of regions: memory that rows lie in, and which workers have mapped it. What a worker has
// not been told yet waits here.
//
// Thread-safe. Bounded: at most kMost regions, and for each worker one piece of news of each.
#ifndef LOSSD_SERVER_RANKS_ROW_REGIONS_H_
#define LOSSD_SERVER_RANKS_ROW_REGIONS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "proto/wire/region_packets.h"

namespace lossd::ranks {

class RowRegions {
 public:
  static constexpr size_t kMost = 1024;

  // `on_news` is called when there may be news for a worker; on any thread, and must not call into this.
  RowRegions(int ranks, std::function<void()> on_news);

  // ---- Of those that have memory ----
  // The region's id, or 0 if there are too many, or one begins there: then its rows travel in messages.
  // `descriptor`: of `memory`, from its begin, whole pages. Remove before the memory goes, once no chunk uses
  // it.
  uint64_t Add(absl::Span<uint8_t> memory, wire::OwnedDescriptor descriptor);
  void Remove(uint64_t region);
  // Waits until each worker that is here has mapped the region or has refused it.
  void AwaitAnswers(uint64_t region, absl::Duration limit) const;

  // ---- Of chunks ----
  // Where `bytes` bytes from `begin` on lie in a region that worker `rank` has mapped.
  std::optional<v1::RowsPlace> Find(int rank, const void* begin, size_t bytes) const;

  // ---- Of the workers' connections ----
  // False if the worker is here already, or was.
  bool Enter(int rank);
  // Nothing is shared with it any more. It may still have memory mapped.
  void Leave(int rank);
  bool AnyHere() const;
  struct News {
    v1::RowsFromLeader message;
    std::shared_ptr<const wire::OwnedDescriptor> descriptor;  // null: the region is gone
  };
  // The first that worker `rank` has to hear; nullopt: nothing. Told drops it.
  std::optional<News> NextNews(int rank) const;
  void Told(int rank, const News& news);
  // False if the worker was not told of the region.
  bool OnAnswer(int rank, uint64_t region, bool mapped);

 private:
  enum class State { kTold, kMapped, kRefused };
  struct Worker {
    bool here = false;
    bool was_here = false;
    std::deque<v1::RowsFromLeader> news;
    std::map<uint64_t, State> regions;  // that it was told of, and not yet that they are gone
  };
  struct Region {
    uint64_t id = 0;
    uintptr_t begin = 0;
    size_t bytes = 0;
    std::shared_ptr<const wire::OwnedDescriptor> descriptor;
  };

  Worker& worker(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return workers_[static_cast<size_t>(rank)];
  }
  bool Answered(uint64_t region) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const std::function<void()> on_news_;
  mutable absl::Mutex mutex_;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, Region> regions_ ABSL_GUARDED_BY(mutex_);
  std::map<uintptr_t, uint64_t> by_begin_ ABSL_GUARDED_BY(mutex_);
  std::vector<Worker> workers_ ABSL_GUARDED_BY(mutex_);  // by rank
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_ROW_REGIONS_H_
