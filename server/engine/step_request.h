// SPDX-License-Identifier: Apache-2.0
// Closing a step: what a caller asks for and what it is told. Plain data.
#ifndef LOSSD_SERVER_ENGINE_STEP_REQUEST_H_
#define LOSSD_SERVER_ENGINE_STEP_REQUEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/optimizer_options.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// Which step to close and what must be in it; see lossd.v1.ApplyStepRequest.
struct StepRequest {
  uint64_t step = 0;
  kernels::OptimizerOptions optimizer;
  std::vector<uint64_t> expected_microbatches;  // or contributions; inside the engine ascending, each once
  std::optional<int64_t> expected_rows;
  bool skip_non_finite = false;
  std::optional<uint64_t> incarnation;  // the engine that accumulated the step's rows
  std::optional<uint64_t> generation;   // HeadState::generation that they were accumulated in
  bool begin_optimizer = false;         // moments and the count of updates are 0 before the step
  std::string run;                      // that closes the step, for people
};

// What a reset of a head makes as it was when the head was created.
enum class ResetScope : uint8_t {
  kOptimizer,  // moments and the count of updates
  kAll,        // besides, values and step
};

struct GradNormResult {
  HeadState state;
  double grad_norm = 0.0;
};

struct StepResult {
  HeadState state;  // the step now open
  double grad_norm = 0.0;
  int64_t microbatches = 0;  // that are part of the sum, likewise contributions
  int64_t rows = 0;
  int64_t contributions = 0;
  bool skipped = false;
  bool repeated = false;
  uint64_t applied_incarnation = 0;  // of the engine that applied the step
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STEP_REQUEST_H_
