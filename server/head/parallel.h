// SPDX-License-Identifier: Apache-2.0
// Work that several threads share. Thread-safe.
#ifndef LOSSD_SERVER_HEAD_PARALLEL_H_
#define LOSSD_SERVER_HEAD_PARALLEL_H_

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace lossd::head {

// Calls `task` once with each number below `tasks`, in order, on this thread and on up to `threads` - 1
// others; the threads end before this returns. After an error no further task begins. Of several errors that
// of the lowest number is returned, so that it does not depend on the threads' speed.
absl::Status RunInThreads(int threads, size_t tasks, absl::FunctionRef<absl::Status(size_t)> task);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_PARALLEL_H_
