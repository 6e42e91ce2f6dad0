// SPDX-License-Identifier: Apache-2.0
// device_of_thread: the GPU that each thread has chosen last. The linker redirects calls of cudaSetDevice to
// host_collectives_test.cc, which sets the variable; cudaGetDevice in nccl_test.cc returns it. This also
// works without a GPU.
#ifndef LOSSD_TESTS_KERNELS_CUDA_DEVICE_THREAD_DEVICE_H_
#define LOSSD_TESTS_KERNELS_CUDA_DEVICE_THREAD_DEVICE_H_

namespace lossd::kernels::cuda::testing {

inline thread_local int device_of_thread = 0;

}  // namespace lossd::kernels::cuda::testing

#endif  // LOSSD_TESTS_KERNELS_CUDA_DEVICE_THREAD_DEVICE_H_
