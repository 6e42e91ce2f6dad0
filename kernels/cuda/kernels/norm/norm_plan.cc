// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/norm/norm_plan.h"

namespace lossd::kernels::cuda {

absl::string_view Name(NormRows rows) {
  switch (rows) {
    case NormRows::kRegisters:
      return "rows in registers";
    case NormRows::kBulkCopies:
      return "rows by bulk copies";
    case NormRows::kWarpCopies:
      return "rows by copies of warps";
    case NormRows::kNowhere:
      return "rows read again for each pass";
  }
  return "";
}

}  // namespace lossd::kernels::cuda
