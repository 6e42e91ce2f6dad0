// The lists of the logit pass on their way to the filtered algorithm. What was listed while a row's sum was
// not yet known is judged again by the sum; bytes: 8 a listed class.
#include "kernels/cuda/filtered/candidates.cuh"
#include "kernels/cuda/hopper/fused_lists.h"
#include "kernels/cuda/hopper/fused_row.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr int kSelectThreads = 128;

// Of a block that has the panel, a thread a row: empties the lists if one of them is incomplete and they are
// not `done`, which redo then tells and all threads get to know.
__device__ __forceinline__ bool Reopen(const FusedRows& w, int64_t row, bool exists, bool done) {
  const bool incomplete = __syncthreads_or(exists && w.lists.counts[row] > w.lists.capacity) != 0;
  const bool again = incomplete && !done;
  if (threadIdx.x == 0) w.redo[1 + blockIdx.x] = again ? 1 : 0;
  if (again && exists) w.lists.counts[row] = 0;
  return again;
}

template <bool kGeneral>
__global__ void PrepareRelistKernel(const __grid_constant__ RowLossParams p,
                                    const __grid_constant__ FusedRows w) {
  const int64_t row = blockIdx.x * int64_t{kPanelRows} + threadIdx.x;
  const bool exists = row < p.rows;
  Reopen(w, row, exists, false);
  if (row == 0) w.redo[0] = 0;
  if (!exists) return;
  const Target target = MakeTarget<kGeneral>(p, row);
  const float f = LogitMap<__nv_bfloat16, kGeneral>(p).f;
  w.lists.known[row] = w.sum[row] + Exp2(fmaf(target.logit.z, f, -w.reference[row]));
}

__global__ void PrepareLastRelistKernel(const __grid_constant__ FusedRows w, int64_t rows) {
  const int64_t row = blockIdx.x * int64_t{kPanelRows} + threadIdx.x;
  const bool again = Reopen(w, row, row < rows, w.redo[1 + blockIdx.x] != 0);
  if (again && threadIdx.x == 0) w.redo[0] = 1;
}

template <bool kGeneral>
__global__ __launch_bounds__(kSelectThreads) void SelectListedKernel(
    const __grid_constant__ RowLossParams p, const __grid_constant__ FusedRows w,
    const __grid_constant__ RowSelection selection) {
  __shared__ int32_t columns[kMostListed];
  __shared__ float exponents[kMostListed];
  __shared__ float sorted[kMostListed];
  __shared__ RowCandidates shared;
  const int64_t row = blockIdx.x;
  const CandidateColumns list = {columns, exponents, sorted};
  const float f = LogitMap<__nv_bfloat16, kGeneral>(p).f;
  if (threadIdx.x == 0) {
    const FusedRow fused = LoadFusedRow<kGeneral>(p, w, row);
    const RowResult result = FinishSums<kGeneral>(p, row, fused.target, fused.rest, f);
    shared.Start<float>(fused.rest, result, p.target_dots[row], log2f(selection.epsilon), f);
  }
  __syncthreads();
  const int listed = w.lists.counts[row];
  if (listed > w.lists.capacity) {
    if (threadIdx.x == 0) shared.count = listed;
  } else {
    const Candidate* entries = w.lists.entries + row * w.lists.capacity;
    for (int i = threadIdx.x; i < listed; i += kSelectThreads) {
      const Candidate candidate = entries[i];
      if (!(candidate.z >= shared.threshold)) continue;
      shared.Add(list, w.lists.capacity, candidate.column, candidate.z * f);
    }
  }
  __syncthreads();
  SelectCandidates<kGeneral, kSelectThreads>(selection, row, list, w.lists.capacity, shared);
}

}  // namespace

cudaError_t LaunchPrepareRelist(const RowLossParams& loss, const FusedRows& rows, cudaStream_t stream) {
  auto* kernel = loss.IsGeneral() ? PrepareRelistKernel<true> : PrepareRelistKernel<false>;
  kernel<<<static_cast<unsigned>(Panels(loss.padded_rows)), kPanelRows, 0, stream>>>(loss, rows);
  return cudaGetLastError();
}

cudaError_t LaunchPrepareLastRelist(const RowLossParams& loss, const FusedRows& rows, cudaStream_t stream) {
  PrepareLastRelistKernel<<<static_cast<unsigned>(Panels(loss.padded_rows)), kPanelRows, 0, stream>>>(
      rows, loss.rows);
  return cudaGetLastError();
}

cudaError_t LaunchSelectListed(const RowLossParams& loss, const FusedRows& rows,
                               const RowSelection& selection, cudaStream_t stream) {
  if (loss.rows == 0) return cudaSuccess;
  auto* kernel = loss.IsGeneral() ? SelectListedKernel<true> : SelectListedKernel<false>;
  kernel<<<static_cast<unsigned>(loss.rows), kSelectThreads, 0, stream>>>(loss, rows, selection);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda::hopper
