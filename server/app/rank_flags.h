// SPDX-License-Identifier: Apache-2.0
// The flags of several processes that are one server.
#ifndef LOSSD_SERVER_APP_RANK_FLAGS_H_
#define LOSSD_SERVER_APP_RANK_FLAGS_H_

#include "absl/status/statusor.h"
#include "server/app/rank_options.h"

namespace lossd::app {

// From the flags and the environment. INVALID_ARGUMENT as ranks::ReadLaunch.
absl::StatusOr<RankOptions> RankOptionsFromFlags();

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_RANK_FLAGS_H_
