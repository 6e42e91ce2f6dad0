// SPDX-License-Identifier: Apache-2.0
// Makes calls of the CUDA runtime and of cuBLASLt fail that the program's own code makes. For programs that
// link lossd_cuda_faults; calls that the libraries make of each other are not counted. Thread-safe.
#ifndef LOSSD_TESTS_KERNELS_CUDA_CUDA_FAULTS_H_
#define LOSSD_TESTS_KERNELS_CUDA_CUDA_FAULTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace lossd::kernels::testing {

struct CudaFault {
  int64_t at = 0;          // the first call that fails, counted from 1; 0: none does
  bool all_after = false;  // and all calls after it, as on a lost device
  cudaError_t error = cudaErrorLaunchFailure;
};

// From now on; starts counting anew.
void SetCudaFault(const CudaFault& fault);
// Calls since then.
int64_t CudaCalls();
// The first call that failed; empty if none did.
std::string CudaVictim();

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_CUDA_CUDA_FAULTS_H_
