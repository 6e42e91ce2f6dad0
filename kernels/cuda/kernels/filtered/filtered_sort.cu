// SPDX-License-Identifier: Apache-2.0
// Brings the kept elements into the order in which the weight gradient adds them: by class, then by row.
// CUB's radix sort; keys are unique, so the result does not depend on the order in which they were listed.
// The file is shorter than 60 lines because it alone includes CUB, which takes long to compile.
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/kernels/filtered/filtered.h"

namespace lossd::kernels::cuda {

cudaError_t LaunchSortKept(SortParams& p, cudaStream_t stream) {
  cub::DoubleBuffer<uint64_t> keys(p.keys[0], p.keys[1]);
  cub::DoubleBuffer<float> coefs(p.coefs[0], p.coefs[1]);
  size_t bytes = 0;
  cudaError_t error =
      cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, coefs, p.count, 0, p.key_bits, stream);
  if (error != cudaSuccess) return error;
  if (bytes > SortScratchBytes(p.count)) return cudaErrorMemoryAllocation;
  error = cub::DeviceRadixSort::SortPairs(p.scratch, bytes, keys, coefs, p.count, 0, p.key_bits, stream);
  p.keys[0] = keys.Current();
  p.keys[1] = keys.Alternate();
  p.coefs[0] = coefs.Current();
  p.coefs[1] = coefs.Alternate();
  return error;
}

}  // namespace lossd::kernels::cuda
