// SPDX-License-Identifier: Apache-2.0
// Work on a range of rows by as many threads as the host has processors.
#ifndef LOSSD_KERNELS_DATA_PARALLEL_H_
#define LOSSD_KERNELS_DATA_PARALLEL_H_

#include <cstdint>

#include "absl/functional/function_ref.h"

namespace lossd::data {

// Calls work(from, to) for parts of [begin, end) that cover it, on several threads, and returns when all are
// done.
void InParallel(int64_t begin, int64_t end, absl::FunctionRef<void(int64_t from, int64_t to)> work);

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_PARALLEL_H_
