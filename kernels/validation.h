// SPDX-License-Identifier: Apache-2.0
// Checks of arguments that every backend makes alike, before anything is computed or changed.
//
// Stateless and thread-safe. Messages name the field and the value.
#ifndef LOSSD_KERNELS_VALIDATION_H_
#define LOSSD_KERNELS_VALIDATION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// INVALID_ARGUMENT if the head or its `chunk_rows` cannot take this chunk: options out of range, class
// weights or weight gradients that the head does not have, too many rows, missing pointers, a grad_scale that
// is not finite, targets outside [0, V) other than kIgnoredTarget. Reads every target.
absl::Status ValidateChunk(const HeadConfig& config, int64_t chunk_rows, const Chunk& chunk);

// NOT_FOUND if the head has no such tensor; INVALID_ARGUMENT if the row range leaves it or `bytes` is not
// rows * cols * SizeOf(dtype).
absl::Status ValidateTensorAccess(const HeadConfig& config, TensorId id, int64_t row_begin, int64_t rows,
                                  DType dtype, size_t bytes);

// Likewise for a replica, which has StoredRowsOf() of a tensor: NOT_FOUND if that is none of the parameter's,
// INVALID_ARGUMENT if some of the rows are another's.
absl::Status ValidateReplicaAccess(const HeadConfig& config, Replica replica, TensorId id, int64_t row_begin,
                                   int64_t rows, DType dtype, size_t bytes);

// For HeadKernels::ApplyStep: INVALID_ARGUMENT, or FAILED_PRECONDITION if the head cannot be trained so.
absl::Status ValidateStep(const HeadConfig& config, const OptimizerOptions& options, int64_t update);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_VALIDATION_H_
