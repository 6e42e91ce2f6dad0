// Where the slices of one ComputeLoss call lie, and so their gradients: in messages, or in a region of shared
// memory.
//
// What the client says of a region is checked against the region's size before anything is read. Hidden
// states in a region may change while they are read, so nothing but their values depends on them, and they
// are read once.
//
// Thread-safe after Use.
#ifndef LOSSD_SERVER_RPC_SLICE_PLACES_H_
#define LOSSD_SERVER_RPC_SLICE_PLACES_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/payload_codec.h"
#include "server/engine/stream.h"
#include "server/regions/regions.h"

namespace lossd::rpc {

class SlicePlaces {
 public:
  static constexpr uint64_t kAlignment = 256;  // of slices in a region

  // Slices may lie in `region` from now on. Its memory stays as long as this object.
  void Use(std::shared_ptr<regions::Region> region) { region_ = std::move(region); }
  bool has_region() const { return region_ != nullptr; }

  // The slice as the engine takes it, but for on_queued. INVALID_ARGUMENT, naming field and value, if it
  // cannot lie where the header says.
  absl::StatusOr<engine::IncomingSlice> Take(const v1::SliceHeader& header, const engine::RowRange& rows,
                                             wire::PayloadView payload) ABSL_LOCKS_EXCLUDED(mutex_);

  // The message with the results of a slice. Its gradients are where its hidden states were: the message
  // refers to their memory, or they are in the region.
  grpc::ByteBuffer Answer(engine::SliceOutput output) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::StatusOr<uint8_t*> Check(const v1::RegionRange& range) const;

  std::shared_ptr<regions::Region> region_;  // null: all slices are in messages
  absl::Mutex mutex_;
  std::map<int64_t, uint8_t*> in_region_ ABSL_GUARDED_BY(mutex_);  // by their first rows
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SLICE_PLACES_H_
