// SPDX-License-Identifier: Apache-2.0
// The backward pass of deferred microbatches: what a caller asked for, as a stream over rows that the engine
// holds.
//
// Thread-safe: functions of their arguments.
#ifndef LOSSD_SERVER_ENGINE_BACKWARD_H_
#define LOSSD_SERVER_ENGINE_BACKWARD_H_

#include <vector>

#include "absl/status/status.h"
#include "server/engine/deferred.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// INVALID_ARGUMENT naming the field that is wrong whatever is retained.
absl::Status CheckBackward(const BackwardSpec& spec);

// The stream that computes the rows again, and where its hidden states are.
struct BackwardRows {
  StreamSpec stream;
  std::vector<RetainedRows> retained;  // by first row
};
// `kept` has the rows of `spec`.
BackwardRows RowsOf(const BackwardSpec& spec, const DeferredMicrobatches::Microbatch& kept);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_BACKWARD_H_
