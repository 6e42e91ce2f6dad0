// Random schedules of the engine. LOSSD_SIMULATION_SEED=n runs seed n alone and prints its trace;
// LOSSD_SIMULATION_SCHEDULES=n runs so many seeds, LOSSD_SIMULATION_FIRST=n beginning with n.
#include "tests/server/engine/simulation/simulation.h"

#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"

namespace lossd::engine::simulation {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  uint64_t value = otherwise;
  if (text != nullptr && !absl::SimpleAtoi(text, &value)) ADD_FAILURE() << name << "=" << text;
  return value;
}

TEST(SimulationTest, RandomSchedules) {
  const uint64_t schedules = FromEnvironment("LOSSD_SIMULATION_SCHEDULES", 10000);
  const uint64_t first = FromEnvironment("LOSSD_SIMULATION_FIRST", 1);
  Outcome sum;
  for (uint64_t seed = first; seed < first + schedules; ++seed) {
    const Plan plan = MakePlan(seed);
    const Outcome outcome = Simulate(plan, seed, false);
    ASSERT_TRUE(outcome.violations.empty())
        << "seed " << seed << " (LOSSD_SIMULATION_SEED=" << seed << " repeats it):\n"
        << absl::StrJoin(outcome.violations, "\n") << "\n"
        << Shrink(plan, seed);
    sum.turns += outcome.turns;
    sum.streams += outcome.streams;
    sum.results += outcome.results;
    sum.chunks += outcome.chunks;
  }
  std::cout << schedules << " schedules, " << sum.turns << " turns, " << sum.streams << " streams, "
            << sum.results << " results checked, " << sum.chunks << " chunks\n";
}

}  // namespace
}  // namespace lossd::engine::simulation
