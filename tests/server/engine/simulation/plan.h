// SPDX-License-Identifier: Apache-2.0
// Plan: what happens in one simulation, drawn from a seed: how the engine is set up, what trainers have to
// do, and what disturbs them. A plan with some of its actions removed is also a plan; that is how a
// counter-example is made smaller.
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
  kRowGradients,  // the gradients of embedding rows
  kContribution,
  // Disturbances: happen once, from turn `at` on.
  kTwin,      // another stream of a duty's rows, which is cut, wrong or complete
  kLossOnly,  // a stream that does not accumulate
  kEmbed,     // a stream that asks for the embedding rows that a duty's targets name
  kRefused,   // a stream that must be refused: its fields contradict each other, or a duty
  kZero,
  kGradNorm,
  kDescribe,
  kStep,  // a step that is not expected now: `number` - 1 away from the open one
  kWrite,
  kRead,
  kLoad,
  kReset,     // resets the optimizer if `number` is odd, else everything
  kRecreate,  // deletes the head and creates it again
  kRelease,
  kExpire,
  kShutdown,
  // Failures of the device.
  kFailResults,  // of chunk `number`; also the next four
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
  uint64_t seed = 0;  // the seed of its details
};

struct Setup {
  EngineOptions options;
  int64_t chunk_rows = 4;
  int chunks_in_flight = 1;
  bool asynchronous = false;
  int heads = 1;
  int steps = 1;
  bool lazy_rows = false;  // for every other step
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

// The details of a duty: the rows of a microbatch or of a contribution. For kRowGradients, the targets are
// the ids of embedding rows.
struct Duty {
  Kind kind = Kind::kMicrobatch;
  int head = 0;
  uint64_t id = 0;
  int64_t rows = 0;
  std::vector<int32_t> targets;    // [rows]; -100: ignored
  std::vector<float> row_weights;  // empty or [rows]
  std::vector<RowRange> parts;     // each part is sent by a task of its own
  std::vector<Depth> depths;       // empty: the rows are not divided
  bool want_grad_hidden = false;
  float scale = 1.0f;          // kRowGradients: the factor of all its gradients
  bool embeds_before = false;  // kRowGradients: each attempt first gets the rows, as a forward pass does
  int cut_attempts = 0;        // how many of the first attempts of each part end in the middle
  int bad_attempts = 0;        // how many of them have a row that is not finite
  int64_t valid_rows() const;
  bool adds_row_gradients() const { return kind == Kind::kRowGradients; }
};

std::vector<Duty> DutiesOf(const Plan& plan, int head);

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_PLAN_H_
