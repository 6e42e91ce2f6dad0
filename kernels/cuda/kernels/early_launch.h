// SPDX-License-Identifier: Apache-2.0
// A launch whose blocks may take their places while the kernel before it in the stream ends. The kernel waits
// for that one itself (AwaitKernelBefore in device_math.cuh). Plain data.
//
// The file is shorter than 60 lines because four sources of three folders include it.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_EARLY_LAUNCH_H_
#define LOSSD_KERNELS_CUDA_KERNELS_EARLY_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstddef>

namespace lossd::kernels::cuda {

class EarlyLaunch {
 public:
  // possible: the device can (compute capability 9.0 or later); else an ordinary launch.
  EarlyLaunch(dim3 grid, dim3 block, size_t shared_bytes, bool possible, cudaStream_t stream) {
    attributes_[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[0].val.programmaticStreamSerializationAllowed = 1;
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
    config_.numAttrs = possible ? 1 : 0;
  }
  EarlyLaunch(const EarlyLaunch&) = delete;  // config_ points into it
  EarlyLaunch& operator=(const EarlyLaunch&) = delete;

  // `blocks` that follow each other are a cluster.
  void SetCluster(unsigned blocks) {
    cudaLaunchAttribute& cluster = attributes_[config_.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {blocks, 1, 1};
  }

  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_EARLY_LAUNCH_H_
