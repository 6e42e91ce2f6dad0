// SPDX-License-Identifier: Apache-2.0
// HeadSizes: the sizes of a head on the device; all other sizes follow from them. The file also describes the
// device memory in which the paths of a head (chunk_path.h) work. This memory has regions (Region).
// PathClaims has the bytes that a path claims of each region (computed in path_memory.h), and PathMemory says
// where the regions lie.
//
// Plain data and pure functions; thread-compatible. The header needs no CUDA.
//
// Matrices are padded to multiples of 8 rows and columns. The padding is zero and stays zero, so GEMMs may
// run over it. A part of a split head may have no classes. Its weight then has 8 rows, all padding, which
// kernels treat like other padding. Such a part adds nothing to sums over classes and to gradients, but it
// takes part in all exchanges.
#ifndef LOSSD_KERNELS_CUDA_PATHS_HEAD_SIZES_H_
#define LOSSD_KERNELS_CUDA_PATHS_HEAD_SIZES_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// The sizes of a head on one device.
struct HeadSizes {
  int64_t hidden = 0;          // D
  int64_t vocab = 0;           // classes on this device: V, or fewer (even 0) if the head is split
  int64_t padded_hidden = 0;   // columns of weight, hidden rows and their gradients
  int64_t padded_vocab = 0;    // rows of weight, columns of logits; at least 8
  int64_t element = 2;         // bytes of the compute dtype
  int64_t chunk_rows = 0;      // a multiple of 8, with PadRows(chunk_rows) == chunk_rows
  int64_t transfer_bytes = 0;  // of each buffer in which rows and tensors are converted
  bool fused = false;          // the loss of a chunk may be fused (hopper/fused_loss.h)
  // The arena: the memory for blocks of a head that recomputes logits (RecomputedArena in path_memory.h). 0
  // for other heads.
  int64_t arena_bytes = 0;
  // For a head that is split by vocabulary. All parts have the same values, except `part`, first_class, vocab
  // and padded_vocab.
  int part = 0;
  int parts = 1;             // 1: the head is not split
  int64_t first_class = 0;   // the first class here
  int64_t all_classes = 0;   // V
  int64_t most_classes = 0;  // the classes of the part that has the most
  int64_t most_padded_vocab = 0;

  bool is_split() const { return parts > 1; }
  // The padded vocabulary from which rows and blocks are planned. It is the same for all parts, so all parts
  // make the same plan. At least padded_vocab.
  int64_t planned_vocab() const { return std::max(padded_vocab, most_padded_vocab); }
  // Rows of Region::kHiddenGradient: enough to divide the rows of a chunk into equal shares for all parts.
  int64_t hidden_gradient_rows() const { return is_split() ? chunk_rows + parts : chunk_rows; }
};

// Rows rounded up to a size that suits the GEMMs. There are few distinct sizes, so that few algorithms are
// chosen.
constexpr int64_t PadRows(int64_t rows) { return rows <= 128 ? RoundUp(rows, 8) : RoundUp(rows, 128); }

// The dtype of dx until it is converted for the client. It is fp32 if the compute dtype is fp16, whose range
// would be too narrow, and if the head is split, because dx is then a sum over devices.
constexpr DType HiddenGradientDType(const HeadSizes& sizes, DType compute) {
  return compute == DType::kFloat16 || sizes.is_split() ? DType::kFloat32 : compute;
}

// The regions of the memory of paths. A path claims the bytes that it needs of each region. Only one path
// works at a time, so a region is as large as the largest claim of any path. Each path decides what a region
// holds between two phases of a chunk.
enum class Region : uint8_t {
  kLogits,          // logits of a chunk; or the arena: logits and other buffers of one block
  kHiddenGradient,  // dx: [chunk_rows, padded_hidden] HiddenGradientDType(); part of MemoryKind::kSlots
  kTargetDots,      // [chunk_rows] float: each row's dot product with its target; filled by the head
  kColumnSums,      // partial sums of column sums
  kRules,           // [chunk_rows] GradientRule: what the gradient of a row needs besides its logits
  kRunningRows,     // [chunk_rows] RunningRow: statistics of a row over the classes computed so far
  kFusedRows,       // hopper::FusedRows: what the fused loss keeps of each row
  kFilter,          // the `own` group of FilterBuffers or SampleBuffers
  kPopularity,      // HotClasses; kept from one chunk to the next
  kSplitRows,       // SplitRows: records that parts exchange, if the head is split by vocabulary
  kTopClasses,      // TopScratch: lists that parts exchange, if the head is split by vocabulary
};
inline constexpr size_t kRegions = 11;

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

// Where the regions lie; null: not claimed.
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

#endif  // LOSSD_KERNELS_CUDA_PATHS_HEAD_SIZES_H_
