// SPDX-License-Identifier: Apache-2.0
// The lists of the logit pass on their way to filtered gradients. What was listed while a row's sum was
// not yet known is judged again by the sum; bytes: 8 a listed class.
#include "kernels/cuda/kernels/filtered/candidates.cuh"
#include "kernels/cuda/kernels/hopper/fused_lists.h"
#include "kernels/cuda/kernels/hopper/fused_row.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr int kSelectThreads = 128;

// A block has a panel, a thread a row: if one of the panel's lists is incomplete and the panel is not `done`,
// empties all of them, marks the panel and returns true in all threads.
__device__ __forceinline__ bool Reopen(const FusedRows& w, const CandidateLists& lists, int64_t row,
                                       bool exists, bool done) {
  const bool incomplete = __syncthreads_or(exists && lists.counts[row] > lists.capacity) != 0;
  const bool again = incomplete && !done;
  if (threadIdx.x == 0) w.marked_panels[1 + blockIdx.x] = again ? 1 : 0;
  if (again && exists) lists.counts[row] = 0;
  return again;
}

template <bool kGeneral>
__global__ void PrepareSecondListingKernel(const __grid_constant__ LossTerms terms,
                                           const __grid_constant__ RowInputs in,
                                           const __grid_constant__ FusedRows w,
                                           const __grid_constant__ CandidateLists lists) {
  const int64_t row = blockIdx.x * int64_t{kPanelRows} + threadIdx.x;
  const bool exists = row < in.rows;
  Reopen(w, lists, row, exists, false);
  if (row == 0) w.marked_panels[0] = 0;
  if (!exists) return;
  const Target target = MakeTarget<kGeneral>(terms, in, row);
  const float f = LogitMap<__nv_bfloat16, kGeneral>(terms).f;
  lists.sum_bound[row] = w.sum[row] + Exp2(fmaf(target.logit.z, f, -w.reference[row]));
}

__global__ void PrepareLastListingKernel(const __grid_constant__ FusedRows w,
                                         const __grid_constant__ CandidateLists lists, int64_t rows) {
  const int64_t row = blockIdx.x * int64_t{kPanelRows} + threadIdx.x;
  const bool again = Reopen(w, lists, row, row < rows, w.marked_panels[1 + blockIdx.x] != 0);
  if (again && threadIdx.x == 0) w.marked_panels[0] = 1;
}

template <bool kGeneral>
__global__ __launch_bounds__(kSelectThreads) void SelectListedKernel(
    const __grid_constant__ LossTerms terms, const __grid_constant__ RowInputs in,
    const __grid_constant__ FusedRows w, const __grid_constant__ CandidateLists lists,
    const __grid_constant__ RowSelection selection) {
  __shared__ int32_t columns[kMostListed];
  __shared__ float exponents[kMostListed];
  __shared__ float sorted[kMostListed];
  __shared__ RowCandidates shared;
  const int64_t row = blockIdx.x;
  const CandidateColumns list = {columns, exponents, sorted};
  const float f = LogitMap<__nv_bfloat16, kGeneral>(terms).f;
  if (threadIdx.x == 0) {
    const FusedRow fused = LoadFusedRow<kGeneral>(terms, in, w, row);
    const RowResult result = FinishSums<kGeneral>(terms, in, row, fused.target, fused.others, f);
    shared.Start(fused.others, result, in.target_dots[row], log2f(selection.epsilon), f);
  }
  __syncthreads();
  const int listed = lists.counts[row];
  if (listed > lists.capacity) {
    if (threadIdx.x == 0) shared.count = listed;
  } else {
    const Candidate* entries = lists.entries + row * lists.capacity;
    for (int i = threadIdx.x; i < listed; i += kSelectThreads) {
      const Candidate candidate = entries[i];
      if (!(candidate.z >= shared.threshold)) continue;
      shared.Add(list, lists.capacity, candidate.column, candidate.z * f);
    }
  }
  __syncthreads();
  SelectCandidates<kGeneral, kSelectThreads>(selection, row, list, lists.capacity, shared);
}

}  // namespace

cudaError_t LaunchPrepareSecondListing(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                                       const CandidateLists& lists, cudaStream_t stream) {
  auto* kernel = terms.IsGeneral() ? PrepareSecondListingKernel<true> : PrepareSecondListingKernel<false>;
  kernel<<<static_cast<unsigned>(Panels(in.padded_rows)), kPanelRows, 0, stream>>>(terms, in, rows, lists);
  return cudaGetLastError();
}

cudaError_t LaunchPrepareLastListing(const RowInputs& in, const FusedRows& rows, const CandidateLists& lists,
                                     cudaStream_t stream) {
  PrepareLastListingKernel<<<static_cast<unsigned>(Panels(in.padded_rows)), kPanelRows, 0, stream>>>(
      rows, lists, in.rows);
  return cudaGetLastError();
}

cudaError_t LaunchSelectListed(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                               const CandidateLists& lists, const RowSelection& selection,
                               cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  auto* kernel = terms.IsGeneral() ? SelectListedKernel<true> : SelectListedKernel<false>;
  kernel<<<static_cast<unsigned>(in.rows), kSelectThreads, 0, stream>>>(terms, in, rows, lists, selection);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda::hopper
