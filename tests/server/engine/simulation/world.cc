// SPDX-License-Identifier: Apache-2.0
#include "tests/server/engine/simulation/world.h"

namespace lossd::engine::simulation {

void Totals::OnChunk(const ChunkReport& report) {
  scheduler_->Yield();
  ++chunks;
  rows += report.rows;
  rows_of_kind[report.embedding] += report.rows;
  valid_rows += report.sums.valid_rows;
  negative = negative || report.rows <= 0 || report.sums.valid_rows < 0 || report.queue_seconds.empty();
}

void Totals::OnContribution(const ContributionReport& report) {
  scheduler_->Yield();
  added_rows += report.added_rows;
  negative = negative || report.added_rows < 0;
}

World::World(const Plan& the_plan, uint64_t schedule_seed, bool tracing)
    : plan(the_plan),
      scheduler(schedule_seed),
      device(&scheduler, [this](std::string text) { Violation(std::move(text)); }),
      tracing_(tracing) {
  device.chunk_rows = plan.setup.chunk_rows;
  device.chunks_in_flight = plan.setup.chunks_in_flight;
  device.asynchronous = plan.setup.asynchronous;
  for (int index = 0; index < plan.setup.heads; ++index) {
    HeadWorld head{.index = index, .name = absl::StrCat("head ", index)};
    head.config = {.hidden_size = kHidden, .vocab_size = kMostRows + index, .trainable = true};
    head.duties = DutiesOf(plan, index);
    heads.push_back(std::move(head));
  }
  for (const Action& action : plan.actions) {
    const auto number = static_cast<int64_t>(action.number);
    if (action.kind == Kind::kFailResults) device.failures.results.insert(number);
    if (action.kind == Kind::kFailDone) device.failures.done.insert(number);
    if (action.kind == Kind::kFailStep) device.failures.steps.insert(number);
    if (action.kind == Kind::kFailZero) device.failures.zeros.insert(number);
    if (action.kind == Kind::kFailAdd) device.failures.adds.insert(number);
  }
}

void World::Violation(std::string text) {
  Note("VIOLATION ", text);
  violations_.push_back(std::move(text));
  scheduler.Stop();  // what follows would follow from it
}

ChangeScope::ChangeScope(World& world, HeadWorld& head, Change::What what)
    : world_(world), head_(head), index_(head.facts.changes.size()), begin_(world.Tick()) {
  head_.facts.changes.push_back({.what = what, .begin = begin_});
}

ChangeScope::~ChangeScope() { head_.facts.changes[index_].end = world_.Tick(); }

}  // namespace lossd::engine::simulation
