// What a head keeps on the device and where in its buffers: one function lays out a buffer for counting
// (null base) and for use, so that a plan is what is allocated.
//
// Matrices are padded to multiples of 8 rows and columns; the padding is zero and stays zero, so GEMMs may
// run over it. Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_HEAD_MEMORY_H_
#define LOSSD_KERNELS_CUDA_HEAD_MEMORY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/chunk_layout.h"
#include "kernels/cuda/cut/cut_plan.h"
#include "kernels/cuda/cut/cut_rows.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/filtered/filter_plan.h"
#include "kernels/cuda/hopper/fused_rows.h"
#include "kernels/head_config.h"
#include "kernels/memory.h"

namespace lossd::kernels::cuda {

inline constexpr int kChunkSlots = 2;  // chunks of a head that may be in flight

// The sizes that everything else follows from.
struct HeadSizes {
  int64_t hidden = 0;         // D
  int64_t vocab = 0;          // V
  int64_t padded_hidden = 0;  // columns of weight, hidden rows and their gradients
  int64_t padded_vocab = 0;   // rows of weight, columns of logits
  int64_t element = 2;        // bytes of the compute dtype
  int64_t chunk_rows = 0;     // a multiple of 8; a fixed point of PadRows
  int64_t piece_bytes = 0;    // of each buffer for rows and tensors on their way
  bool fused = false;         // the loss of a chunk may be fused (hopper/fused_loss.h)
  int64_t arena_bytes = 0;    // of a head for Algorithm::kCut, for its blocks; 0: another head
};

// The largest chunk that keeps workspace and slots within workspace_bytes, at least 8 rows and at most
// max_chunk_rows rounded up; where losses are fused, a somewhat smaller one if that leaves less of the
// kernels' tiles empty. config.workspace_bytes goes before workspace_bytes. For Algorithm::kCut at most
// kCutChunkRows rows, and the blocks that keep the workspace alone within the limit, by default
// kCutWorkspaceBytes if that is less. fused: the device can compute fused losses, if the compute dtype is a
// 16-bit type.
HeadSizes SizesFor(const HeadConfig& config, int64_t workspace_bytes, int64_t max_chunk_rows,
                   int multiprocessors, bool fused);

// One role's tensors (value, gradient or a moment): all trained parameters one after the other.
struct ParamBlock {
  float* weight = nullptr;      // [padded_vocab, padded_hidden]
  float* bias = nullptr;        // [padded_vocab] or null, likewise below
  float* norm_gain = nullptr;   // [padded_hidden]
  float* norm_shift = nullptr;  // [padded_hidden]
  int64_t bytes = 0;

  static ParamBlock Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base);
  float* first() const { return weight; }
  int64_t floats() const { return bytes / static_cast<int64_t>(sizeof(float)); }
};

// What one chunk slot keeps on the device.
struct SlotMemory {
  void* hidden = nullptr;     // [chunk_rows, padded_hidden] compute dtype; shared by the slots of a norm head
  void* raw = nullptr;        // [chunk_rows, D] hidden dtype of the chunk; norm heads only
  uint8_t* inputs = nullptr;  // RowInputBlock
  uint8_t* outputs = nullptr;  // RowOutputBlock
};

// What chunks need on the device: MemoryKind::kSlots (slots and hidden_gradient) and kWorkspace.
struct Workspace {
  SlotMemory slots[kChunkSlots];
  void* hidden_gradient = nullptr;  // [chunk_rows, padded_hidden] HiddenGradientDType()
  void* logits = nullptr;           // [chunk_rows, padded_vocab] compute dtype; at least what `filter` takes
  // Algorithm::kCut only, instead of logits.
  uint8_t* arena = nullptr;           // [arena_bytes]: CutArena or CutFilterArena
  GradientRule* rules = nullptr;      // [chunk_rows]
  RunningRow* running = nullptr;      // [chunk_rows]
  float* target_dots = nullptr;       // [chunk_rows]; 16-bit compute or kCut only
  uint8_t* upload_piece = nullptr;    // [piece_bytes]
  uint8_t* download_piece = nullptr;  // [piece_bytes]
  int32_t* keep = nullptr;            // [chunk_rows]
  // [chunk_rows]; HeadSizes::fused only. Its partials share hidden_gradient; with kCut they lie in the arena.
  hopper::FusedRows fused;
  float* mean = nullptr;  // [chunk_rows], norm heads only, likewise below
  float* inverse_deviation = nullptr;
  float* partials = nullptr;      // first stage of column sums
  double* square_sums = nullptr;  // [kSquareSumPartials + 1]
  FilterBuffers filter;
  int64_t bytes = 0;
  int64_t slot_bytes = 0;

  // `slot_base`: of slot_bytes, the other: of bytes.
  static Workspace Carve(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors, uint8_t* base,
                         uint8_t* slot_base);
};

FilterShape FilterShapeOf(const HeadConfig& config, const HeadSizes& sizes);
CutShape CutShapeOf(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);

// INVALID_ARGUMENT if the head cannot do with config.workspace_bytes.
absl::Status CheckWorkspace(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);

// What dx is kept in until it has been converted for the client: fp16 has too narrow a range for that.
constexpr DType HiddenGradientDType(DType compute) {
  return compute == DType::kFloat16 ? DType::kFloat32 : compute;
}

// Bytes of the two blocks, on the device and pinned on the host.
int64_t InputBlockBytes(int64_t chunk_rows);
int64_t OutputBlockBytes(int64_t chunk_rows);

// Values, class weights and the 16-bit copy of the weight.
struct ValueBuffer {
  ParamBlock params;
  float* class_weights = nullptr;  // [padded_vocab] or null
  void* compute_weight = nullptr;  // [padded_vocab, padded_hidden] compute dtype; fp32: the weight itself
  int64_t bytes = 0;

  static ValueBuffer Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base);
};

// How many moments a head keeps a parameter.
int MomentCount(const HeadConfig& config);
// What a head takes, by kind, as allocated.
MemoryBytes PlanMemory(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEAD_MEMORY_H_
