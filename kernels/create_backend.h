// SPDX-License-Identifier: Apache-2.0
// The one place that knows which backends this build has.
#ifndef LOSSD_KERNELS_CREATE_BACKEND_H_
#define LOSSD_KERNELS_CREATE_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/backend_choice.h"
#include "kernels/rank_link.h"

namespace lossd::kernels {

// BackendChoice::split; INVALID_ARGUMENT naming it.
absl::StatusOr<Split> SplitOf(const BackendChoice& choice);

struct CreatedBackend {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<RankLink> link;  // of a choice with several replicas; the heads end before it
  std::string note;                // why "auto" did not take a GPU; empty if there is nothing to say
};

// INVALID_ARGUMENT naming the option if one is out of range, UNAVAILABLE if "cuda" was asked for and this
// build or this machine has none. Thread-safe.
absl::StatusOr<CreatedBackend> CreateBackend(const BackendChoice& choice);

// The backends of one of several processes, a backend for each device that `devices` or `cpu_devices` names,
// each with a link of its own. `choice.replica` counts the processes, of which all have as many devices; the
// replicas of the results are numbered through, process by process. Errors as above. Thread-safe.
absl::StatusOr<std::vector<CreatedBackend>> CreateRankBackends(const BackendChoice& choice);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CREATE_BACKEND_H_
