// SPDX-License-Identifier: Apache-2.0
// Memory that a client shares with its server: SharedRegion is one region, of the host's memory or of a
// GPU's; RegionSource opens regions for the loss calls of one client, and DeviceRegions has a RegionSource
// for each GPU of the server.
//
// Thread-safe, but for SharedRegion as its comment says.
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

// A region of memory that a server on this host shares with this client (region.proto): a session of the
// region socket, the mapping, and which parts of it are in use. It is memory of the host, or of the server's
// GPU, whose addresses only the driver may follow (cuda_driver.h).
//
// Thread-safe.

class SharedRegion {
 public:
  static constexpr uint64_t kAlignment = 256;  // of slices in a region

  // Opens a region of about `bytes` at the server's region socket: memory of the GPU of this UUID
  // ("GPU-..."), or of the host if `device` is empty. UNAVAILABLE, saying why, if there is none to be had.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Open(const std::string& socket, uint64_t bytes,
                                                            absl::Duration timeout,
                                                            const std::string& device = "");
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  const std::string& id() const { return id_; }
  uint64_t size() const { return size_; }
  // The GPU whose memory it is; nullopt: memory of the host.
  std::optional<int> gpu() const { return gpu_; }

  // A free range of `bytes` > 0: its offset. Nullopt if there is none.
  std::optional<uint64_t> Take(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  void Give(uint64_t offset) ABSL_LOCKS_EXCLUDED(mu_);
  // For a caller that has found none: `freed` runs once, as soon as there is one or the region is retired, on
  // the thread that sees to that; it must neither block nor use the region. Of each waiter the last one
  // counts. False, and it never runs, if waiting is of no use: the region is smaller or retired.
  bool Await(uint64_t bytes, const void* waiter, absl::AnyInvocable<void()> freed) ABSL_LOCKS_EXCLUDED(mu_);
  // What the waiter has given does not run once this has returned.
  void StopWaiting(const void* waiter) ABSL_LOCKS_EXCLUDED(mu_);
  int waiting() const ABSL_LOCKS_EXCLUDED(mu_);
  // Whether Take has found no room for something.
  bool crowded() const { return crowded_; }
  uint8_t* At(uint64_t offset) const { return data_ + offset; }

  // A call begins whose rows are on a GPU. The first one lets GPUs copy to and from memory of the host
  // without a detour (CudaDriver::Pin), which takes some milliseconds; all wait for it. Where the driver
  // refuses that, it is not asked again: copies are slower then.
  void PinFor(int gpu) ABSL_LOCKS_EXCLUDED(pin_mu_);
  // Why that was refused; OK if it was not.
  absl::Status pin_problem() const ABSL_LOCKS_EXCLUDED(pin_mu_);

  // What is under way may go on, but nothing new is to begin: the server may still write to ranges of calls
  // that have failed.
  void Retire() ABSL_LOCKS_EXCLUDED(mu_);
  // A call that named the region has failed. It is retired if the server may still write to ranges of the
  // call (`holds`), or may have lost it.
  void AfterFailure(const absl::Status& error, bool holds);
  // The server has said that it has no such region.
  bool refused() const { return refused_; }
  // Whether a call may begin to use it: it is not retired, the server's end of the session is open, and this
  // is the process that opened it.
  bool usable() const;

 private:
  SharedRegion(wire::OwnedDescriptor socket, std::string id, uint8_t* data, uint64_t size,
               std::optional<int> gpu);

  void Unpin() ABSL_LOCKS_EXCLUDED(pin_mu_);
  // Where a free range of so many bytes, a multiple of the alignment, begins.
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
  std::optional<int> pinned_for_ ABSL_GUARDED_BY(pin_mu_);  // the GPU that was there first
  absl::Status pin_problem_ ABSL_GUARDED_BY(pin_mu_);
  mutable absl::Mutex mu_;
  std::map<uint64_t, uint64_t> taken_ ABSL_GUARDED_BY(mu_);  // offset to end
  std::map<const void*, Waiter> waiters_ ABSL_GUARDED_BY(mu_);
};

// How long the client goes without a region after an attempt that failed: twice as long each time, up to
// `most`. After one that brought less than was asked for it waits for `most` at first, and twice as long each
// time, up to `most_growth`.
struct RegionPauses {
  absl::Duration first = absl::Seconds(2);
  absl::Duration most = absl::Seconds(64);
  absl::Duration most_growth = absl::Hours(1);
};

// The source of one kind of region: the host's memory, or that of one GPU. It opens a region with the first
// call, a larger one in its place when calls need it, and another one when the region cannot be used any
// more. Calls that begin later repeat an attempt that failed, after pauses that grow.
//
// Thread-safe.
class RegionSource {
 public:
  // Asks the server for ServerDescription.region_socket; takes a second or two at most.
  using AskFn = absl::AnyInvocable<absl::StatusOr<std::string>()>;

  // `transport` as in ClientOptions; `socket` as the server has told it already; `device` as in
  // SharedRegion::Open.
  RegionSource(std::string transport, RegionSizes sizes, std::string socket, AskFn ask,
               RegionPauses pauses = {}, std::string device = "");

  // With the transport "shared_memory" or "cuda_ipc": whether there is a region to be had.
  absl::Status Check() ABSL_LOCKS_EXCLUDED(mu_);
  // The region for a call that begins, whose rows have so many bytes; null: it is to send its slices in
  // messages. May open a region, which takes the longer the larger it is. All calls wait for the first
  // attempt, and none for a later one that another thread makes: it has the region that is there, if there is
  // one.
  std::shared_ptr<SharedRegion> Get(uint64_t call_bytes = 0) ABSL_LOCKS_EXCLUDED(mu_);
  // Whether there is a region now that can be used. Does not block.
  bool IsOpen() const ABSL_LOCKS_EXCLUDED(mu_);
  // Gives the region back to the server if it cannot be used any more, as soon as no call uses it.
  void DropUnusable() ABSL_LOCKS_EXCLUDED(mu_);
  TransportChoice choice() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The region, for the caller to let go of without the lock.
  std::shared_ptr<SharedRegion> Drop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What to ask the server for.
  uint64_t Wanted(uint64_t call_bytes) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Takes what an attempt to get so many bytes has brought, where there was a region of `bytes_before` (0:
  // none that could be used). What is not wanted any more is for the caller to let go of without the lock.
  std::shared_ptr<SharedRegion> Take(absl::StatusOr<std::shared_ptr<SharedRegion>> opened, uint64_t bytes,
                                     uint64_t bytes_before) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // An attempt has failed.
  void Pause() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // For the one call that has set opening_. Sets `*socket` if it is not the server's any more.
  absl::StatusOr<std::shared_ptr<SharedRegion>> Open(uint64_t bytes, bool ask, std::string* socket);

  const std::string transport_;
  const RegionSizes sizes_;
  const RegionPauses pauses_;
  const std::string device_;
  AskFn ask_;  // called by the one that opens
  mutable absl::Mutex mu_;
  std::string socket_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<SharedRegion> region_ ABSL_GUARDED_BY(mu_);
  absl::Time next_growth_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Duration growth_pause_ ABSL_GUARDED_BY(mu_);  // after the next attempt that brings less than asked
  bool opening_ ABSL_GUARDED_BY(mu_) = false;
  bool tried_ ABSL_GUARDED_BY(mu_) = false;
  bool refused_ ABSL_GUARDED_BY(mu_) = false;  // the server did not know the region before
  absl::Duration pause_ ABSL_GUARDED_BY(mu_);  // after the next attempt that fails
  absl::Time next_try_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Status problem_ ABSL_GUARDED_BY(mu_);  // why there is no region
};

// The GPUs whose memory the server shares ("GPU-..."), in its order.
std::vector<std::string> SharingDevicesOf(const v1::ServerDescription& server);

// The source of regions for calls whose rows are on GPUs: a RegionSource for each GPU of the server that
// shares memory. Rows on one of these GPUs take memory of that GPU. Rows on another GPU take memory of the
// nearest one if the client was told so ("cuda_ipc"), and otherwise travel as rows of the host do.
//
// Thread-safe.
class DeviceRegions {
 public:
  // Asks the server, which may be another process by now, for its region socket; takes a second or two at
  // most. An error if it does not share memory of `device` any more.
  using AskFn = std::function<absl::StatusOr<std::string>(const std::string& device)>;

  // `transport` as in ClientOptions.
  DeviceRegions(const std::string& transport, RegionSizes sizes, const v1::ServerDescription& server,
                AskFn ask);
  DeviceRegions(const DeviceRegions&) = delete;
  DeviceRegions& operator=(const DeviceRegions&) = delete;

  // With the transport "cuda_ipc": whether there is a region to be had. Opens it, on `gpu` (nullopt: that
  // which the calling thread works on) if that is one of the server's, and else on the first one that this
  // process sees.
  absl::Status Check(std::optional<int> gpu) ABSL_LOCKS_EXCLUDED(mu_);
  // The region for a call that begins, whose rows have so many bytes and are on `gpu`; null: they are to go
  // as rows of the host do. May open a region.
  std::shared_ptr<SharedRegion> Get(int gpu, uint64_t call_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // The region for a call whose rows are on the first GPU of the server that this process sees.
  std::shared_ptr<SharedRegion> GetAny();
  // Whether Get gives a region for rows on `gpu`, as far as that is known without opening one: true if one is
  // open, false if there can be none, nullopt if Get has to find out. Does not block.
  std::optional<bool> IsOpen(int gpu) const ABSL_LOCKS_EXCLUDED(mu_);
  // As RegionSource::DropUnusable, of all.
  void DropUnusable();
  // How rows on GPUs travel where rows of the host travel by `of_host`, over all GPUs that rows came from.
  DeviceTransportChoice choice(absl::string_view of_host) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Gpu {
    std::string uuid;
    std::unique_ptr<RegionSource> regions;
  };
  // Where rows on one GPU go.
  struct Route {
    std::string rows;                 // the GPU that they are on: its UUID, or "GPU n"
    RegionSource* regions = nullptr;  // null: `reason` says why not
    std::string reason;
  };

  Route RouteOf(int gpu) const;
  // The sharing GPU that is nearest to `gpu`, which is another one, and the one at the same place in its
  // order of several that are as near.
  RegionSource* NearestTo(int gpu) const;
  // All UUIDs, for people.
  std::string Names() const;

  const std::string transport_;
  const std::string why_none_;  // if there are no GPUs
  std::vector<Gpu> gpus_;
  mutable absl::Mutex mu_;
  std::map<int, Route> routes_ ABSL_GUARDED_BY(mu_);  // by the GPU that rows came from
  RegionSource* checked_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_REGIONS_H_
