// SPDX-License-Identifier: Apache-2.0
// Rows in memory that the leader shares with the workers of its host. SharedRows is the leader's side: it
// makes the memory and hands it to workers over a Unix socket. MappedRows is a worker's side: it maps the
// memory. RowRegions is the leader's table of which worker has mapped which memory. Slices then name places
// in that memory instead of bringing hidden states. Rows that cannot be shared with a worker travel in
// messages, as to the workers of other hosts.
//
// All three are thread-safe. SharedRows and MappedRows have one thread each.
#ifndef LOSSD_SERVER_RANKS_ROWS_H_
#define LOSSD_SERVER_RANKS_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "kernels/group/group_backend.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "proto/wire/region_packets.h"
#include "server/access/entrance.h"

namespace lossd::ranks {

// The leader's table of regions: memory that rows lie in, and which workers have mapped it. It keeps the news
// that a worker has not been told yet.
//
// Thread-safe. Bounded: at most kMost regions, and for each worker one piece of news of each.
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

// A worker's side: the leader's memory, mapped here, as staging memory of the worker's backend. The worker
// does not count the memory; the leader does.
//
// Thread-safe. One thread, which maps what the leader shares and unmaps what is gone.
class MappedRows {
 public:
  // How long the leader may take to answer a token.
  static constexpr absl::Duration kWelcomeTimeout = absl::Seconds(10);

  // UNAVAILABLE, saying why, if nobody listens there (the leader is on another host, or in another network
  // namespace), or another user does. The backend outlives the object.
  static absl::StatusOr<std::unique_ptr<MappedRows>> Connect(const std::string& socket,
                                                             const std::string& token,
                                                             kernels::Backend* backend);
  // Unmaps what no Rows holds.
  ~MappedRows();
  MappedRows(const MappedRows&) = delete;
  MappedRows& operator=(const MappedRows&) = delete;

  // Mapped memory that is read or written; stays mapped until the object goes, which is before the backend.
  struct Rows {
    std::shared_ptr<const void> region;
    uint8_t* data = nullptr;
  };
  // INTERNAL if no such region is mapped, or the bytes do not lie in it.
  absl::StatusOr<Rows> Find(const v1::RowsPlace& place, uint64_t bytes) const;

 private:
  struct Region;

  MappedRows(wire::OwnedDescriptor socket, kernels::Backend* backend);
  void Run();
  // Whether the connection goes on.
  bool Read();
  absl::Status Map(uint64_t region, uint64_t bytes, wire::OwnedDescriptor descriptor);

  const wire::OwnedDescriptor socket_;
  kernels::Backend* const backend_;
  const wire::OwnedDescriptor stop_;
  mutable absl::Mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Region>> regions_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// The leader's side. Staging memory of the group is a memfd, whose descriptor goes to the workers over a Unix
// socket.
//
// The socket is an abstract one with a random name. It serves processes of the leader's user and root
// (SO_PEERCRED) that know the token of their rank, which goes over the ranks' own connection.
//
// Thread-safe. One thread.
class SharedRows final : public kernels::GroupStaging {
 public:
  // How long memory waits for the workers to map it. Then they get rows in messages until they have.
  static constexpr absl::Duration kMapTimeout = absl::Seconds(10);
  // How long a process that has connected may take to say its token.
  static constexpr absl::Duration kTokenTimeout = absl::Seconds(10);

  // Makes the socket for workers 1 to `ranks` - 1. UNAVAILABLE if there can be none.
  static absl::StatusOr<std::unique_ptr<SharedRows>> Listen(int ranks);
  ~SharedRows() override;
  SharedRows(const SharedRows&) = delete;
  SharedRows& operator=(const SharedRows&) = delete;

  // What a worker connects by: "@..." and 32 random bytes, which admit one connection.
  const std::string& socket() const { return name_; }
  const std::string& TokenOf(int rank) const { return tokens_[static_cast<size_t>(rank)]; }

  RowRegions& regions() { return regions_; }

  // How long ago the thread last looked for something to do.
  absl::Duration Silence() const { return beat_.Silence(); }

  // Memory of the result is shared with all workers that are here when this returns. It ends before this.
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> Allocate(kernels::Backend* first,
                                                                   int64_t bytes) override;
  // Memory of the result is shared with the workers soon, if the options have a descriptor. It ends before
  // this.
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> Adopt(
      kernels::Backend* first, absl::Span<uint8_t> memory, const kernels::AdoptOptions& options) override;

 private:
  struct Session {
    wire::OwnedDescriptor socket;
    int rank = 0;  // 0: it has not said its token
    absl::Time deadline;
  };

  SharedRows(int ranks, std::string name, std::vector<std::string> tokens,
             std::vector<access::ListeningSocket> listeners);
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateShared(kernels::Backend* first,
                                                                         int64_t bytes);
  // ---- Of the thread ----
  void Run();
  void Accept(int listener);
  // Whether the session goes on.
  bool Read(Session* session);
  bool Enter(Session* session, const v1::RowsFromWorker& message);
  bool Write(const Session& session);
  int Patience() const;  // for poll

  const std::string name_;
  const std::vector<std::string> tokens_;  // by rank
  access::Entrance entrance_;
  const wire::OwnedDescriptor wake_;
  const wire::OwnedDescriptor stop_;
  RowRegions regions_;
  std::list<Session> sessions_;  // of the thread
  clocks::Heartbeat beat_;
  std::thread thread_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_ROWS_H_
