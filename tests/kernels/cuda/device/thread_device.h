// SPDX-License-Identifier: Apache-2.0
// The GPU that each thread chose last. The linker sends calls of cudaSetDevice to host_collectives_test.cc,
// which writes it down; nccl_test.cc answers cudaGetDevice with it, also where there is no GPU.
#ifndef LOSSD_TESTS_KERNELS_CUDA_DEVICE_THREAD_DEVICE_H_
#define LOSSD_TESTS_KERNELS_CUDA_DEVICE_THREAD_DEVICE_H_

namespace lossd::kernels::cuda::testing {

inline thread_local int device_of_thread = 0;

}  // namespace lossd::kernels::cuda::testing

#endif  // LOSSD_TESTS_KERNELS_CUDA_DEVICE_THREAD_DEVICE_H_
