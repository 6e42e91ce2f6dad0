// SPDX-License-Identifier: Apache-2.0
// What happens in one simulation, drawn from a seed: how the engine is set up, what trainers have to do, and
// what disturbs them. A plan without some of its actions is a plan again, which is how a counter-example is
// made smaller.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SIMULATION_PLAN_H_
#define LOSSD_TESTS_SERVER_ENGINE_SIMULATION_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/engine/engine_options.h"
#include "server/engine/stream.h"

namespace lossd::engine::simulation {

enum class Kind : uint8_t {
  // Duties: part of every step. Their order gives their ids.
  kMicrobatch,
  kDeferred,
  kRowGradients,  // gradients of rows of the weight as an embedding
  kContribution,
  // Disturbances: happen once, from turn `at` on.
  kTwin,      // another stream of a duty's rows, which is cut, wrong or complete
  kLossOnly,  // a stream that does not accumulate
  kEmbed,     // a stream that gets the rows of the weight that a duty's targets name
  kRefused,   // a stream that is to be refused: its fields do not go together, or it contradicts a duty
  kZero,
  kGradNorm,
  kDescribe,
  kStep,  // a step that nobody expects: `number` - 1 from the open one
  kWrite,
  kRead,
  kLoad,
  kReset,     // of the optimizer if `number` is odd, else of all
  kRecreate,  // deletes the head and creates it again
  kRelease,
  kExpire,
  kShutdown,
  // Failures of the device.
  kFailResults,  // of chunk `number`; likewise below
  kFailDone,
  kFailStep,
  kFailZero,
  kFailAdd,
};

struct Action {
  Kind kind = Kind::kMicrobatch;
  int head = 0;
  int64_t at = 0;
  uint64_t number = 0;
  uint64_t seed = 0;  // of its details
};

struct Setup {
  EngineOptions options;
  int64_t chunk_rows = 4;
  int chunks_in_flight = 1;
  bool asynchronous = false;
  int heads = 1;
  int steps = 1;
  bool lazy_rows = false;  // in every other step
};

struct Plan {
  uint64_t seed = 0;
  Setup setup;
  std::vector<Action> actions;
};

Plan MakePlan(uint64_t seed);
bool IsDuty(Kind kind);
bool IsFailure(Kind kind);
std::string Describe(const Plan& plan);

// A duty in detail: the rows of a microbatch, or of a contribution. The targets of kRowGradients are ids of
// rows of the weight.
struct Duty {
  Kind kind = Kind::kMicrobatch;
  int head = 0;
  uint64_t id = 0;
  int64_t rows = 0;
  std::vector<int32_t> targets;    // [rows], -100: ignored
  std::vector<float> row_weights;  // empty or [rows]
  std::vector<RowRange> parts;     // each sent by a task
  std::vector<Depth> depths;       // empty: the rows are not divided
  bool want_grad_hidden = false;
  float scale = 1.0f;          // kRowGradients: of all its gradients
  bool embeds_before = false;  // kRowGradients: each attempt gets the rows first, as a forward pass does
  int cut_attempts = 0;        // of the first attempts of each part, so many end in the middle
  int bad_attempts = 0;        // so many have a row that is not finite
  int64_t valid_rows() const;
  bool adds_row_gradients() const { return kind == Kind::kRowGradients; }
};

std::vector<Duty> DutiesOf(const Plan& plan, int head);

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_PLAN_H_
