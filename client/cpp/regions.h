// SPDX-License-Identifier: Apache-2.0
// Memory that a client shares with a server on the same host, for the rows of its calls. SharedRegion is one
// region, of host memory or of GPU memory. RegionSource opens regions of one kind for the calls of one
// client. DeviceRegions has a RegionSource for each GPU of the server.
//
// All classes are thread-safe.
#ifndef LOSSD_CLIENT_CPP_REGIONS_H_
#define LOSSD_CLIENT_CPP_REGIONS_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/loss_plan.h"
#include "lossd/v1/server.pb.h"
#include "proto/wire/region_packets.h"

namespace lossd::client::internal {

// A region of memory that a server on this host shares with this client (region.proto). The object owns the
// session on the server's region socket and the mapping, and records which parts of the region are in use.
// The region is host memory, or memory of a GPU of the server, which only CUDA's driver may read and write
// (cuda_driver.h).
//
// Thread-safe.

class SharedRegion {
 public:
  static constexpr uint64_t kAlignment = 256;  // bytes; of ranges in a region

  // Asks the server, at its region socket, for a region of about `bytes`: memory of the GPU with the UUID
  // `device` ("GPU-..."), or host memory if `device` is empty. UNAVAILABLE, with the reason, if the server
  // gives none.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Open(const std::string& socket, uint64_t bytes,
                                                            absl::Duration timeout,
                                                            const std::string& device = "");
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  const std::string& id() const { return id_; }
  uint64_t size() const { return size_; }
  // The GPU that has the memory; nullopt: it is host memory.
  std::optional<int> gpu() const { return gpu_; }

  // Takes a free range of `bytes` > 0 and returns its offset; nullopt if there is none. Give frees the range.
  std::optional<uint64_t> Take(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  void Give(uint64_t offset) ABSL_LOCKS_EXCLUDED(mu_);
  // For a caller that Take gave no range: `freed` runs once, when a range of `bytes` is free or the region is
  // retired. It runs on the thread that frees the range or retires the region (on this thread, if a range is
  // free already), and must neither block nor use the region. A further Await of the same `waiter` replaces
  // the former one. Returns false, and `freed` never runs, if the region is smaller than `bytes` or retired.
  bool Await(uint64_t bytes, const void* waiter, absl::AnyInvocable<void()> freed) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the wait of `waiter`: its `freed` does not run after this has returned.
  void StopWaiting(const void* waiter) ABSL_LOCKS_EXCLUDED(mu_);
  int waiting() const ABSL_LOCKS_EXCLUDED(mu_);
  // Whether Take has ever found no room.
  bool crowded() const { return crowded_; }
  uint8_t* At(uint64_t offset) const { return data_ + offset; }

  // To be called before a call whose rows are on a GPU uses a region of host memory. The first such call pins
  // the region (CudaDriver::Pin), so that all GPUs copy to and from it directly. This takes some
  // milliseconds, and concurrent calls wait for it. If the driver refuses, it is not asked again, and copies
  // are slower.
  void PinFor(int gpu) ABSL_LOCKS_EXCLUDED(pin_mu_);
  // Why the driver refused to pin the region; OK if it has not refused.
  absl::Status pin_problem() const ABSL_LOCKS_EXCLUDED(pin_mu_);

  // Makes the region unusable for new calls; calls under way may go on. For regions in which the server may
  // still write to ranges of calls that have failed.
  void Retire() ABSL_LOCKS_EXCLUDED(mu_);
  // Tells that a call that named the region has failed. Retires the region if the call still has ranges
  // (`holds`), to which the server may write, or if the server may not have the region any more
  // (UNAVAILABLE).
  void AfterFailure(const absl::Status& error, bool holds);
  // Whether the server has said that it has no such region.
  bool refused() const { return refused_; }
  // Whether a call may begin to use the region: it is not retired, the server has not closed the session, and
  // this process is the one that opened the region.
  bool usable() const;

 private:
  SharedRegion(wire::OwnedDescriptor socket, std::string id, uint8_t* data, uint64_t size,
               std::optional<int> gpu);

  void Unpin() ABSL_LOCKS_EXCLUDED(pin_mu_);
  // The offset of a free range of `bytes`, a multiple of kAlignment; nullopt: there is none.
  std::optional<uint64_t> Find(uint64_t bytes) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  struct Waiter {
    uint64_t bytes = 0;
    absl::AnyInvocable<void()> freed;
  };

  const wire::OwnedDescriptor socket_;
  const std::string id_;
  uint8_t* const data_;
  const uint64_t size_;
  const std::optional<int> gpu_;
  const pid_t process_;
  std::atomic<bool> retired_{false};
  std::atomic<bool> refused_{false};
  std::atomic<bool> crowded_{false};
  mutable absl::Mutex pin_mu_;
  std::optional<int> pinned_for_ ABSL_GUARDED_BY(pin_mu_);  // the GPU of the first call; nullopt: not pinned
  absl::Status pin_problem_ ABSL_GUARDED_BY(pin_mu_);
  mutable absl::Mutex mu_;
  std::map<uint64_t, uint64_t> taken_ ABSL_GUARDED_BY(mu_);  // offset to end
  std::map<const void*, Waiter> waiters_ ABSL_GUARDED_BY(mu_);
};

// The waits between attempts to open a region. After an attempt that failed the client waits for `first`;
// each further wait is twice as long, up to `most`. After an attempt that gave fewer bytes than the client
// had asked for, it waits for `most`; each further wait is twice as long, up to `most_growth`.
struct RegionPauses {
  absl::Duration first = absl::Seconds(2);
  absl::Duration most = absl::Seconds(64);
  absl::Duration most_growth = absl::Hours(1);
};

// The source of regions of one kind, for the calls of one client: regions of host memory, or of the memory of
// one GPU. It has at most one present region. The first call opens it. When calls need a larger one, or the
// region cannot be used any more, a call opens another one in its place. After an attempt that failed, later
// calls try again, after pauses that grow.
//
// Thread-safe.
class RegionSource {
 public:
  // Asks the server for ServerDescription.region_socket. Takes at most two seconds.
  using AskFn = absl::AnyInvocable<absl::StatusOr<std::string>()>;

  // `transport` is as in ClientOptions. `socket` is the region socket that the server has told when the
  // client connected. `device` is as in SharedRegion::Open.
  RegionSource(std::string transport, RegionSizes sizes, std::string socket, AskFn ask,
               RegionPauses pauses = {}, std::string device = "");

  // With the transport "shared_memory" or "cuda_ipc": opens a region; an error says why there is none. OK
  // with other transports.
  absl::Status Check() ABSL_LOCKS_EXCLUDED(mu_);
  // The region for a call that begins and whose rows have `call_bytes`; null: the call is to send its slices
  // in messages. May open a region; the larger the region, the longer this takes. While another thread makes
  // the first attempt, Get waits for it. While another thread makes a later attempt, Get does not wait and
  // returns the present region or null.
  std::shared_ptr<SharedRegion> Get(uint64_t call_bytes = 0) ABSL_LOCKS_EXCLUDED(mu_);
  // Whether there is a usable region now. Does not block.
  bool IsOpen() const ABSL_LOCKS_EXCLUDED(mu_);
  // If the region cannot be used any more, drops it. The server gets it back when no call uses it any more.
  void DropUnusable() ABSL_LOCKS_EXCLUDED(mu_);
  TransportChoice choice() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Removes the present region and returns it, so that the caller can release it without the lock.
  std::shared_ptr<SharedRegion> Drop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The bytes to ask the server for.
  uint64_t Wanted(uint64_t call_bytes) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Handles the result of an attempt to open a region of `bytes`. `bytes_before` is the size of the region
  // that was usable before the attempt; 0: there was none. Returns the region that is not wanted any more, so
  // that the caller can release it without the lock.
  std::shared_ptr<SharedRegion> Take(absl::StatusOr<std::shared_ptr<SharedRegion>> opened, uint64_t bytes,
                                     uint64_t bytes_before) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // An attempt has failed: sets the time of the next one.
  void Pause() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Opens a region of `bytes`. Only for the call that has set opening_. If `ask`, asks the server for its
  // region socket first, and stores it in `*socket`.
  absl::StatusOr<std::shared_ptr<SharedRegion>> Open(uint64_t bytes, bool ask, std::string* socket);

  const std::string transport_;
  const RegionSizes sizes_;
  const RegionPauses pauses_;
  const std::string device_;
  AskFn ask_;  // only the call that has set opening_ calls it
  mutable absl::Mutex mu_;
  std::string socket_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<SharedRegion> region_ ABSL_GUARDED_BY(mu_);
  absl::Time next_growth_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Duration growth_pause_ ABSL_GUARDED_BY(mu_);  // the wait after the next attempt that gives too little
  bool opening_ ABSL_GUARDED_BY(mu_) = false;
  bool tried_ ABSL_GUARDED_BY(mu_) = false;
  bool refused_ ABSL_GUARDED_BY(mu_) = false;  // the server did not know the former region
  absl::Duration pause_ ABSL_GUARDED_BY(mu_);  // the wait after the next attempt that fails
  absl::Time next_try_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Status problem_ ABSL_GUARDED_BY(mu_);  // why there is no region
};

// The UUIDs ("GPU-...") of the GPUs whose memory the server shares, in the server's order.
std::vector<std::string> SharingDevicesOf(const v1::ServerDescription& server);

// The source of regions for calls whose rows are on GPUs: a RegionSource for each GPU of the server that
// shares memory. Rows on one of these GPUs travel through a region of that GPU. Rows on another GPU travel
// through a region of the nearest of these GPUs if the transport is "cuda_ipc", and otherwise as rows in host
// memory do.
//
// Thread-safe.
class DeviceRegions {
 public:
  // Asks the server, which may be another process by now, for its region socket. Takes at most two seconds.
  // An error if the server does not share memory of `device` any more.
  using AskFn = std::function<absl::StatusOr<std::string>(const std::string& device)>;

  // `transport` as in ClientOptions.
  DeviceRegions(const std::string& transport, RegionSizes sizes, const v1::ServerDescription& server,
                AskFn ask);
  DeviceRegions(const DeviceRegions&) = delete;
  DeviceRegions& operator=(const DeviceRegions&) = delete;

  // With the transport "cuda_ipc": opens a region; an error says why there is none. The region is on `gpu`
  // (nullopt: the GPU that the calling thread works on) if the server shares memory of this GPU. Otherwise it
  // is on the first GPU of the server that this process sees. OK with other transports.
  absl::Status Check(std::optional<int> gpu) ABSL_LOCKS_EXCLUDED(mu_);
  // The region for a call that begins and whose rows have `call_bytes` and are on `gpu`; null: the rows
  // travel as rows in host memory do. May open a region.
  std::shared_ptr<SharedRegion> Get(int gpu, uint64_t call_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // The region for a call whose rows are on the first GPU of the server that this process sees.
  std::shared_ptr<SharedRegion> GetAny();
  // Whether Get has opened a region for rows on `gpu` that can be used now. Does not block.
  bool IsOpen(int gpu) const ABSL_LOCKS_EXCLUDED(mu_);
  // Whether the server shares memory of no GPU.
  bool empty() const { return gpus_.empty(); }
  // Calls RegionSource::DropUnusable of all GPUs.
  void DropUnusable();
  // How rows on GPUs travel, over all GPUs that rows came from. `of_host` is the transport of rows in host
  // memory.
  DeviceTransportChoice choice(absl::string_view of_host) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Gpu {
    std::string uuid;
    std::unique_ptr<RegionSource> regions;
  };
  // How rows on one GPU travel.
  struct Route {
    std::string rows;                 // the GPU that has the rows: its UUID, or "GPU n"
    RegionSource* regions = nullptr;  // null: as rows in host memory; `reason` says why
    std::string reason;
  };

  Route RouteOf(int gpu) const;
  // The regions of the sharing GPU that is nearest to `gpu`, which does not share memory itself. If several
  // are equally near, `gpu` modulo their number selects one.
  RegionSource* NearestTo(int gpu) const;
  // All UUIDs, for people.
  std::string Names() const;

  const std::string transport_;
  const std::string why_none_;  // why rows on GPUs travel as rows in host memory, if gpus_ is empty
  std::vector<Gpu> gpus_;
  mutable absl::Mutex mu_;
  std::map<int, Route> routes_ ABSL_GUARDED_BY(mu_);  // by the GPU that rows came from
  RegionSource* checked_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_REGIONS_H_
