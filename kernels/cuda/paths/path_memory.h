// SPDX-License-Identifier: Apache-2.0
// The device memory that the ways of computing a head's chunks (chunk_path.h) work in. It is divided into
// regions. A path claims the bytes that it needs of each; a region is as large as the largest claim, because
// only one path works at a time. So what a region holds between two phases of a chunk is the path's own
// affair.
//
// Plain data; thread-compatible.
#ifndef LOSSD_KERNELS_CUDA_PATHS_PATH_MEMORY_H_
#define LOSSD_KERNELS_CUDA_PATHS_PATH_MEMORY_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace lossd::kernels::cuda {

enum class Region : uint8_t {
  kLogits,          // logits of a chunk, or of blocks of it with what belongs to them
  kHiddenGradient,  // dx, [chunk_rows, padded_hidden] HiddenGradientDType(), for the download or the norm; in
                    // MemoryKind::kSlots
  kTargetDots,      // [chunk_rows] float: each row's own logit, in fp32; the head fills it if it is claimed
  kColumnSums,      // the first stage of column sums
  kRules,           // [chunk_rows] GradientRule
  kRunningRows,     // [chunk_rows] RunningRow
  kFusedRows,       // hopper::FusedRows
  kFilter,          // the first group of FilterBuffers or of SampleBuffers
  kPopularity,      // HotClasses; kept from chunk to chunk
  kSplitRows,       // SplitRows, of a head that is split by vocabulary
};
inline constexpr size_t kRegions = 10;

// Bytes by region.
class PathClaims {
 public:
  void Claim(Region region, int64_t bytes) {
    int64_t& claimed = bytes_[static_cast<size_t>(region)];
    claimed = std::max(claimed, bytes);
  }
  int64_t operator[](Region region) const { return bytes_[static_cast<size_t>(region)]; }

 private:
  std::array<int64_t, kRegions> bytes_{};
};

// Where the regions are; null: not claimed.
struct PathMemory {
  std::array<uint8_t*, kRegions> regions{};

  uint8_t*& operator[](Region region) { return regions[static_cast<size_t>(region)]; }
  uint8_t* operator[](Region region) const { return regions[static_cast<size_t>(region)]; }
  template <typename T>
  T* At(Region region) const {
    return reinterpret_cast<T*>((*this)[region]);
  }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_PATH_MEMORY_H_
