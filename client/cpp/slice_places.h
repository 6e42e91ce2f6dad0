// Where the slices of one ComputeLoss call lie: in messages, or in a region of shared memory, where their
// gradients come back to the same place.
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_SLICE_PLACES_H_
#define LOSSD_CLIENT_CPP_SLICE_PLACES_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/shared_region.h"

namespace lossd::client::internal {

class SlicePlaces {
 public:
  // Null: all slices go in messages. `may_wait`: answers come while further slices are not sent, so a slice
  // may wait for the place of one before it.
  SlicePlaces(std::shared_ptr<SharedRegion> region, bool may_wait);
  SlicePlaces(const SlicePlaces&) = delete;
  SlicePlaces& operator=(const SlicePlaces&) = delete;

  struct Place {
    enum class Kind { kMessage, kRegion, kWait } kind = Kind::kMessage;
    uint64_t offset = 0;  // kRegion
  };
  // Finds a place for the next slice, whose first row is `row`, and copies it there if that is in the region.
  // kWait: there is none before a slice of this call is answered; then Put is to be called again.
  Place Put(uint64_t row, absl::Span<const uint8_t> hidden) ABSL_LOCKS_EXCLUDED(mu_);
  // Where the slice of this first row lies; null: in a message.
  const uint8_t* Find(uint64_t row) const ABSL_LOCKS_EXCLUDED(mu_);
  // The slice has been answered, and its gradients have been used.
  void Free(uint64_t row) ABSL_LOCKS_EXCLUDED(mu_);

  // The call has ended with an error. The region is retired if the server may still write to it, or may have
  // lost it.
  void AbandonAfter(const absl::Status& error) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Taken {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  const std::shared_ptr<SharedRegion> region_;
  const bool may_wait_;
  mutable absl::Mutex mu_;
  std::map<uint64_t, Taken> taken_ ABSL_GUARDED_BY(mu_);  // by first row
  uint64_t taken_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_SLICE_PLACES_H_
