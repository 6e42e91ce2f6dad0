// The decision whether a chunk is filtered, by one block that goes over the selected rows.
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/filtered/filtered.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kDecideThreads = 1024;

__global__ void DecideKernel(const __grid_constant__ DecideParams p) {
  __shared__ float scratch[33];
  float dropped = 0.0f;
  float rows = 0.0f;
  const bool overflow = *p.selection.used > p.selection.capacity;
  for (int64_t r = threadIdx.x; r < p.rows; r += kDecideThreads) {
    const SelectedRow& row = p.selection.rows[r];
    if (p.with_gradient[r] == 0 || row.finite == 0) continue;
    dropped += fmaxf(row.sum - row.kept, 0.0f) / row.total;
    rows += 1.0f;
  }
  dropped = BlockSum(dropped, scratch);
  __syncthreads();
  rows = BlockSum(rows, scratch);
  if (threadIdx.x != 0) return;
  *p.decision = overflow                              ? Decision::kTooManyCandidates
                : dropped > p.max_dropped_mass * rows ? Decision::kTooMuchMass
                                                      : Decision::kFiltered;
}

}  // namespace

cudaError_t LaunchDecide(const DecideParams& params, cudaStream_t stream) {
  DecideKernel<<<1, kDecideThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda
