// SPDX-License-Identifier: Apache-2.0
// Regions is the table of a server's regions by their ids, which cannot be guessed. A region is memory, of
// the host or of a device of the server, that the server shares with a client of the same host. RegionMemory
// is the memory of one region. RegionBudget bounds the memory that all regions of one kind take.
// SessionServer opens a session for each client that connects, and creates a region for it.
//
// A region is in the table as long as its session is open. Code that uses a region holds a shared pointer to
// it. The memory exists, and counts as used, until the last of these pointers is gone.
//
// All classes and functions are thread-safe, except the destructor of SessionServer.
#ifndef LOSSD_SERVER_REGIONS_REGIONS_H_
#define LOSSD_SERVER_REGIONS_REGIONS_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "proto/wire/region_packets.h"
#include "server/access/entrance.h"
#include "server/engine/staging.h"

namespace lossd::regions {

// The memory of a region, of the host or of a device of the server. The client may write to it at any time.
// Thread-safe.
class RegionMemory {
 public:
  virtual ~RegionMemory() = default;
  // The memory's addresses, which the backend can use as staging memory. If it is memory of a device, code on
  // the host must not access them.
  virtual absl::Span<uint8_t> bytes() const = 0;
  // The file descriptor by which the client maps the memory. This object owns it.
  virtual int descriptor() const = 0;
  // The GPU that has the memory, "GPU-..."; empty: memory of the host.
  virtual const std::string& device() const = 0;
  // Copy between a part of bytes() and other memory of the host, and wait for the copy. UNAVAILABLE: the
  // device is lost.
  virtual absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const = 0;
  virtual absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const = 0;
};

// Allocates memory of the host: at least `bytes` > 0, in whole pages. RESOURCE_EXHAUSTED, or the backend's
// error. The backend outlives the memory.
absl::StatusOr<std::unique_ptr<RegionMemory>> HostRegionMemory(kernels::Backend* backend, int64_t bytes);
// Allocates memory of the GPU `device`, one of Backend::SharingDevices. UNIMPLEMENTED if its memory cannot be
// shared.
absl::StatusOr<std::unique_ptr<RegionMemory>> DeviceRegionMemory(kernels::Backend* backend,
                                                                 const std::string& device, int64_t bytes);

// The limit for all regions of one kind of memory (of the host, or of one device), and what they have taken
// of it. Thread-safe.
class RegionBudget {
 public:
  RegionBudget(int64_t bytes, double peer_share)
      : limit_(bytes),
        most_(static_cast<int64_t>(peer_share * static_cast<double>(bytes))),
        shares_(bytes, peer_share) {}

  // Takes `bytes` for `holder`, but at most the share of one holder, even for its first region. If `holder`
  // may not take that much, tries half of it, a quarter, and so on, but not less than `least`. Returns the
  // bytes taken; 0: nothing.
  int64_t Take(absl::string_view holder, int64_t bytes, int64_t least) ABSL_LOCKS_EXCLUDED(mutex_);
  void Give(absl::string_view holder, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t used() const ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t limit() const { return limit_; }

 private:
  const int64_t limit_;
  const int64_t most_;  // the most bytes of one holder
  mutable absl::Mutex mutex_;
  engine::FairShare shares_ ABSL_GUARDED_BY(mutex_);
};

// A region: its id and its memory. Thread-safe.
class Region {
 public:
  Region(std::string id, std::unique_ptr<RegionMemory> memory)
      : id_(std::move(id)), memory_(std::move(memory)) {}

  const std::string& id() const { return id_; }
  const RegionMemory& memory() const { return *memory_; }
  absl::Span<uint8_t> bytes() const { return memory_->bytes(); }

 private:
  const std::string id_;
  const std::unique_ptr<RegionMemory> memory_;
};

// The most bytes that all regions together may have; 0: no regions.
struct RegionLimits {
  int64_t host_bytes = 0;
  int64_t device_bytes = 0;  // of each device
};

// The use of one RegionBudget.
struct RegionUse {
  std::string device;  // "GPU-..."; empty: memory of the host
  int64_t used_bytes = 0;
  int64_t limit_bytes = 0;
};

// The table of a server's regions. Thread-safe. The backend outlives the table and all regions.
class Regions {
 public:
  // The least a region gets, unless less is asked for.
  static constexpr int64_t kLeastBytes = int64_t{1} << 20;

  // A process may have at most `peer_share` of the bytes of the host, and of each device, as in
  // engine::FairShare.
  Regions(kernels::Backend* backend, const RegionLimits& limits, double peer_share);

  // The GPUs whose memory regions may have, in the order of the backend's devices; may be empty.
  const std::vector<std::string>& devices() const { return devices_; }
  // Creates a region of `bytes` > 0, or of less if `holder` may not have that much. `device`: one of
  // devices(); empty: memory of the host. RESOURCE_EXHAUSTED. INVALID_ARGUMENT, naming the field "device",
  // for another device. UNIMPLEMENTED if the device's memory cannot be shared, which is also logged once.
  absl::StatusOr<std::shared_ptr<Region>> Create(const std::string& holder, const std::string& device,
                                                 int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Removes the region from the table, because its session is over.
  void Forget(const std::string& id) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the region with that id. A region belongs to the first `identity` that claims it. Null for other
  // identities, and if there is no such region. "" is the identity of all callers that the server does not
  // ask for one.
  std::shared_ptr<Region> Claim(absl::string_view id, absl::string_view identity) ABSL_LOCKS_EXCLUDED(mutex_);

  // The uses of the host's memory and then of each device, in the order of devices().
  std::vector<RegionUse> Uses() const;
  int64_t used_bytes() const;  // over all kinds of memory

 private:
  struct Entry {
    std::shared_ptr<Region> region;
    std::optional<std::string> owner;  // the identity that has claimed it
  };

  absl::StatusOr<std::unique_ptr<RegionMemory>> Allocate(const std::string& device, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);

  kernels::Backend* const backend_;
  const std::vector<std::string> devices_;
  // By device; "" is the host. Shared, because regions may outlive the table.
  std::map<std::string, std::shared_ptr<RegionBudget>> budgets_;
  absl::Mutex mutex_;
  std::set<std::string> refusals_logged_ ABSL_GUARDED_BY(mutex_);  // devices
  absl::flat_hash_map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

// The limits of a SessionServer.
struct SessionLimits {
  int64_t in_all = 256;
  int64_t per_user = 128;
  absl::Duration request_timeout = absl::Seconds(10);  // from connecting until the request must be there
};

// SessionServer is the server's side of region.proto. It creates a region for each connection that asks for
// one. It removes the region when the connection closes, or when the process that connected has ended, even
// if a child of that process still holds the connection.
//
// SessionServer has one thread, and no client can make it wait: descriptors that clients send are closed on
// another thread (server/access/closer.h). Thread-safe, except its destructor.
class SessionServer {
 public:
  // `listener`: SOCK_SEQPACKET. `regions` outlives this.
  SessionServer(access::ListeningSocket listener, Regions* regions, const SessionLimits& limits);
  // Closes all sessions.
  ~SessionServer();
  SessionServer(const SessionServer&) = delete;
  SessionServer& operator=(const SessionServer&) = delete;

  int64_t sessions() const { return sessions_open_; }
  // The time since the thread last looked for work.
  absl::Duration Silence() const { return beat_.Silence(); }

 private:
  struct Session {
    wire::OwnedDescriptor socket;
    wire::OwnedDescriptor process;  // pidfd, readable when the process has ended; may be none
    std::string holder;             // in whose name memory is taken
    std::string region;             // id of its region; empty: none yet
    absl::Time deadline;
  };

  void Run();
  void Accept(int listener);
  // Handles what the client sent. False: the session is to be closed.
  bool Serve(Session* session);
  void Close(std::list<Session>::iterator session);
  int PollTimeoutMilliseconds() const;

  access::Entrance entrance_;
  Regions* const regions_;
  const SessionLimits limits_;
  const wire::OwnedDescriptor wake_;
  std::list<Session> sessions_;  // used by the thread only
  std::atomic<int64_t> sessions_open_{0};
  clocks::Heartbeat beat_;
  std::thread thread_;
};

}  // namespace lossd::regions

#endif  // LOSSD_SERVER_REGIONS_REGIONS_H_
