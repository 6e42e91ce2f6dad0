// SPDX-License-Identifier: Apache-2.0
// Whether there is an order of administrative calls on one head, within the times of each, in which every
// answer about the open step is right.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SIMULATION_LINEAR_H_
#define LOSSD_TESTS_SERVER_ENGINE_SIMULATION_LINEAR_H_

#include <cstdint>
#include <string>
#include <vector>

namespace lossd::engine::simulation {

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

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_LINEAR_H_
