// SPDX-License-Identifier: Apache-2.0
// Which kernel a norm takes (norm.h). Plain data; also of programs without CUDA.
//
// The file is shorter than 60 lines because plans name the kernel without CUDA, and norm.h needs CUDA.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_NORM_NORM_PLAN_H_
#define LOSSD_KERNELS_CUDA_KERNELS_NORM_NORM_PLAN_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace lossd::kernels::cuda {

// Where a kernel has a row between the passes over it.
enum class NormRows : uint8_t {
  kRegisters,   // forward
  kBulkCopies,  // backward on Hopper (hopper/norm_backward.h): in a ring that one thread copies whole rows
                // into
  kWarpCopies,  // backward: in a ring that each warp copies its part into
  kNowhere,     // rows of any kind, which are read again for each pass
};
absl::string_view Name(NormRows rows);

// Which kernel a launch takes; decided by dtypes, sizes, alignment and the device alone.
struct NormPlan {
  NormRows rows = NormRows::kNowhere;
  absl::string_view reason;  // why not the kernel before it in NormRows; "": it is the first
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_NORM_NORM_PLAN_H_
