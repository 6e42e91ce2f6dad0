// SPDX-License-Identifier: Apache-2.0
// Kernels that merge the sums of rows over devices (split_rows.h). The first kind writes records of a row's
// sums over the classes of one device. The second kind computes the sums over the classes of all devices from
// these records. Grid: one thread a row.
//
// `sum` adds up 2^d over the classes, and `spread` adds up 2^d d, where d is the logit in units of log 2,
// minus a reference of the row. Merged sums are relative to the largest reference of the devices that have a
// sum. So sums with a smaller reference are scaled down, and no sum overflows. The new d is the old one plus
// `shift`, the difference of the references. A device without a sum (all its logits are -infinity) adds
// nothing. `weighted` has no exponentials (Stats in row_loss_math.cuh) and is added as it is.
//
// Bytes: 32 a row written, and 32 for each row and device read.
#include <cstdint>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"
#include "kernels/cuda/kernels/split_rows.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Turns a class number of this device into one of the vocabulary, and back.
__device__ __forceinline__ int32_t InVocabulary(int32_t arg, const LossTerms& terms) {
  return arg == INT32_MAX ? arg : arg + static_cast<int32_t>(terms.first_class);
}
__device__ __forceinline__ int32_t Here(int32_t arg, const LossTerms& terms) {
  return arg == INT32_MAX ? arg : arg - static_cast<int32_t>(terms.first_class);
}

// The sums of row `row` over the classes of all devices.
__device__ __forceinline__ RowRecord Merge(const RowRecord* all, int parts, int64_t rows, int64_t row) {
  RowRecord merged = all[row];
  merged.reference = NegativeInfinity();
  merged.max = NegativeInfinity();
  for (int part = 0; part < parts; ++part) {
    const RowRecord r = all[part * rows + row];
    merged.max = fmaxf(merged.max, r.max);
    if (r.sum != 0.0f) merged.reference = fmaxf(merged.reference, r.reference);
  }
  if (merged.reference == NegativeInfinity()) merged.reference = all[row].reference;  // no device has a sum
  merged.sum = merged.spread = merged.weighted = 0.0f;
  merged.arg = INT32_MAX;
  merged.has_target = 0;
  for (int part = 0; part < parts; ++part) {
    const RowRecord r = all[part * rows + row];
    if (r.max == merged.max) merged.arg = min(merged.arg, r.arg);
    if (r.has_target != 0) {
      merged.has_target = 1;
      merged.target = r.target;
    }
    merged.weighted += r.weighted;
    if (r.sum == 0.0f) continue;
    const float shift = r.reference == merged.reference ? 0.0f : r.reference - merged.reference;
    const float factor = Exp2(shift);
    merged.sum += factor * r.sum;
    merged.spread += factor * (r.spread + r.sum * shift);
  }
  return merged;
}

__global__ void RecordFusedKernel(const __grid_constant__ LossTerms terms,
                                  const __grid_constant__ RowInputs in,
                                  const __grid_constant__ hopper::FusedRows w, RowRecord* records) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= in.rows) return;
  const bool has_target = in.targets[row] >= 0;
  records[row] = {w.reference[row],
                  w.max[row],
                  w.sum[row],
                  w.spread[row],
                  0.0f,
                  InVocabulary(w.arg[row], terms),
                  has_target ? w.partials.target[row] : 0.0f,
                  has_target ? 1 : 0};
}

__global__ void MergeFusedKernel(const __grid_constant__ LossTerms terms,
                                 const __grid_constant__ RowInputs in, const RowRecord* all, int parts,
                                 const __grid_constant__ hopper::FusedRows w) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= in.rows) return;
  const RowRecord r = Merge(all, parts, in.rows, row);
  w.sum_reference[row] = r.reference;
  w.max[row] = r.max;
  w.sum[row] = r.sum;
  w.spread[row] = r.spread;
  w.arg[row] = Here(r.arg, terms);
  w.partials.target[row] = r.target;
}

// For rows in the general form (LogitForm in hopper/logit_pass.h), in which z log2(e) is the logit in units
// of log 2.
__global__ void RecordRunningKernel(const __grid_constant__ LossTerms terms,
                                    const __grid_constant__ RowInputs in, const RunningRow* rows,
                                    RowRecord* records) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= in.rows) return;
  const RunningRow r = rows[row];
  const bool has_target = in.targets[row] >= 0;
  records[row] = {Reference(r.max, kLog2E),
                  r.max,
                  r.sum,
                  r.spread,
                  r.weighted,
                  InVocabulary(r.arg, terms),
                  has_target ? r.stored_target : 0.0f,
                  has_target ? 1 : 0};
}

__global__ void MergeRunningKernel(const __grid_constant__ LossTerms terms,
                                   const __grid_constant__ RowInputs in, const RowRecord* all, int parts,
                                   RunningRow* rows) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= in.rows) return;
  const RowRecord r = Merge(all, parts, in.rows, row);
  rows[row] = {r.max, r.sum, r.spread, r.weighted, Here(r.arg, terms), r.target};
}

__global__ void AddPartsKernel(const float* all, int parts, int64_t n, float* to) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= n) return;
  float sum = 0.0f;
  for (int part = 0; part < parts; ++part) sum += all[part * n + i];
  to[i] = sum;
}

unsigned Blocks(int64_t rows) { return static_cast<unsigned>((rows + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t LaunchRecordRows(const LossTerms& terms, const RowInputs& in, const hopper::FusedRows& rows,
                             RowRecord* records, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  RecordFusedKernel<<<Blocks(in.rows), kThreads, 0, stream>>>(terms, in, rows, records);
  return cudaGetLastError();
}

cudaError_t LaunchMergeRows(const LossTerms& terms, const RowInputs& in, const RowRecord* all, int parts,
                            const hopper::FusedRows& rows, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  MergeFusedKernel<<<Blocks(in.rows), kThreads, 0, stream>>>(terms, in, all, parts, rows);
  return cudaGetLastError();
}

cudaError_t LaunchRecordRows(const LossTerms& terms, const RowInputs& in, const RunningRow* rows,
                             RowRecord* records, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  RecordRunningKernel<<<Blocks(in.rows), kThreads, 0, stream>>>(terms, in, rows, records);
  return cudaGetLastError();
}

cudaError_t LaunchMergeRows(const LossTerms& terms, const RowInputs& in, const RowRecord* all, int parts,
                            RunningRow* rows, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  MergeRunningKernel<<<Blocks(in.rows), kThreads, 0, stream>>>(terms, in, all, parts, rows);
  return cudaGetLastError();
}

cudaError_t LaunchAddParts(const float* all, int parts, int64_t n, float* to, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  AddPartsKernel<<<Blocks(n), kThreads, 0, stream>>>(all, parts, n, to);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(SplitRows)
