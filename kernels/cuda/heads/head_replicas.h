// SPDX-License-Identifier: Apache-2.0
// Sums of the gradients and copies of the values of the replicas of one head on GPUs. This process has some
// or all of the replicas. Of a head that is split by vocabulary, they are the replicas of its parts.
#ifndef LOSSD_KERNELS_CUDA_HEADS_HEAD_REPLICAS_H_
#define LOSSD_KERNELS_CUDA_HEADS_HEAD_REPLICAS_H_

#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/collectives.h"
#include "kernels/cuda/heads/cuda_head.h"

namespace lossd::kernels::cuda {

// `heads`: of the GPUs of this process, in their order. They and what `collectives` rest on outlive the
// result.
std::unique_ptr<Replicas> MakeHeadReplicas(std::shared_ptr<Collectives> collectives,
                                           std::vector<CudaHead*> heads);

// The replicas of a head whose copies divide the classes: those of each place, which are of other GPUs.
std::unique_ptr<Replicas> MakePlacesReplicas(std::vector<std::unique_ptr<Replicas>> places);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_HEAD_REPLICAS_H_
