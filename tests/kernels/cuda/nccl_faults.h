// SPDX-License-Identifier: Apache-2.0
// Lets one GPU of several stay away from the exchanges of NCCL, as one that hangs, or fail in them. For
// programs whose calls of dlsym the linker wraps. Thread-safe.
#ifndef LOSSD_TESTS_KERNELS_CUDA_NCCL_FAULTS_H_
#define LOSSD_TESTS_KERNELS_CUDA_NCCL_FAULTS_H_

#include <cstdint>

namespace lossd::kernels::testing {

struct NcclFault {
  int member = -1;     // whose calls are affected; -1: nobody's
  int64_t after = 0;   // so many of them go well before
  bool fails = false;  // the call reports an error; else it says that all is well and does nothing
};

// From now on; starts counting anew.
void SetNcclFault(const NcclFault& fault);
// Calls of the member that were affected since then.
int64_t NcclFaults();
// Calls of all members since then.
int64_t NcclCalls();

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_CUDA_NCCL_FAULTS_H_
