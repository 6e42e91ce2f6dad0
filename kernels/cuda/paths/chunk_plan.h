// SPDX-License-Identifier: Apache-2.0
// What the host decides about a chunk before it enqueues anything. ChunkPlan says which kernels compute the
// chunk, and why. ChunkLayout says where the rows of the chunk lie on the device.
//
// Pure functions; thread-safe. The header needs no CUDA.
#ifndef LOSSD_KERNELS_CUDA_PATHS_CHUNK_PLAN_H_
#define LOSSD_KERNELS_CUDA_PATHS_CHUNK_PLAN_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/launch_plan.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/decision.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// ---- which kernels compute a chunk ----

// Which kernels compute a chunk. A `why_...` member is empty if the faster choice is taken. Otherwise it is a
// text for people: the reason why the faster choice is not taken.
struct ChunkPlan {
  // With kFiltered and kAuto the device decides, after it has computed the logits, whether the gradients are
  // filtered or sampled, or exact.
  Gradients gradients = Gradients::kExact;
  // ds leaves out the uniform part of label smoothing. Gradients that are computed from a list of elements
  // (sampled, filtered) add this part in closed form (AddUniform).
  bool uniform_apart = false;
  // Filtered gradients are selected from the matrix of ds instead of the logits.
  bool filters_elements = false;
  bool distilled = false;  // the rows have a teacher
  // Only for distilled rows. "": the products that compute the logits also compute the softmaxes of student
  // and teacher (hopper::SoftmaxPass), so the logits are read only once.
  absl::string_view why_logits_twice;
  absl::string_view why_exact;      // "" unless `gradients` is kExact
  absl::string_view why_not_fused;  // "": the loss is computed in the epilogue of the logits product
  // "": this library's own product kernels (hopper/gradient_gemm.h) compute the gradients. Otherwise cuBLASLt
  // computes them.
  absl::string_view why_library_gemms;
  std::optional<NormPlan> norm;           // nullopt: the head has no norm
  std::optional<NormPlan> norm_gradient;  // nullopt: the head has no norm, or no gradient is wanted

  bool filtered() const { return gradients == Gradients::kFiltered; }
  bool sampled() const { return MaySample(gradients); }
  bool exact() const { return gradients == Gradients::kExact; }
  bool fused() const { return why_not_fused.empty(); }
  bool own_gemms() const { return why_library_gemms.empty(); }
};

// What PlanChunk needs to know of a chunk, apart from its options.
struct ChunkFacts {
  LossTerms terms;
  int64_t rows = 0;
  int64_t padded_rows = 0;
  bool wants_gradient = false;
  bool distilled = false;    // the rows have a teacher
  bool selects_top = false;  // some slice wants its most probable classes
};

// What PlanChunk needs to know of the head and the device.
struct PlanLimits {
  Logits logits = Logits::kStored;
  FilterShape filter;  // of the head; if the head is split, of the part with the most classes
  DeviceLimits device;
  FusedLoss fused_loss = FusedLoss::kWhereFaster;
  bool split = false;  // the head is split by vocabulary
};

// Plans everything but the norm. If the head recomputes logits, cuBLASLt computes the products, and the pass
// that computes the loss stores no logits.
ChunkPlan PlanChunk(const LossOptions& options, const ChunkFacts& chunk, const PlanLimits& limits);

// Describes the plan for people.
std::vector<Choice> Describe(const ChunkPlan& plan);

// ---- where the rows of a chunk go on the device ----

// For a chunk with gradients of embedding rows: the rows that are accumulated on this device, ordered by
// class. The rows of one class are a run. RowInputBlock::row_order(), run_begin() and run_rows() hold the
// runs. Long runs, with at least kLongClassRun rows, come first, in the order of their classes; then the
// short runs, in the same order.
struct ClassRuns {
  int64_t rows = 0;
  int64_t runs = 0;
  int64_t long_runs = 0;

  friend bool operator==(const ClassRuns&, const ClassRuns&) = default;
};
inline constexpr int32_t kLongClassRun = 32;

// How rows are laid out. "Raw" rows are all rows of the chunk. Rows without a target are left out on the
// device; the rows that stay, in the same order, are the "compact" rows. The factors of each row's gradient
// (coef_loss, coef_lse, coef_entropy) are divided by a common power of two, the gradient unit. So gradients
// in 16-bit storage neither underflow nor overflow, however small or large the scale of the loss is.

// The per-row inputs of the kernels. They lie in one block of memory, so that one copy brings them to the
// device. The offsets in the block are the same on host and device.
struct RowInputBlock {
  int32_t* compact_of_raw = nullptr;   // [capacity]: -1 for rows without target
  int32_t* raw_of_compact = nullptr;   // [capacity]
  int32_t* gradient_of_raw = nullptr;  // [capacity]: like compact_of_raw, but also -1 for absent rows
  // [capacity] each, indexed by compact row.
  int32_t* target = nullptr;
  int32_t* accumulate = nullptr;
  // 1: the row is accumulated, or its dx is wanted. 0: other rows, stand-in rows (Slice::stands_in), and
  // absent rows.
  int32_t* with_gradient = nullptr;
  RowCheck* checks = nullptr;
  float* weight = nullptr;
  float* coef_loss = nullptr;     // grad_scale * grad_loss * row weight / unit
  float* coef_lse = nullptr;      // grad_lse / unit
  float* coef_entropy = nullptr;  // GradEntropyOf() / unit
  // The inputs of the objective, 0 if it does not need them; filled only if there is an objective.
  float* advantages = nullptr;
  float* old_logprobs = nullptr;
  float* ref_logprobs = nullptr;
  float* target_total = nullptr;  // SoftRow::total; the next member is SoftRow::rest; only with soft targets
  float* target_rest = nullptr;
  float* omega = nullptr;          // SampleOf(); only if the chunk may be sampled
  int32_t* slice_begin = nullptr;  // [capacity + 1]: first compact row of each slice with compact rows

  // The runs of a chunk with gradients of embedding rows (ClassRuns), [capacity] each. row_order(): the
  // compact rows in the order of their classes. run_begin() and run_rows(): where each run begins in
  // row_order(), and how many rows it has. These arrays take the memory of target_total, target_rest and
  // omega.
  int32_t* row_order() const { return reinterpret_cast<int32_t*>(target_total); }
  int32_t* run_begin() const { return reinterpret_cast<int32_t*>(target_rest); }
  int32_t* run_rows() const { return reinterpret_cast<int32_t*>(omega); }

  static RowInputBlock Carve(Carver& carver, int64_t capacity);
};

// The results of the compact rows, and the decisions about the whole chunk. Arrays of one element lie before
// the others, so their places do not depend on the capacity.
struct RowOutputBlock {
  float* loss = nullptr;
  float* z_loss = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
  float* target_logprob = nullptr;
  int32_t* argmax = nullptr;
  float* dropped_mass = nullptr;      // only if the chunk may be filtered
  float* variance = nullptr;          // divided by unit squared; only if the chunk may be sampled
  float* square = nullptr;            // divided by unit squared; only if the chunk may be sampled
  float* divergence = nullptr;        // before its weight; only with a teacher
  float* sample_threshold = nullptr;  // [1]
  // [slices with compact rows]: the first compact row that is not finite, or -1.
  int32_t* first_bad = nullptr;
  // [1]: not 0 if rows of a slice that must fail have already been added to the accumulators.
  int32_t* lost = nullptr;
  Decision* decision = nullptr;  // [1]; only if the chunk may be filtered or sampled

  static RowOutputBlock Carve(Carver& carver, int64_t capacity);
};

// For slices that want results of single classes: inputs and results of the compact rows. They lie in pinned
// host memory, which kernels read and write.
struct RowClassBlock {
  // [rows, ChunkLayout::class_count], with room for kMostGivenClasses a row: the classes. Their logits later
  // take the same memory (class_logits()).
  int32_t* classes = nullptr;
  // [rows, ChunkLayout::top_k], with room for kMostTopClasses a row.
  float* top_logits = nullptr;
  int32_t* top_places = nullptr;

  // The soft targets of the rows: [rows, ChunkLayout::target_count] each, with room for kMostSoftTargets a
  // row. A chunk with soft targets has neither given nor top classes, so the soft targets take their memory.
  int32_t* target_classes() const { return classes; }
  float* target_weights() const { return top_logits; }
  float* target_logits = nullptr;  // [rows, target_count]: SoftRowInputs::logits
  NamedRow* named = nullptr;       // [rows], with soft targets
  float* target_dots = nullptr;    // [rows], if no path claims Region::kTargetDots

  static RowClassBlock Carve(Carver& carver, int64_t capacity);
  float* class_logits() const { return reinterpret_cast<float*>(classes); }
};

// Bytes of a block. Input and output blocks exist both on the device and in pinned host memory; class blocks
// exist only in pinned host memory.
int64_t InputBlockBytes(int64_t capacity);
int64_t OutputBlockBytes(int64_t capacity);
int64_t ClassBlockBytes(int64_t capacity);

// Where the rows of one slice are in a chunk.
struct SliceLayout {
  Slice* slice = nullptr;
  int64_t raw_begin = 0;      // first raw row in the chunk
  int64_t compact_begin = 0;  // first compact row in the chunk
  int64_t compact_rows = 0;
  int64_t absent_rows = 0;    // rows of the slice that are absent (kernels/backend.h)
  int64_t device_index = -1;  // index among the slices with compact rows; -1: none
};

// Where the rows of a chunk are, and what its slices want.
struct ChunkLayout {
  std::vector<SliceLayout> slices;
  int64_t raw_rows = 0;
  int64_t compact_rows = 0;
  int64_t absent_rows = 0;
  int64_t padded_rows = 0;  // rows of the GEMMs: PadRows(compact_rows)
  int64_t device_slices = 0;
  bool want_hidden_gradient = false;
  bool accumulate = false;     // some row is accumulated
  bool accumulate_all = true;  // every row is accumulated or absent
  bool want_entropy = false;
  bool any_coef_entropy = false;
  // Slice::class_count and Slice::top_k (kernels/backend.h): the largest value of any slice. The rows of all
  // slices have room for so many classes.
  int32_t class_count = 0;
  int32_t top_k = 0;
  int32_t target_count = 0;  // soft targets of a row
  float unit = 1.0f;         // the power of two taken out of coef_*
  // Set by the head. If it is not kExact, the results include a decision, and also the dropped masses
  // (kFiltered) or the variances (kSampled, kAuto).
  Gradients planned = Gradients::kExact;
  ClassRuns runs;  // set by the head, for gradients of embedding rows
};

// What LayOutChunk needs to know of the head.
struct LayoutHead {
  HeadConfig config;
  DType compute_dtype = DType::kBFloat16;
  int64_t chunk_rows = 0;             // the most rows of a chunk
  float largest_class_weight = 1.0f;  // by magnitude; 1 if the chunk uses no class weights
  int64_t first_class = 0;            // targets are counted from this class
};

// Lays out a valid chunk (kernels/validation.h) and fills `inputs`, which is host memory whose capacity is at
// least the number of the chunk's rows.
ChunkLayout LayOutChunk(const LayoutHead& head, const Chunk& chunk, const RowInputBlock& inputs);

// Writes the classes whose logits slices want, if layout.class_count is not 0.
void PlaceClasses(const ChunkLayout& layout, const RowInputBlock& inputs, const RowClassBlock& classes);

// Writes the soft targets of the rows, if layout.target_count is not 0. LayOutChunk has filled `inputs`.
void PlaceSoftTargets(const ChunkLayout& layout, Rest rest, const RowInputBlock& inputs,
                      const RowClassBlock& classes);

// Orders the rows that are accumulated and whose target is one of the first `classes` classes here: by class,
// then by row. Writes the order to `inputs`, which LayOutChunk has filled.
ClassRuns OrderByClass(const ChunkLayout& layout, int64_t classes, const RowInputBlock& inputs);

// Copies the device's results to the chunk (the decision about its gradients) and to its slices (row outputs,
// sums, first_nonfinite_row). It does not copy hidden gradients.
void UnpackResults(Chunk& chunk, const ChunkLayout& layout, const RowInputBlock& inputs,
                   const RowOutputBlock& outputs, const RowClassBlock& classes = {});

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_CHUNK_PLAN_H_
