// SPDX-License-Identifier: Apache-2.0
// Random schedules of the engine, by seed. A plan that shows a violation is made small before it is printed.
//   LOSSD_SIMULATION_SCHEDULES=n  runs so many seeds,
//   LOSSD_SIMULATION_FIRST=n      beginning with this one;
//   LOSSD_SIMULATION_SEED=n       runs this one alone and prints what happened.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "tests/server/engine/simulation/plan.h"
#include "tests/server/engine/simulation/world.h"

namespace lossd::engine::simulation {

struct Outcome {
  std::vector<std::string> violations;
  std::vector<std::string> trace;  // if wanted
  int64_t turns = 0, streams = 0, results = 0, chunks = 0;
};

namespace {

constexpr int64_t kMaxTurns = 100'000;

// Copies slices for which memory was found after a while, as the server's senders do.
void SendFromMemory(World& world, const bool& over) {
  while (true) {
    world.scheduler.WaitUntil("memory for slices", [&] { return !world.memory_ready.empty() || over; });
    if (world.memory_ready.empty()) return;
    auto receive = std::move(world.memory_ready.front());
    world.memory_ready.pop_front();
    ++world.receiving;
    receive();
    receive = nullptr;
    --world.receiving;
    world.scheduler.Yield();
  }
}

// What is still in use, which should come back by itself when nothing is done any more.
std::string InUse(const World& world) {
  const EngineStats stats = world.engine->stats();
  // A server that shuts down leaves the open steps as they are.
  const int64_t of_steps = world.stopping ? 0 : 1;
  const std::pair<const char*, int64_t> counts[] = {
      {"streams", stats.open_streams},
      {"queued slices", stats.queued_slices},
      {"waiting slices", stats.waiting_slices},
      {"queued rows", stats.queued_rows},
      {"bytes of staging", stats.staging_used_bytes},
      {"buffers of areas", stats.area_buffers_lent},
      {"slices that are neither queued nor gone", world.live_calls},
      {"slices for which there is memory", static_cast<int64_t>(world.memory_ready.size()) + world.receiving},
      {"retained microbatches", of_steps * stats.retained_microbatches},
      {"retained bytes", of_steps * stats.retained_bytes_used},
      {"rows in ledgers", of_steps * stats.ledger_rows},
      {"bytes in ledgers", of_steps * stats.ledger_bytes},
      {"bytes of what is known of rows", of_steps * stats.row_bytes_used}};
  std::string text;
  for (const HeadSnapshot& head : world.engine->List()) {
    if (!head.waits_for.empty()) absl::StrAppend(&text, "  ", head.name, " waits for ", head.waits_for, "\n");
  }
  for (const auto& [what, count] : counts) {
    if (count != 0) absl::StrAppend(&text, "  ", count, " ", what, "\n");
  }
  return text;
}

void CheckReports(World& world) {
  const Totals& totals = world.totals;
  if (totals.negative || totals.chunks != world.device.chunks ||
      totals.valid_rows != world.device.computed_valid_rows || totals.rows != world.device.computed_rows ||
      totals.added_rows > world.device.added_rows) {
    world.Violation(absl::StrCat("the observer was told of ", totals.chunks, " chunks, ", totals.rows,
                                 " rows, ", totals.valid_rows, " valid rows and ", totals.added_rows,
                                 " of contributions; there were ", world.device.chunks, ", ",
                                 world.device.computed_rows, ", ", world.device.computed_valid_rows, " and ",
                                 world.device.added_rows));
  }
  if (totals.rows_of_kind != world.device.rows_of_kind)
    world.Violation("the observer was told of other numbers of rows of embeddings than were computed");
}

void CheckHistory(World& world) {
  for (const auto& [number, vocab] : world.device.vocab_of_generation()) {
    const HeadWorld& head = world.heads[static_cast<size_t>(vocab - kMostRows)];
    world.Judge(CheckGeneration(world.device.Of(number), number, world.generation_of_stream, head.duties,
                                world.plan.setup.options.deterministic, world.plan.setup.chunk_rows),
                head.name, ", generation ", number);
  }
  for (const HeadWorld& head : world.heads) {
    world.Judge(FindNoOrder(head.calls), head.name, ": no order explains the answers");
  }
}

// Everything that happens, from the engine's creation to its end.
void Main(World& world, bool& over) {
  auto engine =
      Engine::Create(world.plan.setup.options, &world.device, 42, {&world.totals}, &world.scheduler);
  if (!engine.ok()) return world.Violation(engine.status().ToString());
  world.engine = *std::move(engine);
  for (HeadWorld& head : world.heads) {
    if (absl::Status created = Create(world, head); !created.ok()) return world.Violation(created.ToString());
  }
  int running = 0;
  for (HeadWorld& head : world.heads) {
    if (head.duties.empty()) {
      head.trained = true;
      continue;
    }
    world.scheduler.Spawn(absl::StrCat("trainer of ", head.name), [&] { Train(world, head); });
    for (const Action& action : world.plan.actions) {
      if (IsDuty(action.kind) || IsFailure(action.kind) || action.head != head.index) continue;
      ++running;
      world.scheduler.Spawn(absl::StrCat("disturbance from turn ", action.at),
                            [&world, &head, &action, &running] {
                              Disturb(world, head, action);
                              --running;
                            });
    }
  }
  world.scheduler.WaitUntil("the trainers", [&] {
    return std::all_of(world.heads.begin(), world.heads.end(), [](const HeadWorld& h) { return h.trained; });
  });
  world.closing = true;
  world.scheduler.WaitUntil("the disturbances", [&] { return running == 0; });
  for (HeadWorld& head : world.heads) {  // nothing of the open step is to be left
    for (int attempt = 0; attempt < 8 && !world.stopping; ++attempt) {
      const auto snapshot = See(world, head);
      if (!snapshot.ok() || Zero(world, head, snapshot->state.step).ok()) break;
    }
  }
  world.scheduler.WaitUntil("everything to come back", [&] { return InUse(world).empty(); });
  world.engine.reset();
  over = true;
  world.device.Stop();
}

}  // namespace

// Runs a plan; the same seed gives the same run.
Outcome Simulate(const Plan& plan, uint64_t schedule_seed, bool tracing) {
  auto world = std::make_unique<World>(plan, schedule_seed, tracing);
  bool over = false;
  world->scheduler.Spawn("main", [&] { Main(*world, over); });
  world->scheduler.Spawn("hardware", [&] { world->device.Work(); });
  for (int sender = 0; sender < 2; ++sender)
    world->scheduler.Spawn("sender", [&] { SendFromMemory(*world, over); });
  const bool ended = world->scheduler.Run(kMaxTurns);
  if (!ended && world->violations().empty()) {
    world->Violation(
        absl::StrCat(world->scheduler.out_of_turns() ? "it does not come to an end:\n" : "deadlock:\n",
                     world->scheduler.DescribeWaiting()));
  }
  if (world->violations().empty()) {
    CheckReports(*world);
    CheckHistory(*world);
  }
  Outcome outcome{.violations = world->violations(),
                  .trace = world->trace(),
                  .turns = world->scheduler.turns(),
                  .streams = world->streams,
                  .results = world->results,
                  .chunks = world->device.chunks};
  if (!ended) (void)world.release();  // tasks are in the middle of it
  return outcome;
}

// The plan with fewer actions, and a schedule of it, that show a violation too, with its trace; as text.
std::string Shrink(const Plan& plan, uint64_t schedule_seed) {
  constexpr uint64_t kSchedules = 30;  // tried of each smaller plan
  Plan smallest = plan;
  uint64_t schedule = schedule_seed;
  const auto fails = [&](const Plan& candidate) {
    for (uint64_t i = 0; i <= kSchedules; ++i) {
      if (Simulate(candidate, schedule_seed + i, false).violations.empty()) continue;
      schedule = schedule_seed + i;
      return true;
    }
    return false;
  };
  const auto try_smaller = [&](const Plan& candidate) {
    if (!fails(candidate)) return false;
    smallest = candidate;
    return true;
  };
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (size_t i = smallest.actions.size(); i-- > 0;) {
      Plan candidate = smallest;
      candidate.actions.erase(candidate.actions.begin() + static_cast<std::ptrdiff_t>(i));
      smaller = try_smaller(candidate) || smaller;
    }
    if (smallest.setup.steps > 1) {
      Plan candidate = smallest;
      --candidate.setup.steps;
      smaller = try_smaller(candidate) || smaller;
    }
  }
  const Outcome outcome = Simulate(smallest, schedule, true);
  return absl::StrCat("the smallest plan found, with schedule ", schedule, ":\n", Describe(smallest),
                      absl::StrJoin(outcome.trace, "\n"), "\n", absl::StrJoin(outcome.violations, "\n"));
}

}  // namespace lossd::engine::simulation

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
