// SPDX-License-Identifier: Apache-2.0
// A region of memory that a server on this host shares with this client (region.proto): a session of the
// region socket, the mapping, and which parts of it are in use. It is memory of the host, or of the server's
// GPU, whose addresses only the driver may follow (cuda_driver.h).
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_SHARED_REGION_H_
#define LOSSD_CLIENT_CPP_SHARED_REGION_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/wire/region_packets.h"

namespace lossd::client::internal {

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

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_SHARED_REGION_H_
