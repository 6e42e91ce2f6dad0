// SPDX-License-Identifier: Apache-2.0
// Where the slices of one ComputeLoss call lie, and so their gradients: in messages, or in a region of shared
// memory.
//
// What the client says of a region is checked against the region's size before anything is read. Hidden
// states in a region may change while they are read, so nothing but their values depends on them, and they
// are read once.
//
// Thread-safe after Use or UseForGradients.
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
#include "absl/types/span.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/payload_codec.h"
#include "server/engine/stream.h"
#include "server/regions/regions.h"

namespace lossd::rpc {

class SlicePlaces {
 public:
  // Slices may lie in `region` from now on. Its memory stays as long as this object.
  void Use(std::shared_ptr<regions::Region> region) { region_ = std::move(region); }
  // Of rows that the server has: the gradients of `first_row` and of those behind it go to `range` of the
  // region, as far as it reaches. INVALID_ARGUMENT, naming field and value, if there is no such range.
  absl::Status UseForGradients(std::shared_ptr<regions::Region> region, const v1::RegionRange& range,
                               int64_t first_row);

  // The slice as the engine takes it, but for on_queued. INVALID_ARGUMENT, naming field and value, if it
  // cannot lie where the header says.
  absl::StatusOr<engine::IncomingSlice> Take(const v1::SliceHeader& header, const engine::RowRange& rows,
                                             wire::PayloadView payload) ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether Answer copies the gradients to the region, which on a device waits for work under way there.
  bool AnswerCopies(const engine::SliceOutput& output) ABSL_LOCKS_EXCLUDED(mutex_);

  // The message with the results of a slice. Its gradients are where its hidden states were, or where
  // UseForGradients says: the message refers to their memory, or they are in the region.
  grpc::ByteBuffer Answer(engine::SliceOutput output) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Where the gradients of a slice go; null: in the message.
  uint8_t* Place(const engine::SliceOutput& output) ABSL_LOCKS_EXCLUDED(mutex_);

  std::shared_ptr<regions::Region> region_;  // null: all slices are in messages
  absl::Span<uint8_t> gradients_;            // of first_row_ and those behind it
  int64_t first_row_ = 0;
  absl::Mutex mutex_;
  std::map<int64_t, absl::Span<uint8_t>> in_region_ ABSL_GUARDED_BY(mutex_);  // by their first rows
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SLICE_PLACES_H_
