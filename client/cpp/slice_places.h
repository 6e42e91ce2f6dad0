// SPDX-License-Identifier: Apache-2.0
// Where the slices of one ComputeLoss call lie: in messages, or in a region of shared memory, where their
// gradients come back to the same place. Gradients of rows that the server has retained come to a part of the
// region that is taken when the call begins, or in messages.
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_SLICE_PLACES_H_
#define LOSSD_CLIENT_CPP_SLICE_PLACES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/loss_work.h"
#include "client/cpp/shared_region.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::client::internal {

class SlicePlaces {
 public:
  // Null: all slices go in messages. `may_wait`: answers come while further slices are not sent, so a slice
  // may wait for the place of one before it. `gpu`: whose memory the caller's rows are; nullopt: the host's.
  SlicePlaces(std::shared_ptr<SharedRegion> region, bool may_wait, std::optional<int> gpu);
  SlicePlaces(const SlicePlaces&) = delete;
  SlicePlaces& operator=(const SlicePlaces&) = delete;

  // How slices are cut that may find a place here: `rule` for rows in messages.
  SliceRule RuleFor(const SliceRule& rule, Rows rows, uint64_t row_bytes) const;

  // Names the region in the message that opens the call, if the call uses one. Call once, first.
  void Name(const StreamWork& work, v1::ComputeLossRequest* first) ABSL_LOCKS_EXCLUDED(mu_);

  struct Place {
    enum class Kind { kMessage, kRegion, kWait, kWaitForOthers } kind = Kind::kMessage;
    uint64_t offset = 0;  // kRegion
  };
  // Finds a place for the next slice, whose first row is `row`, and copies it there if that is in the region.
  // kWait: there is none before a slice of this call is answered; then Put is to be called again.
  // kWaitForOthers: there is none before another call gives some back; then `freed` of WaitForOthers runs,
  // and Put is to be called again. An error of the driver ends the call.
  absl::StatusOr<Place> Put(uint64_t row, absl::Span<const uint8_t> hidden) ABSL_LOCKS_EXCLUDED(mu_);
  // From now on a call that has nothing in the region waits for what others give back, if it may wait at all;
  // `freed` as in SharedRegion::Await. False: it may not.
  bool WaitForOthers(std::function<void()> freed) ABSL_LOCKS_EXCLUDED(mu_);
  // It has waited long enough: what finds no room travels in messages.
  void StopWaitingForOthers() ABSL_LOCKS_EXCLUDED(mu_);
  // Where the slice of this first row, of so many bytes, lies; null: in a message.
  const uint8_t* Find(uint64_t row, uint64_t bytes) const ABSL_LOCKS_EXCLUDED(mu_);
  // Copies what Find has found to the caller's memory.
  absl::Status Fetch(const uint8_t* from, uint64_t bytes, void* to) const;
  // The slice has been answered, and its gradients have been used.
  void Free(uint64_t row) ABSL_LOCKS_EXCLUDED(mu_);

  // The call has ended. After an error the region is retired if the server may still write to it, or may have
  // lost it.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Taken {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  // What a slice of so many bytes does that finds no room.
  Place::Kind WithoutRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The part of the region for gradients of retained rows.
  struct Room {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t first_row = 0;
    uint64_t row_bytes = 1;
  };

  const std::shared_ptr<SharedRegion> region_;
  const bool may_wait_;
  // Which GPU copies to the region, and from it; nullopt: the host does.
  struct Copiers {
    std::optional<int> to_region, from_region;
  };
  static Copiers CopiersFor(const SharedRegion* region, std::optional<int> gpu);
  const Copiers copiers_;
  std::shared_ptr<const StreamPoint> after_;  // of the work that Name was given; not changed afterwards
  mutable absl::Mutex mu_;
  std::map<uint64_t, Taken> taken_ ABSL_GUARDED_BY(mu_);  // by first row
  uint64_t taken_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<Room> room_ ABSL_GUARDED_BY(mu_);
  std::function<void()> freed_ ABSL_GUARDED_BY(mu_);  // null: the call does not wait for others
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_SLICE_PLACES_H_
