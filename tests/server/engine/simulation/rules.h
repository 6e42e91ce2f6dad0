// SPDX-License-Identifier: Apache-2.0
// The rules by which the simulation judges the engine: docs/consistency.md and docs/exactly-once.md, as far
// as they concern the engine. All rules are in this file, so a change of the rules changes this file.
//
// Each function returns "" or what is wrong. The rules know the requests, the answers and what the device
// did. They know nothing about how the engine works.
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

// A call that changes something on which streams depend, from its request to its answer.
struct Change {
  enum class What : uint8_t { kStep, kZero, kLoad, kReset, kRecreate, kWrite };
  What what = What::kZero;
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();  // this value: the call is in progress
};

// What has happened to one head.
struct HeadFacts {
  std::vector<Change> changes;
  std::map<uint64_t, std::set<int64_t>> bad_rows;  // bad rows that were sent, by microbatch
  std::map<int64_t, std::set<int64_t>> senders;    // for each row, by name, the streams that sent it
  // Whether a change of one of these kinds was in progress at `since` or later.
  bool Changed(std::initializer_list<Change::What> kinds, int64_t since) const;
};

// A stream: what it had to do, and the answers that it got.
struct StreamFacts {
  int64_t number = 0;  // identifies the stream in the rows that it sends
  const Duty* duty = nullptr;
  RowRange rows;
  bool accumulates = false, retains = false, backward = false;
  kernels::Embedding embedding = kernels::Embedding::kNone;
  int64_t row_grid = 0;
  // The time when it was opened, and the state of the device at that time.
  int64_t opened = 0;
  int64_t generation = -1;
  int64_t version = 0;
  uint64_t weights_version = 0;  // the engine's number of that version
  int64_t failed_results = 0, broken = 0;
  // What the stream's caller did.
  bool cut = false, broke_a_rule = false;
  std::set<int64_t> sent;
  std::vector<RowRange> slices;
  // The answers that the stream got.
  std::map<int64_t, float> losses;
  std::set<int64_t> versions;
  double loss_sum = 0;
  int64_t correct_rows = 0;
};

// The gradient dL/d(row loss) that a backward brings.
inline float UpstreamOf(int64_t row) { return static_cast<float>(1 + row % 3); }

// Checks the reason why a stream was not opened.
std::string CheckRefusal(const absl::Status& status, const StreamFacts& stream, const HeadFacts& head,
                         const Device& device, const Setup& setup, bool stopping);
// Checks a call that must be refused with `code`, unless the head or the server refuses all calls.
std::string CheckRightlyRefused(const absl::Status& status, absl::StatusCode code, const StreamFacts& stream,
                                const HeadFacts& head, const Device& device, const Setup& setup,
                                bool stopping);
// Checks the results of a slice and records them in `stream`.
std::string CheckSlice(const SliceOutput& output, const Device& device, int64_t newest_version,
                       StreamFacts& stream);
// The row after the last row of the depth of `row`. Without depths, the end of the microbatch.
int64_t EndOfDepth(const Duty& duty, int64_t row);

// Checks the end of a stream.
std::string CheckEnd(const absl::Status& status, const StreamSummary& summary, const StreamFacts& stream,
                     const HeadFacts& head, const Device& device, bool stopping);

// For each version of the weights, by the engine's number: the device's number of it.
using VersionNames = std::map<uint64_t, int64_t>;
// Checks a result that names `weights_version` and was computed with the device's version `on_device`.
// Records the pair.
std::string CheckVersion(uint64_t weights_version, int64_t on_device, VersionNames& names);

// Checks that a refused call did not change what the engine counts.
std::string CheckBookedNothing(const EngineStats& before, const EngineStats& after);

// Checks that each row of a generation is in it exactly once.
std::string CheckOnce(const Generation& generation);
// Checks a generation at the end of the run. The keys of `generation_of_stream` are stream numbers.
std::string CheckGeneration(const Generation& generation, int64_t number,
                            const std::map<int64_t, int64_t>& generation_of_stream,
                            const std::vector<Duty>& duties, bool deterministic, int64_t row_grid);
// Checks a step that expected all duties and closed this generation.
std::string CheckWholeStep(const Generation& generation, const std::vector<Duty>& duties);

// ---- The order of administrative calls ----
// Checks that the administrative calls on one head have an order, within the begin and end times of the
// calls, in which every answer about the open step is right.

struct Call {
  enum class What : uint8_t {
    kSees,      // `step` is open: an opened stream, a description, or a norm of the step
    kRefused,   // refused because `step` is not open
    kApplied,   // closed `step`, and opened the next one
    kRepeated,  // got the stored answer for `step`, which was closed last
    kZeroed,    // zeroed `step`, which stays open
    kLoaded,    // opened `step`
    kDeleted,
    kCreated,       // opened step 0
    kNotFound,      // the head does not exist, or is being created or deleted
    kMaybe,         // a load that failed: it may or may not have opened `step`
    kMaybeCreated,  // a creation that failed at its end because the head had been deleted
  };
  What what = What::kSees;
  uint64_t step = 0;
  int64_t begin = 0, end = 0;  // the call took effect between these times
};

std::string Describe(const Call& call);
// Empty if there is an order, else the reason why there is none. The head does not exist before the first
// call.
std::string FindNoOrder(const std::vector<Call>& calls);

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_RULES_H_
