// SPDX-License-Identifier: Apache-2.0
#include "tests/server/engine/simulation/plan.h"

#include <algorithm>
#include <array>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::engine::simulation {
namespace {

using Random = std::mt19937_64;

struct Weighted {
  Kind kind;
  const char* name;
  uint64_t weight;
};

constexpr std::array<Weighted, 25> kKindWeights = {{
    {Kind::kMicrobatch, "microbatch", 6},
    {Kind::kDeferred, "deferred microbatch", 2},
    {Kind::kRowGradients, "gradients of an embedding", 3},
    {Kind::kContribution, "contribution", 1},
    {Kind::kTwin, "twin", 8},
    {Kind::kLossOnly, "loss only", 3},
    {Kind::kEmbed, "rows of an embedding", 2},
    {Kind::kRefused, "refused call", 2},
    {Kind::kZero, "zero", 2},
    {Kind::kGradNorm, "gradient norm", 1},
    {Kind::kDescribe, "describe", 1},
    {Kind::kStep, "step", 2},
    {Kind::kWrite, "write", 1},
    {Kind::kRead, "read", 1},
    {Kind::kLoad, "load", 1},
    {Kind::kReset, "reset", 1},
    {Kind::kRecreate, "delete and create", 1},
    {Kind::kRelease, "release", 1},
    {Kind::kExpire, "expire", 1},
    {Kind::kFailResults, "fail chunk", 2},
    {Kind::kFailDone, "break chunk", 1},
    {Kind::kFailStep, "break step", 1},
    {Kind::kFailZero, "break zero", 1},
    {Kind::kFailAdd, "break contribution", 1},
    {Kind::kShutdown, "shutdown", 1},
}};

const char* TextOf(Kind kind) {
  return std::find_if(kKindWeights.begin(), kKindWeights.end(),
                      [kind](const Weighted& w) { return w.kind == kind; })
      ->name;
}

Kind DrawKind(bool duty, Random& random) {
  uint64_t sum = 0;
  for (const Weighted& w : kKindWeights) sum += IsDuty(w.kind) == duty ? w.weight : 0;
  uint64_t at = random() % sum;
  for (const Weighted& w : kKindWeights) {
    if (IsDuty(w.kind) != duty) continue;
    if (at < w.weight) return w.kind;
    at -= w.weight;
  }
  return Kind::kMicrobatch;
}

Setup DrawSetup(Random& random) {
  constexpr int64_t kSliceBytes = 256;
  Setup setup;
  setup.options.deterministic = random() % 2 == 0;
  setup.options.slice_bytes = kSliceBytes;
  setup.options.staging_bytes = kSliceBytes * static_cast<int64_t>(2 + random() % 4);
  // In order, calls that wait for their turn keep what earlier rows may need, so there has to be enough.
  const auto retained = static_cast<int64_t>(2 + random() % 8);
  setup.options.retained_bytes = kSliceBytes * (setup.options.deterministic ? 64 : retained);
  setup.options.max_streams = random() % 4 == 0 && !setup.options.deterministic ? 8 : 64;
  setup.options.max_queued_operations = random() % 4 == 0 ? 2 : 64;
  setup.chunk_rows = static_cast<int64_t>(2 + random() % 7);
  setup.asynchronous = random() % 4 != 0;
  setup.chunks_in_flight = setup.asynchronous ? static_cast<int>(1 + random() % 3) : 1;
  setup.heads = random() % 4 == 0 ? 2 : 1;
  setup.steps = static_cast<int>(1 + random() % 3);
  setup.lazy_rows = random() % 2 == 0;
  return setup;
}

}  // namespace

bool IsDuty(Kind kind) { return kind <= Kind::kContribution; }

bool IsFailure(Kind kind) { return kind >= Kind::kFailResults; }

Plan MakePlan(uint64_t seed) {
  Random random(seed);
  Plan plan{.seed = seed, .setup = DrawSetup(random)};
  const auto heads = static_cast<uint64_t>(plan.setup.heads);
  const uint64_t duties = 1 + random() % 4;
  for (uint64_t i = 0; i < duties * heads; ++i) {
    plan.actions.push_back(
        {.kind = DrawKind(true, random), .head = static_cast<int>(i % heads), .seed = random()});
  }
  const uint64_t disturbances = random() % 8;
  for (uint64_t i = 0; i < disturbances; ++i) {
    plan.actions.push_back({.kind = DrawKind(false, random),
                            .head = static_cast<int>(random() % heads),
                            .at = static_cast<int64_t>(random() % 400),
                            .number = random() % 4,
                            .seed = random()});
  }
  return plan;
}

std::string Describe(const Plan& plan) {
  const Setup& setup = plan.setup;
  std::string text = absl::StrCat(
      "  ", setup.options.deterministic ? "deterministic" : "by arrival", ", ", setup.heads, " heads, ",
      setup.steps, " steps, chunks of ", setup.chunk_rows, " rows, ", setup.chunks_in_flight, " in flight, ",
      setup.asynchronous ? "asynchronous" : "synchronous", ", staging for ",
      setup.options.staging_bytes / setup.options.slice_bytes, " slices, retained memory for ",
      setup.options.retained_bytes / setup.options.slice_bytes, setup.lazy_rows ? ", lazy rows" : "",
      ", at most ", setup.options.max_streams, " streams and ", setup.options.max_queued_operations,
      " operations\n");
  for (int head = 0; head < setup.heads; ++head) {
    for (const Duty& duty : DutiesOf(plan, head)) {
      absl::StrAppend(&text, "  head ", head, ": ", TextOf(duty.kind), " ", duty.id, ", ", duty.rows,
                      " rows in ", duty.parts.size(), " parts, ", duty.cut_attempts, " cut, ",
                      duty.bad_attempts, " with a bad row",
                      duty.embeds_before ? ", each after their rows" : "", "\n");
    }
  }
  for (const Action& action : plan.actions) {
    if (IsDuty(action.kind)) continue;
    absl::StrAppend(&text, "  head ", action.head, ", from turn ", action.at, ": ", TextOf(action.kind), " ",
                    action.number, "\n");
  }
  return text;
}

int64_t Duty::valid_rows() const {
  return std::count_if(targets.begin(), targets.end(), [](int32_t target) { return target >= 0; });
}

std::vector<Duty> DutiesOf(const Plan& plan, int head) {
  std::vector<Duty> duties;
  for (const Action& action : plan.actions) {
    if (!IsDuty(action.kind) || action.head != head) continue;
    Random random(action.seed);
    Duty duty{.kind = action.kind, .head = head, .id = duties.size()};
    duty.rows = static_cast<int64_t>(random() % 24);
    const bool may_be_empty = duty.kind == Kind::kMicrobatch || duty.adds_row_gradients();
    if (!may_be_empty && duty.rows == 0) duty.rows = 1;
    const uint64_t ignored = random() % 3 == 0 ? 2 : 8;  // one row of so many has no target
    const bool weights = random() % 2 == 0 && !duty.adds_row_gradients();
    for (int64_t row = 0; row < duty.rows; ++row) {
      duty.targets.push_back(random() % ignored == 0 ? -100 : static_cast<int32_t>(random() % 4));
      if (weights) duty.row_weights.push_back(static_cast<float>(1 + random() % 3));
    }
    duty.want_grad_hidden = random() % 2 == 0;
    if (duty.adds_row_gradients()) {
      duty.scale = 4.0f / static_cast<float>(1 << random() % 4);
      duty.embeds_before = random() % 2 == 0;
    }
    duty.cut_attempts = static_cast<int>(random() % 6) - 3;
    duty.bad_attempts = random() % 8 == 0 ? 1 : 0;
    const int64_t parts =
        std::min<int64_t>(std::max<int64_t>(duty.rows, 1), 1 + static_cast<int64_t>(random() % 3));
    for (int64_t part = 0; part < parts; ++part)
      duty.parts.push_back({duty.rows * part / parts, duty.rows * (part + 1) / parts});
    for (int64_t left = duty.rows; duty.kind == Kind::kMicrobatch && random() % 2 == 0;) {
      const bool last = random() % 2 == 0;
      const int64_t rows = last ? left : static_cast<int64_t>(random() % static_cast<uint64_t>(left + 1));
      duty.depths.push_back({.rows = rows, .weight = 4.0f / static_cast<float>(1 << duty.depths.size())});
      left -= rows;
      if (last) break;
    }
    int64_t divided = 0;
    for (const Depth& depth : duty.depths) divided += depth.rows;
    if (!duty.depths.empty() && divided < duty.rows) duty.depths.push_back({.rows = duty.rows - divided});
    duties.push_back(std::move(duty));
  }
  return duties;
}

}  // namespace lossd::engine::simulation
