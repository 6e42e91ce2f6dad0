// SPDX-License-Identifier: Apache-2.0
// The sizes of a head on the device, which everything else follows from (HeadSizes), and the device memory
// that the ways of computing a head's chunks (chunk_path.h) work in: its regions (Region), what a path claims
// of them (PathClaims; path_memory.h says what), and where the regions lie (PathMemory).
//
// Plain data and pure functions; thread-compatible. The header needs no CUDA.
//
// Matrices are padded to multiples of 8 rows and columns; the padding is zero and stays zero, so GEMMs may
// run over it. A part of a head that is split may have no classes: all of its 8 are padding, which kernels
// take as they take other padding. It adds nothing to sums over classes and to gradients, and exchanges what
// the other parts exchange.
#ifndef LOSSD_KERNELS_CUDA_PATHS_HEAD_SIZES_H_
#define LOSSD_KERNELS_CUDA_PATHS_HEAD_SIZES_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

struct HeadSizes {
  int64_t hidden = 0;         // D
  int64_t vocab = 0;          // classes here: V, but for those elsewhere; of a head that is split it may be 0
  int64_t padded_hidden = 0;  // columns of weight, hidden rows and their gradients
  int64_t padded_vocab = 0;   // rows of weight, columns of logits; at least 8
  int64_t element = 2;        // bytes of the compute dtype
  int64_t chunk_rows = 0;     // a multiple of 8; a fixed point of PadRows
  int64_t transfer_bytes = 0;  // of each buffer for rows and tensors on their way
  bool fused = false;          // the loss of a chunk may be fused (hopper/fused_loss.h)
  int64_t arena_bytes = 0;     // of a head that recomputes logits, for its blocks; 0: another head
  // Of a head that is split by vocabulary. All but `part` and the sizes of its own classes are the same for
  // all parts.
  int part = 0;
  int parts = 1;             // 1: the head is not split
  int64_t first_class = 0;   // of those here
  int64_t all_classes = 0;   // V
  int64_t most_classes = 0;  // of any part
  int64_t most_padded_vocab = 0;

  bool is_split() const { return parts > 1; }
  // What rows and blocks are planned with, so that all parts have the same: at least padded_vocab.
  int64_t planned_vocab() const { return std::max(padded_vocab, most_padded_vocab); }
  // Of Region::kHiddenGradient; parts of the rows are of the same size.
  int64_t hidden_gradient_rows() const { return is_split() ? chunk_rows + parts : chunk_rows; }
};

// Rows rounded up to what the GEMMs like; few distinct values, so that few algorithms are chosen.
constexpr int64_t PadRows(int64_t rows) { return rows <= 128 ? RoundUp(rows, 8) : RoundUp(rows, 128); }

// What dx is kept in until it has been converted for the client: fp16 has too narrow a range for that, and
// sums over devices are formed in fp32.
constexpr DType HiddenGradientDType(const HeadSizes& sizes, DType compute) {
  return compute == DType::kFloat16 || sizes.is_split() ? DType::kFloat32 : compute;
}

// The regions of the memory of paths. A path claims the bytes that it needs of each region; a region is as
// large as the largest claim, because only one path works at a time. What a region holds between two phases
// of a chunk is the path's own affair.
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
  kTopClasses,      // TopScratch, of a head that is split by vocabulary
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

#endif  // LOSSD_KERNELS_CUDA_PATHS_HEAD_SIZES_H_
