// SPDX-License-Identifier: Apache-2.0
// Whether a head that exists is the one that was asked for. A pure function, thread-safe.
#ifndef LOSSD_CLIENT_CLI_SAME_SPEC_H_
#define LOSSD_CLIENT_CLI_SAME_SPEC_H_

#include "absl/status/status.h"
#include "lossd/v1/head.pb.h"

namespace lossd::cli {

// ALREADY_EXISTS, naming every difference, unless what is wanted is what the head has. Flags are always
// wanted; numbers and words unless they are left to the server (0, unspecified).
absl::Status CheckSameSpec(const v1::HeadSpec& has, const v1::HeadSpec& wanted);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_SAME_SPEC_H_
