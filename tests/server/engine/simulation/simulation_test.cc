// SPDX-License-Identifier: Apache-2.0
// Random schedules of the engine, by seed:
//   LOSSD_SIMULATION_SCHEDULES=n  runs so many seeds,
//   LOSSD_SIMULATION_FIRST=n      beginning with this one;
//   LOSSD_SIMULATION_SEED=n       runs this one alone and prints what happened.
#include "tests/server/engine/simulation/simulation.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"

namespace lossd::engine::simulation::simulation_test {
namespace {

constexpr unsigned kSecondsForASeed = 120;

// What is written if the process crashes or hangs: made beforehand, for a signal handler may not do it.
std::array<char, 160> last_words;

void SayLastWords(int signal_number) {
  const std::string_view text(last_words.data());
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) _exit(1);
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

std::string Repeats(uint64_t seed) {
  return absl::StrCat("seed ", seed, " (LOSSD_SIMULATION_SEED=", seed, " repeats it)");
}

// From here to the end of the scope a crash, or a wait without an end, names the seed.
class WatchedSeed {
 public:
  explicit WatchedSeed(uint64_t seed) {
    const std::string text = absl::StrCat("a crash or a hang: ", Repeats(seed), "\n");
    last_words.fill('\0');
    text.copy(last_words.data(), last_words.size() - 1);
    for (const int number : {SIGSEGV, SIGABRT, SIGBUS, SIGALRM}) signal(number, SayLastWords);
    alarm(kSecondsForASeed);
  }
  ~WatchedSeed() {
    alarm(0);
    for (const int number : {SIGSEGV, SIGABRT, SIGBUS, SIGALRM}) signal(number, SIG_DFL);
  }
  WatchedSeed(const WatchedSeed&) = delete;
  WatchedSeed& operator=(const WatchedSeed&) = delete;
};

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  uint64_t value = otherwise;
  if (text != nullptr && !absl::SimpleAtoi(text, &value)) ADD_FAILURE() << name << "=" << text;
  return value;
}

TEST(SimulationTest, RandomSchedules) {
  if (const uint64_t seed = FromEnvironment("LOSSD_SIMULATION_SEED", 0); seed != 0) {
    const WatchedSeed watched(seed);
    const Plan plan = MakePlan(seed);
    const Outcome outcome = Simulate(plan, seed, /*tracing=*/true);
    std::cout << Describe(plan) << absl::StrJoin(outcome.trace, "\n") << "\n";
    ASSERT_TRUE(outcome.violations.empty()) << absl::StrJoin(outcome.violations, "\n") << Shrink(plan, seed);
    return;
  }
  const uint64_t schedules = FromEnvironment("LOSSD_SIMULATION_SCHEDULES", 10'000);
  const uint64_t first = FromEnvironment("LOSSD_SIMULATION_FIRST", 1);
  Outcome sum;
  for (uint64_t seed = first; seed < first + schedules; ++seed) {
    const WatchedSeed watched(seed);
    const Plan plan = MakePlan(seed);
    const Outcome outcome = Simulate(plan, seed, /*tracing=*/false);
    ASSERT_TRUE(outcome.violations.empty()) << Repeats(seed) << ":\n"
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
}  // namespace lossd::engine::simulation::simulation_test
