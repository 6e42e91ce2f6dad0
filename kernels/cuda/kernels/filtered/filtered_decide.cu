// SPDX-License-Identifier: Apache-2.0
// The decision whether a chunk is filtered, by one thread. The file is shorter than 60 lines because each
// kernel of filtered.h has a source of its own.
#include "kernels/cuda/kernels/filtered/filtered.h"

namespace lossd::kernels::cuda {
namespace {

__global__ void DecideKernel(const __grid_constant__ DecideParams p) {
  const bool overflow = *p.selection.used > p.selection.capacity;
  *p.decision = overflow ? Decision::kTooManyCandidates : Decision::kAsPlanned;
}

}  // namespace

cudaError_t LaunchDecide(const DecideParams& params, cudaStream_t stream) {
  DecideKernel<<<1, 1, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda
