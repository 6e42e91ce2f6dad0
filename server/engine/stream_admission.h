// SPDX-License-Identifier: Apache-2.0
// How streams of one head begin and end for the rest of the head: a new stream is checked, pays for its rows,
// is entered in the ledger and gets its peer's place; at its end it gives that back, and its rows stay in the
// ledger or leave it.
//
// A stream that is refused leaves no trace. Guarded by the engine's lock, which is held in all calls.
#ifndef LOSSD_SERVER_ENGINE_STREAM_ADMISSION_H_
#define LOSSD_SERVER_ENGINE_STREAM_ADMISSION_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "server/engine/deferred.h"
#include "server/engine/engine_context.h"
#include "server/engine/open_step.h"
#include "server/engine/row_memory.h"
#include "server/engine/schedule.h"
#include "server/engine/stream.h"
#include "server/engine/stream_set.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {

class StreamAdmission {
 public:
  // What a stream is admitted to. All outlive this.
  struct Parts {
    EngineContext* context;
    const kernels::HeadConfig* config;
    OpenStep* step;
    DeferredMicrobatches* deferred;
    Schedule* schedule;
    StreamSet* streams;
  };

  explicit StreamAdmission(const Parts& parts) : parts_(parts) {}

  // As Engine::Open and Engine::OpenBackward, for this head.
  absl::StatusOr<std::shared_ptr<StreamState>> Open(StreamSpec spec,
                                                    std::shared_ptr<StreamObserver> observer);
  absl::StatusOr<std::shared_ptr<StreamState>> OpenBackward(BackwardSpec spec,
                                                            std::shared_ptr<StreamObserver> observer);
  // The stream is over and has left the set.
  void OnEnd(StreamState& stream);

 private:
  // RESOURCE_EXHAUSTED if the peer may not open one stream more.
  absl::Status CheckPlaces(absl::string_view peer) const;
  // The step that a call names, if it names one, is open.
  absl::Status CheckStep(absl::string_view field, std::optional<uint64_t> named, absl::string_view run) const;
  absl::StatusOr<std::shared_ptr<StreamState>> MakeStream(StreamSpec spec,
                                                          std::shared_ptr<StreamObserver> observer);
  // Finds a place for the hidden states of a stream that retains them.
  absl::Status ReserveRetained(StreamState& stream);
  // Enters a checked stream into the ledger and the set.
  absl::StatusOr<std::shared_ptr<StreamState>> Admit(std::shared_ptr<StreamState> stream);
  // The account that pays for what is known of the stream's rows.
  RowMemory::Account AccountOf(const StreamState& stream);
  // Enters the stream's rows in the ledger.
  absl::Status Declare(const StreamState& stream);

  const Parts parts_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_ADMISSION_H_
