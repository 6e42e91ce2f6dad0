// SPDX-License-Identifier: Apache-2.0
// For the server's start: every head as its newest checkpoint has it.
#ifndef LOSSD_SERVER_ADMIN_RESTORE_H_
#define LOSSD_SERVER_ADMIN_RESTORE_H_

#include "absl/status/status.h"
#include "server/admin/head_operations.h"

namespace lossd::admin {

// Loads, of each head that has checkpoints below the directory, the one that was saved last. A checkpoint
// whose manifest cannot be read is passed over with a warning in the log, since it is not known what it is
// of; one that is damaged otherwise, or does not fit, is an error that names it, and older ones are not tried
// in its place. Blocks. Heads that were loaded before an error stay.
absl::Status RestoreLatest(HeadOperations& operations);

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_RESTORE_H_
