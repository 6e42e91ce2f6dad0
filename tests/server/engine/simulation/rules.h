// SPDX-License-Identifier: Apache-2.0
// The rules by which the simulation judges the engine: docs/consistency.md and docs/exactly-once.md as far as
// they concern the engine. All of them are here, so that a change of the rules is a change of this file.
//
// Each function returns "" or what is wrong. They know what was asked, what was answered and what the device
// did, and nothing of how the engine works.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SIMULATION_RULES_H_
#define LOSSD_TESTS_SERVER_ENGINE_SIMULATION_RULES_H_

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/stream.h"
#include "tests/server/engine/simulation/device.h"
#include "tests/server/engine/simulation/plan.h"

namespace lossd::engine::simulation {

// A call that changes what streams depend on, from its request to its answer.
struct Change {
  enum class What : uint8_t { kStep, kZero, kLoad, kReset, kRecreate, kWrite };
  What what = What::kZero;
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();  // it is under way
};

// What went on at one head.
struct HeadFacts {
  std::vector<Change> changes;
  std::map<uint64_t, std::set<int64_t>> bad_rows;  // that were sent, by microbatch
  std::map<int64_t, std::set<int64_t>> senders;    // the streams that sent a row, by its name
  // True if such a change was under way at `since` or later.
  bool Changed(std::initializer_list<Change::What> kinds, int64_t since) const;
};

// A stream: what it was to do, and what it was told.
struct StreamFacts {
  int64_t number = 0;  // its name in the rows that it sends
  const Duty* duty = nullptr;
  RowRange rows;
  bool accumulates = false, retains = false, backward = false;
  kernels::Embedding embedding = kernels::Embedding::kNone;
  int64_t row_grid = 0;
  // When it was opened: the time, and what the device was like.
  int64_t opened = 0;
  int64_t generation = -1;
  int64_t version = 0;
  uint64_t weights_version = 0;  // the engine's number of it
  int64_t failed_results = 0, broken = 0;
  // What its caller did.
  bool cut = false, broke_a_rule = false;
  std::set<int64_t> sent;
  std::vector<RowRange> slices;
  // What it was told.
  std::map<int64_t, float> losses;
  std::set<int64_t> versions;
  double loss_sum = 0;
  int64_t correct_rows = 0;
};

// dL/d(row loss) that a backward brings.
inline float UpstreamOf(int64_t row) { return static_cast<float>(1 + row % 3); }

// Why a stream was not opened.
std::string CheckRefusal(const absl::Status& status, const StreamFacts& stream, const HeadFacts& head,
                         const Device& device, const Setup& setup, bool stopping);
// What a call came to that is to be refused with `code`, unless the head or the server refuses all calls.
std::string CheckRightlyRefused(const absl::Status& status, absl::StatusCode code, const StreamFacts& stream,
                                const HeadFacts& head, const Device& device, const Setup& setup,
                                bool stopping);
// The results of a slice; notes them.
std::string CheckSlice(const SliceOutput& output, const Device& device, int64_t newest_version,
                       StreamFacts& stream);
// Behind the last row of the depth of `row`; the end of a microbatch that is not divided.
int64_t EndOfDepth(const Duty& duty, int64_t row);

// The end of a stream.
std::string CheckEnd(const absl::Status& status, const StreamSummary& summary, const StreamFacts& stream,
                     const HeadFacts& head, const Device& device, bool stopping);

// The device's number of each version of the weights, by the engine's number.
using VersionNames = std::map<uint64_t, int64_t>;
// A result says that it is of `weights_version`, and was computed with the device's version `on_device`.
// Notes the pair.
std::string CheckVersion(uint64_t weights_version, int64_t on_device, VersionNames& names);

// What the engine counts before and after a call that it refused.
std::string CheckBookedNothing(const EngineStats& before, const EngineStats& after);

// Whether each row of a generation is in it once.
std::string CheckOnce(const Generation& generation);
// A generation at the end of the run. `streams` by number.
std::string CheckGeneration(const Generation& generation, int64_t number,
                            const std::map<int64_t, int64_t>& generation_of_stream,
                            const std::vector<Duty>& duties, bool deterministic, int64_t row_grid);
// A step that was applied with all duties expected, and closed this generation.
std::string CheckWholeStep(const Generation& generation, const std::vector<Duty>& duties);

// ---- The order of administrative calls ----
// Whether there is an order of administrative calls on one head, within the times of each, in which every
// answer about the open step is right.

struct Call {
  enum class What : uint8_t {
    kSees,      // the step `step` is open: an opened stream, a description, a norm of the step
    kRefused,   // because the step `step` is not open
    kApplied,   // closed the step `step`, and opened the next one
    kRepeated,  // answered for `step`, which was closed last
    kZeroed,    // the step `step`, which stays open
    kLoaded,    // opened the step `step`
    kDeleted,
    kCreated,       // with step 0
    kNotFound,      // there is no such head, or it is being created or deleted
    kMaybe,         // a load that failed: it may have opened the step or not
    kMaybeCreated,  // a creation that found the head deleted at its end
  };
  What what = What::kSees;
  uint64_t step = 0;
  int64_t begin = 0, end = 0;  // the call took effect in between
};

std::string Describe(const Call& call);
// Empty if there is an order, else why not. The head does not exist before the first call.
std::string FindNoOrder(const std::vector<Call>& calls);

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_RULES_H_
