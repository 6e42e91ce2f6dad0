// SPDX-License-Identifier: Apache-2.0
// The calls of a Client that are about checkpoints. A part of client.h.
//
// Thread-safe, and all else as for Client.
#ifndef LOSSD_CLIENT_CPP_CHECKPOINT_CALLS_H_
#define LOSSD_CLIENT_CPP_CHECKPOINT_CALLS_H_

#include <functional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "lossd/v1/head.pb.h"

namespace lossd::client {

namespace internal {
class Core;
}  // namespace internal

class CheckpointCalls {
 public:
  // `name` may be empty: the server names the checkpoint by step.
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(absl::string_view head,
                                                            absl::string_view name = "",
                                                            absl::Duration timeout = absl::ZeroDuration());
  // The same with all there is to say about a save. `on_progress` (may be null) is called on this thread, a
  // few times a second. Unless request.cancel_with_call, the save goes on when this call ends early.
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(
      const v1::SaveCheckpointRequest& request,
      const std::function<void(const v1::SaveProgress&)>& on_progress,
      absl::Duration timeout = absl::ZeroDuration());
  // Of `head`, or of all if it is empty; by head, then from the newest to the oldest.
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(absl::string_view head = "",
                                                              absl::Duration timeout = absl::ZeroDuration());
  // `checkpoint` is "<head>/<name>"; `head` may be empty: the checkpoint's own.
  absl::StatusOr<v1::HeadDescription> LoadCheckpoint(absl::string_view checkpoint,
                                                     absl::string_view head = "",
                                                     absl::Duration timeout = absl::ZeroDuration());

  // Removes the checkpoint "<head>/<name>"; NOT_FOUND if there is none. Repeated: the server deletes once.
  absl::StatusOr<v1::DeleteCheckpointResponse> DeleteCheckpoint(
      absl::string_view checkpoint, absl::Duration timeout = absl::ZeroDuration());

 protected:
  // `core` outlives the calls.
  explicit CheckpointCalls(internal::Core* core) : calls_core_(core) {}
  ~CheckpointCalls() = default;

 private:
  internal::Core* const calls_core_;
};

}  // namespace lossd::client

#endif  // LOSSD_CLIENT_CPP_CHECKPOINT_CALLS_H_
