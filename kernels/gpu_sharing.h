// SPDX-License-Identifier: Apache-2.0
// How the GPUs of this process are shared with other programs, in words.
#ifndef LOSSD_KERNELS_GPU_SHARING_H_
#define LOSSD_KERNELS_GPU_SHARING_H_

#include <string>

namespace lossd::kernels {

// "MPS, client priority 0 (normal)" under NVIDIA's Multi-Process Service, with the share of the
// multiprocessors if that is not all of them; else "time slices". Reads the environment.
std::string GpuSharing(bool mps);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GPU_SHARING_H_
