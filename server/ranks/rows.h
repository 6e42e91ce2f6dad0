// SPDX-License-Identifier: Apache-2.0
// Memory for rows that the leader shares with the workers of its host. The message of a slice then names a
// place in this memory instead of bringing the hidden states. Rows that cannot be shared with a worker travel
// in messages, as they also do to workers of other hosts.
//
// - SharedRows is the leader's side: it makes the memory and hands it to workers over a Unix socket.
// - MappedRows is a worker's side: it maps the memory.
// - RowRegions is the leader's table of which worker has mapped which memory.
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

// The leader's table of regions. A region is memory that rows lie in; the table knows which workers have
// mapped it. It also queues the news (a region is new, or gone) that a worker has not been told yet.
//
// Thread-safe. Bounded: at most kMost regions, and for each worker one piece of news about each region.
class RowRegions {
 public:
  static constexpr size_t kMost = 1024;

  // `on_news` is called, on any thread, when there may be news for a worker. It must not call into this
  // object.
  RowRegions(int ranks, std::function<void()> on_news);

  // ---- For the owners of memory ----
  // Adds a region and returns its id. Returns 0 if there are too many regions, or if another region begins at
  // the same address; rows in `memory` then travel in messages. `descriptor`: the file of `memory`, which
  // begins at offset 0 and has whole pages. Call Remove once no chunk uses the memory, before the memory is
  // freed.
  uint64_t Add(absl::Span<uint8_t> memory, wire::OwnedDescriptor descriptor);
  void Remove(uint64_t region);
  // Waits, at most for `limit`, until each connected worker has mapped or refused the region.
  void AwaitAnswers(uint64_t region, absl::Duration limit) const;

  // ---- For chunks ----
  // The place of the `bytes` bytes from `begin` on, in a region that worker `rank` has mapped. nullopt: there
  // is no such region.
  std::optional<v1::RowsPlace> Find(int rank, const void* begin, size_t bytes) const;

  // ---- For the workers' connections ----
  // Call when the worker has connected. Returns false if it has connected before: a worker may connect only
  // once.
  bool Enter(int rank);
  // Call when the worker's connection has ended. From then on no memory is shared with the worker, although
  // it may still have memory mapped.
  void Leave(int rank);
  bool AnyHere() const;
  struct News {
    v1::RowsFromLeader message;
    std::shared_ptr<const wire::OwnedDescriptor> descriptor;  // null: the region is gone
  };
  // The first piece of news for worker `rank`; nullopt: there is none. Once it is sent, call Told, which
  // drops it.
  std::optional<News> NextNews(int rank) const;
  void Told(int rank, const News& news);
  // The worker has answered that it has mapped the region or has refused it. Returns false if the worker was
  // not told of the region.
  bool OnAnswer(int rank, uint64_t region, bool mapped);

 private:
  enum class State { kTold, kMapped, kRefused };
  struct Worker {
    bool here = false;
    bool was_here = false;
    std::deque<v1::RowsFromLeader> news;
    std::map<uint64_t, State> regions;  // the regions that the worker was told of and that are not gone
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

// The worker's side. MappedRows maps the memory that the leader shares, as staging memory of the worker's
// backend. The leader counts the memory; the worker does not.
//
// Thread-safe. It has one thread, which maps regions that the leader shares and unmaps regions that are gone.
class MappedRows {
 public:
  // How long the leader may take to answer the worker's token.
  static constexpr absl::Duration kWelcomeTimeout = absl::Seconds(10);

  // Connects to the leader's socket. UNAVAILABLE, saying why, if no process listens there (the leader is on
  // another host, or in another network namespace), or if a process of another user does. The backend
  // outlives the object.
  static absl::StatusOr<std::unique_ptr<MappedRows>> Connect(const std::string& socket,
                                                             const std::string& token,
                                                             kernels::Backend* backend);
  // Unmaps all regions that no Rows object holds.
  ~MappedRows();
  MappedRows(const MappedRows&) = delete;
  MappedRows& operator=(const MappedRows&) = delete;

  // A place in mapped memory, for reading and writing. The memory stays mapped while the object exists.
  // Destroy the object before the backend.
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
  // Reads one message. Returns whether the connection goes on.
  bool Read();
  absl::Status Map(uint64_t region, uint64_t bytes, wire::OwnedDescriptor descriptor);

  const wire::OwnedDescriptor socket_;
  kernels::Backend* const backend_;
  const wire::OwnedDescriptor stop_;
  mutable absl::Mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Region>> regions_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// The leader's side. SharedRows allocates the staging memory of the group as memfds, and sends their
// descriptors to the workers over a Unix socket.
//
// The socket is abstract and has a random name. It serves only processes of the leader's user and of root
// (SO_PEERCRED) that send the token of their rank. Workers get the token over the gRPC connection of the
// ranks.
//
// Thread-safe. It has one thread.
class SharedRows final : public kernels::GroupStaging {
 public:
  // How long Allocate waits for the workers to map new memory. A worker that takes longer gets rows in
  // messages until it has mapped the memory.
  static constexpr absl::Duration kMapTimeout = absl::Seconds(10);
  // How long a process that has connected may take to send its token.
  static constexpr absl::Duration kTokenTimeout = absl::Seconds(10);

  // Makes the socket for workers 1 to `ranks` - 1. UNAVAILABLE if the system refuses.
  static absl::StatusOr<std::unique_ptr<SharedRows>> Listen(int ranks);
  ~SharedRows() override;
  SharedRows(const SharedRows&) = delete;
  SharedRows& operator=(const SharedRows&) = delete;

  // What a worker needs to connect: the name "@..." of the socket, and the worker's token of 32 random bytes,
  // which admits one connection.
  const std::string& socket() const { return name_; }
  const std::string& TokenOf(int rank) const { return tokens_[static_cast<size_t>(rank)]; }

  RowRegions& regions() { return regions_; }

  // How long ago the thread last looked for work.
  absl::Duration Silence() const { return beat_.Silence(); }

  // Allocates memory and shares it with all connected workers before it returns. Destroy the result before
  // this object.
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> Allocate(kernels::Backend* first,
                                                                   int64_t bytes) override;
  // Adopts the caller's memory. If the options have a descriptor, the workers get it soon after. Destroy the
  // result before this object.
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> Adopt(
      kernels::Backend* first, absl::Span<uint8_t> memory, const kernels::AdoptOptions& options) override;

 private:
  struct Session {
    wire::OwnedDescriptor socket;
    int rank = 0;  // 0: it has not sent its token
    absl::Time deadline;
  };

  SharedRows(int ranks, std::string name, std::vector<std::string> tokens,
             std::vector<access::ListeningSocket> listeners);
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateShared(kernels::Backend* first,
                                                                         int64_t bytes);
  // ---- On the thread ----
  void Run();
  void Accept(int listener);
  // The next three return whether the session goes on.
  bool Read(Session* session);
  bool Enter(Session* session, const v1::RowsFromWorker& message);
  bool Write(const Session& session);
  int PollTimeoutMilliseconds() const;

  const std::string name_;
  const std::vector<std::string> tokens_;  // by rank
  access::Entrance entrance_;
  const wire::OwnedDescriptor wake_;
  const wire::OwnedDescriptor stop_;
  RowRegions regions_;
  std::list<Session> sessions_;  // used only by the thread
  clocks::Heartbeat beat_;
  std::thread thread_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_ROWS_H_
