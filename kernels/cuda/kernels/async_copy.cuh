// SPDX-License-Identifier: Apache-2.0
// Copies from device to shared memory that a thread starts and waits for later.
//
// The copies a thread has started since its last CommitCopies() are one batch; batches end in order. A thread
// sees what it has copied itself after waiting; the others after a barrier that follows the wait.
//
// The file is shorter than 60 lines because kernels that have nothing else in common include it:
// norm_rows.cuh and row_part.cuh.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ASYNC_COPY_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_ASYNC_COPY_CUH_

#include <cstdint>

namespace lossd::kernels::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes, aligned to 16, past L1.
__device__ __forceinline__ void CopyAsync16(uint32_t to_shared, const void* from_global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from_global) : "memory");
}

// 4 bytes, aligned to 4.
__device__ __forceinline__ void CopyAsync4(uint32_t to_shared, const void* from_global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to_shared), "l"(from_global) : "memory");
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` (0 to 3) of the thread's batches are under way.
__device__ __forceinline__ void AwaitCopies(int pending) {
  switch (pending) {
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      return;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      return;
    case 3:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      return;
    default:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}

// Waits for all copies of the thread, committed or not.
__device__ __forceinline__ void AwaitAllCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ASYNC_COPY_CUH_
