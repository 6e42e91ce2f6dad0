// SPDX-License-Identifier: Apache-2.0
// Runs a plan, or many, and makes the counter-example of a violation small.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SIMULATION_SIMULATION_H_
#define LOSSD_TESTS_SERVER_ENGINE_SIMULATION_SIMULATION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/server/engine/simulation/plan.h"

namespace lossd::engine::simulation {

struct Outcome {
  std::vector<std::string> violations;
  std::vector<std::string> trace;  // if wanted
  int64_t turns = 0, streams = 0, results = 0, chunks = 0;
};

// Runs a plan; the same seed gives the same run.
Outcome Simulate(const Plan& plan, uint64_t schedule_seed, bool tracing);

// The plan with fewer actions, and a schedule of it, that show a violation too, with its trace; as text.
std::string Shrink(const Plan& plan, uint64_t schedule_seed);

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_SIMULATION_H_
