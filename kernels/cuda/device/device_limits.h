// SPDX-License-Identifier: Apache-2.0
// What kernel launches need to know of a device. Plain data. The file is shorter than 60 lines because plans
// read it in programs without CUDA.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_DEVICE_LIMITS_H_
#define LOSSD_KERNELS_CUDA_DEVICE_DEVICE_LIMITS_H_

#include "kernels/cuda/kernels/hopper/cluster_order.h"

namespace lossd::kernels::cuda {

struct DeviceLimits {
  int multiprocessors = 1;
  int shared_bytes_per_block = 48 << 10;  // most dynamic shared memory a block may ask for
  int shared_bytes_per_sm = 64 << 10;
  // Compute capability 9.0 or later: thread block clusters, kernels that start before the one they wait for
  // has ended.
  bool has_clusters = false;
  bool is_hopper = false;              // compute capability 9.0: kernels built for sm_90a run
  int fused_clusters = 0;              // of hopper/logit_pass.h that run at once; 0: it does not run here
  hopper::ClusterOrder cluster_order;  // of these
  bool has_branches = false;           // the driver runs DeviceBranch, or the host branches
  bool shared_by_mps = false;          // kernels of other processes may run beside ours
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_DEVICE_LIMITS_H_
