// SPDX-License-Identifier: Apache-2.0
// Keeps the clusters of a persistent grid within a few stages of each other, so that what one of them brings
// to L2 is still there, or on its way, when others ask for it.
//
// Only time depends on it: a cluster that has waited long goes on alone.
//
// The file is shorter than 60 lines because it is one protocol between clusters, apart from the arithmetic of
// gradient_gemm.cu, which uses it.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PACE_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PACE_CUH_

#include <cstdint>
#include <cuda/atomic>

namespace lossd::kernels::cuda::hopper {

inline constexpr int kPaceStages = 8;  // of an epoch: no cluster is two of them ahead of another
inline constexpr int kPaceCounters = 4;
inline constexpr int kPaceCounterWords = 32;  // a line each
inline constexpr int kPaceWords = kPaceCounters * kPaceCounterWords;

// One thread of a cluster.
class Pace {
 public:
  // begun: [kPaceWords], 0 when the kernel starts.
  __device__ __forceinline__ Pace(uint32_t* begun, int clusters)
      : begun_(begun), clusters_(static_cast<uint32_t>(clusters)) {}

  // Before stage `i` of a unit, if all clusters have one with as many stages.
  __device__ __forceinline__ void Keep(int i) {
    if (i % kPaceStages != 0) return;
    if (epoch_ > 0 && patient_) Await(epoch_ - 1);
    Counter(epoch_).fetch_add(1, ::cuda::memory_order_relaxed);
    ++epoch_;
  }

 private:
  static constexpr int kTries = 256;  // of about a microsecond

  __device__ __forceinline__ ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device> Counter(
      uint32_t epoch) const {
    return ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device>(
        begun_[epoch % kPaceCounters * kPaceCounterWords]);
  }
  // Until all clusters have begun `epoch`.
  __device__ __forceinline__ void Await(uint32_t epoch) {
    const uint32_t all = clusters_ * (epoch / kPaceCounters + 1);
    for (int i = 0; i < kTries; ++i) {
      if (static_cast<int32_t>(Counter(epoch).load(::cuda::memory_order_relaxed) - all) >= 0) return;
    }
    patient_ = false;
  }

  uint32_t* const begun_;
  const uint32_t clusters_;
  uint32_t epoch_ = 0;
  bool patient_ = true;
};

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PACE_CUH_
