// SPDX-License-Identifier: Apache-2.0
// CpuHead is one head on the CPU. It implements HeadKernels with every product in fp32. It is synchronous:
// Submit calls back on the calling thread, and returns when the chunk is done. CpuHead::ComputeResults calls
// the steps of a chunk in order. The parts of a head come before it in this file: its buffers (HeadBuffers),
// the parameters (CpuParams), the norm before the classifier (NormForward), and the guard against rows that
// are not finite (RowGuard).
#ifndef LOSSD_KERNELS_CPU_CPU_HEAD_H_
#define LOSSD_KERNELS_CPU_CPU_HEAD_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_teacher_pool.h"
#include "kernels/cpu/row_loss.h"
#include "kernels/cpu/threads_and_memory.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"
#include "kernels/validation.h"

namespace lossd::kernels {

// The memory of a head. HeadBuffers has all arrays of a head on the CPU, laid out in one arena per memory
// kind. RowOrder is the order in which the head gathers the rows of a chunk. The functions after it read and
// write the rows of a chunk's slices in host memory.
//
// Functions are stateless, and thread-safe on different rows.

inline constexpr int64_t kMostChunkRows = 4096;  // more rows would not be faster

// The slice and the row in it that a gathered row came from.
struct RowSource {
  int64_t slice;
  int64_t row;
};

// Pointers into the arenas. R = chunk rows, D = hidden size, C = classes that the replica computes. A tensor
// that the head does not have is null. A tensor begins with the first row that the replica keeps
// (StoredRowsOf).
struct HeadBuffers {
  static constexpr size_t kParams = 5;
  static constexpr size_t kRoles = 4;

  float*& tensor(TensorId id) { return tensors[static_cast<size_t>(id.param)][static_cast<size_t>(id.role)]; }
  float* tensor(TensorId id) const {
    return tensors[static_cast<size_t>(id.param)][static_cast<size_t>(id.role)];
  }
  float* value(Param param) const { return tensor({param, Role::kValue}); }
  float* gradient(Param param) const { return tensor({param, Role::kGradient}); }

  std::array<std::array<float*, kRoles>, kParams> tensors{};

  float* hidden = nullptr;  // [R, D], after the norm
  // [R, D], after the norm but before gain and shift; only with a norm.
  float* unit = nullptr;
  float* inverse_deviation = nullptr;  // [R]; only with a norm
  float* grad_hidden = nullptr;        // [R, D]
  float* logits = nullptr;             // [R, C], later their gradient
  RowSource* sources = nullptr;        // [R]
  RowResult* results = nullptr;        // [R]
  // Only for a head that is split by vocabulary:
  RowStatistics* statistics = nullptr;  // [R], over the replica's classes
  RowStatistics* merged = nullptr;      // [R], over all classes
  GradientSums* gradients = nullptr;    // [R], over the replica's classes
  TaughtRow* taught = nullptr;          // [R], rows with a teacher, over the replica's classes
  TaughtRow* merged_taught = nullptr;   // [R], rows with a teacher, over all classes
  // [ClassEntries(R)], the replica's first classes of some rows at a time.
  RankedClass* ranked = nullptr;
  // [ClassEntries(R)], the logits of given classes of some rows at a time; 0 if another replica has the
  // class.
  float* class_logits = nullptr;
  // [2 R], first of this part and then of all parts: not 0 for a row whose dx is not finite.
  float* bad_rows = nullptr;
  float* norm_sums = nullptr;  // [2 D]; only with a norm
};

// How many entries for single classes the parts of a head exchange at a time. It is at least the entries of
// one row.
constexpr int64_t ClassEntries(int64_t chunk_rows) {
  return std::max<int64_t>(kMostTopClasses, kMostGivenClasses) + 2 * chunk_rows;
}

// The arenas of a head, indexed by MemoryKind.
using HeadArenas = std::array<Arena, kMemoryKinds>;

// Takes all arrays of a head from the arenas, for chunks of `chunk_rows` rows.
HeadBuffers LayOut(const HeadConfig& config, Replica replica, int64_t chunk_rows, HeadArenas& arenas);
// The bytes that LayOut takes, by kind.
MemoryBytes PlanBuffers(const HeadConfig& config, Replica replica, int64_t chunk_rows);
// Allocates zeroed arenas of these sizes.
absl::StatusOr<HeadArenas> AllocateArenas(const MemoryBytes& plan);

// The most rows of a chunk for which the workspace fits into `workspace_bytes`, but at most kMostChunkRows.
// It is the same for all replicas. RESOURCE_EXHAUSTED naming the bytes if one row does not fit.
absl::StatusOr<int64_t> ChunkRowsFor(const HeadConfig& config, int replicas, int64_t workspace_bytes);

// The order in which the rows of a chunk are gathered. It makes every later step work on a contiguous range
// of rows. Rows without a target are left out. The others come in four groups: accumulated only, accumulated
// with grad_hidden, grad_hidden only, neither. Within a group the rows are in the order of the slices.
struct RowOrder {
  int64_t rows = 0;          // the number of gathered rows
  int64_t accumulated = 0;   // rows [0, accumulated) are accumulated
  int64_t hidden_begin = 0;  // rows [hidden_begin, hidden_end) have grad_hidden
  int64_t hidden_end = 0;
  // Rows [0, with_gradient()) need the gradient of their logits.
  int64_t with_gradient() const { return hidden_end; }
};

// Writes sources[0 .. rows). `accumulate`: Chunk::accumulate_gradients.
RowOrder OrderRows(absl::Span<const Slice> slices, bool accumulate, RowSource* sources);

// The retained rows of a slice that has a retained_offset.
inline uint8_t* RetainedRows(const Chunk& chunk, const Slice& slice) {
  return static_cast<CpuRetained*>(chunk.retained)->data() + slice.retained_offset;
}

inline const uint8_t* HiddenRow(const Chunk& chunk, const Slice& slice, int64_t row, int64_t d) {
  const void* const rows = slice.hidden != nullptr ? slice.hidden : RetainedRows(chunk, slice);
  return static_cast<const uint8_t*>(rows) + SizeOf(row * d, chunk.hidden_dtype);
}

// Copies the hidden states of slices that ask for it to the retained memory.
inline void Retain(const Chunk& chunk, int64_t d) {
  for (const Slice& slice : chunk.slices) {
    if (slice.retained_offset < 0 || slice.hidden == nullptr) continue;
    std::memcpy(RetainedRows(chunk, slice), slice.hidden, SizeOf(slice.rows * d, chunk.hidden_dtype));
  }
}

inline uint8_t* GradHiddenRow(const Slice& slice, int64_t row, int64_t d, DType dtype) {
  return static_cast<uint8_t*>(slice.grad_hidden) + SizeOf(row * d, dtype);
}

template <typename T>
inline void Store(T* values, int64_t row, T value) {
  if (values != nullptr) values[row] = value;
}

inline void StoreRow(const RowOutputs& out, int64_t row, const RowResult& result) {
  Store(out.loss, row, static_cast<float>(result.loss));
  Store(out.lse, row, static_cast<float>(result.lse));
  Store(out.entropy, row, static_cast<float>(result.entropy));
  Store(out.target_logprob, row, static_cast<float>(result.target_logprob));
  Store(out.argmax, row, result.argmax);
}

inline void AddToSums(const Objective& objective, const Slice& slice, int64_t row, const RowResult& result,
                      LossSums& sums) {
  sums.loss += result.loss;
  sums.z_loss += result.z_loss;
  if (slice.out.entropy != nullptr && std::isfinite(result.entropy)) sums.entropy += result.entropy;
  sums.valid_rows += 1;
  sums.correct_rows += result.argmax == slice.targets[row] ? 1 : 0;
  sums.dropped_mass += result.gradient.dropped_mass;
  sums.sampling_variance += result.gradient.sampling_variance;
  sums.squared_gradient += result.gradient.squared_gradient;
  sums.divergence += result.divergence;
  sums.target_loss += result.target_loss;
  if (objective.active() && !IsAbsent(slice, row)) sums.objective.Add(result.objective);
}

// CpuParams has the parameters of a head on the CPU, with their gradients and moments: it reads, writes and
// adds to them. UpdateParams is the optimizer's update of a parameter. kernels/head_config.h names the
// tensors and their shapes. A replica has the rows of StoredRowsOf(); access to other rows fails with
// NOT_FOUND or as out of range.

// The member functions have the contracts of the same functions of HeadKernels, including thread-safety. The
// pool, and the arenas that the buffers point into, outlive the object.
class CpuParams {
 public:
  CpuParams(const HeadConfig& config, Replica replica, ThreadPool* pool, const HeadBuffers& buffers)
      : config_(config), replica_(replica), pool_(pool), buffers_(buffers) {}

  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype, absl::Span<uint8_t> out);
  absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                           absl::Span<const uint8_t> in);
  absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                           absl::Span<const uint8_t> in);
  absl::StatusOr<double> GradNorm();
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update);
  absl::Status ZeroGradients();
  absl::Status ZeroMoments();

  // ---- For the replicas of a head ----
  const HeadConfig& config() const { return config_; }
  Replica replica() const { return replica_; }
  ThreadPool& pool() { return *pool_; }
  // The first row that the replica keeps of a tensor; null if the head has no such tensor.
  float* value(Param param) const { return buffers_.tensor({param, Role::kValue}); }
  float* gradient(Param param) const { return buffers_.tensor({param, Role::kGradient}); }

 private:
  ShardRows shard(Param param) const { return ShardRowsOf(config_, param, replica_); }
  float* RowOf(TensorId id, int64_t row) const;
  int64_t Elements(Param param) const;  // elements of the gradient that the replica keeps
  bool CountsInNorm(Param param) const;

  const HeadConfig config_;
  const Replica replica_;
  ThreadPool* const pool_;
  const HeadBuffers buffers_;
};

// A range of elements of one parameter; [n] each. Moments that the optimizer does not use may be null.
struct ParamRange {
  float* value = nullptr;
  float* gradient = nullptr;
  float* moment1 = nullptr;
  float* moment2 = nullptr;
  int64_t n = 0;
};

// Makes the optimizer's update number `update` (1-based) of a range, in fp32. One pass reads and writes
// value, moments and gradient once each. The gradient is zero afterwards. `is_vector`: the parameter is a
// bias or belongs to the norm. Stateless; thread-safe on disjoint ranges.
void UpdateParams(const OptimizerOptions& options, int64_t update, bool is_vector, const ParamRange& range);

// The norm before the classifier, one row at a time; fp32 values, double sums. NormForward and NormBackward
// are stateless and thread-safe.
//
// unit = (x - mean) / sqrt(variance + eps) (LayerNorm, biased variance) or x / sqrt(mean square + eps)
// (RMSNorm); y = unit * gain + shift.
struct NormParams {
  Norm norm = Norm::kNone;  // kLayerNorm or kRmsNorm here
  float epsilon = 0.0f;
  int64_t size = 0;              // D
  const float* gain = nullptr;   // [D]
  const float* shift = nullptr;  // [D], LayerNorm only
};

// unit [D] holds x on entry; writes unit and y [D]. Returns 1 / sqrt(... + eps).
float NormForward(const NormParams& params, float* unit, float* y);

// grad [D] holds dL/dy on entry and dL/dx on return.
void NormBackward(const NormParams& params, const float* unit, float inverse_deviation, float* grad);

// Keeps rows that are not finite out of the weight gradients of one head. The arguments of the constructor
// outlive the object. Thread-compatible.
class RowGuard {
 public:
  RowGuard(const HeadBuffers& buffers, int64_t hidden_size, int64_t classes, ThreadPool* pool)
      : buffers_(buffers), hidden_size_(hidden_size), classes_(classes), pool_(pool) {}

  // Sets first_nonfinite_row of each slice to its first row whose result is not finite, or -1. True if any
  // slice has such a row.
  bool FindFailedSlices(const Chunk& chunk, const RowOrder& order) const;
  // Finds these slices and sets all their rows to zero, so that they add exactly 0 to every sum over rows. (A
  // factor of 0 is not enough, because 0 * NaN is NaN.)
  void ClearFailedSlices(const Chunk& chunk, const RowOrder& order) const;
  // The same for rows whose gradient in grad_hidden is not finite, before it goes through a norm. `rows`: the
  // rows that have a gradient. `here`: the rows among them whose gradient this part has summed up; other
  // parts of a split head have the others, and all parts exchange their results.
  absl::Status CheckGradients(const Chunk& chunk, const RowOrder& order, RowRange rows, RowRange here,
                              int part, PartExchange& exchange) const;

 private:
  const HeadBuffers& buffers_;
  const int64_t hidden_size_;
  const int64_t classes_;
  ThreadPool* const pool_;
};

// A head that may live in host memory, and so be a member of the teacher pool.
class CpuPooledKernels : public HeadKernels {
 public:
  std::optional<PagingStats> paging() const override {
    if (pooled_ == nullptr) return std::nullopt;
    return pooled_->stats();
  }

 protected:
  explicit CpuPooledKernels(std::unique_ptr<CpuPooled> pooled) : pooled_(std::move(pooled)) {}

  const std::unique_ptr<CpuPooled> pooled_;  // null: the head lives on the device
};

// One head. Thread-safe as HeadKernels says. The pool, and the accounting behind the reservation, outlive it.
//
// All memory for computing chunks is allocated when the head is created, except for the packing buffers of
// OpenBLAS. A row also counts as not finite if a factor of its gradient (row weight, grad_loss, ...) is not
// finite, or if W x before a softcap is not. If the exchange of a split head fails, the chunk fails with the
// same error.
class CpuHead final : public CpuPooledKernels {
 public:
  // `config` is valid. `reservation` has the bytes of PlanBuffers(config, replica, chunk_rows). `pooled`: the
  // pool membership of a head that lives in host memory (MemoryKind::kHostValues); null for other heads.
  static absl::StatusOr<std::unique_ptr<CpuHead>> Create(const HeadConfig& config, Replica replica,
                                                         int64_t chunk_rows, ThreadPool* pool,
                                                         MemoryAccounting::Reservation reservation,
                                                         std::unique_ptr<CpuPooled> pooled);

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return DType::kFloat32; }
  int64_t chunk_rows() const override { return chunk_rows_; }
  MemoryBytes memory() const override { return reservation_.bytes(); }
  std::vector<Choice> Describe() const override;

  // Checks that the teacher is a head of the same backend with the same classes here. The teacher's workspace
  // holds its logits.
  absl::Status CheckTeacher(const HeadKernels& teacher) const override;
  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override;

  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                          absl::Span<uint8_t> out) override {
    return params_.ReadTensor(id, row_begin, rows, dtype, out);
  }
  absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                           absl::Span<const uint8_t> in) override {
    if (pooled_ != nullptr) pooled_->Invalidate();
    return params_.WriteTensor(id, row_begin, rows, dtype, in);
  }
  absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                           absl::Span<const uint8_t> in) override {
    return params_.AddGradient(param, row_begin, rows, dtype, scale, in);
  }
  absl::StatusOr<double> GradNorm() override { return params_.GradNorm(); }
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update) override {
    return params_.ApplyStep(options, update);
  }
  absl::Status ZeroGradients() override { return params_.ZeroGradients(); }
  absl::Status ZeroMoments() override { return params_.ZeroMoments(); }

  // For the code that connects replicas.
  CpuParams& params() { return params_; }
  // For a head that is split by vocabulary: sets the exchange with its other parts. Call before the first
  // chunk.
  void Join(std::shared_ptr<PartExchange> exchange) { exchange_ = std::move(exchange); }

 private:
  class Distiller;  // replaces ComputeRows for chunks with a teacher
  // Computes a chunk of an embedding (cpu_embedding.cc). The arguments outlive the object. Thread-compatible.
  class EmbeddingRows {
   public:
    EmbeddingRows(Chunk& chunk, const RowOrder& order, CpuHead* head)
        : chunk_(chunk), order_(order), head_(*head) {}

    absl::Status Compute();

   private:
    // For Embedding::kRows: delivers rows of the weight.
    absl::Status LookUp();
    // For Embedding::kGradients, in this order: reads and checks the gradients, makes the parts of a split
    // head agree which rows are finite, and adds the gradients to the weight gradient.
    absl::Status GatherGradients();
    absl::Status ShareVerdicts();
    void AddGradients();
    // The gathered row's class, relative to the first class here; -1 if another part has the class.
    int64_t OwnPlaceOf(int64_t gathered) const;

    Chunk& chunk_;
    const RowOrder& order_;
    CpuHead& head_;
  };

  CpuHead(const HeadConfig& config, Replica replica, int64_t chunk_rows, ThreadPool* pool,
          MemoryAccounting::Reservation reservation, HeadArenas arenas, const HeadBuffers& buffers,
          std::unique_ptr<CpuPooled> pooled);

  // Computes everything of a chunk except the weight gradient.
  absl::Status ComputeResults(Chunk& chunk, const RowOrder& order);
  // The steps of a chunk, in order.
  void Gather(const Chunk& chunk, const RowOrder& order);
  absl::Status ComputeChunk(Chunk& chunk, const RowOrder& order);
  absl::Status ComputeRows(const Chunk& chunk, const LossOptions& options, const RowOrder& order);
  // Returns the rows whose gradient this part delivers. Other parts of a split head may deliver other rows.
  absl::StatusOr<RowRange> ComputeGradHidden(const Chunk& chunk, const RowOrder& order);
  // For the rows `here`: adds dy to the gradients of the norm, and turns dy into dx if dx is wanted.
  absl::Status BackThroughNorm(const RowOrder& order, RowRange here);
  absl::Status AddNormGradients(RowRange rows);
  void ScatterResults(const Chunk& chunk, const RowOrder& order);
  void ScatterGradHidden(const Chunk& chunk, RowRange rows);
  void AccumulateWeight(const RowOrder& order);

  RowRequest RequestFor(const Chunk& chunk, const RowOrder& order, int64_t gathered) const;
  RowLossContext ContextFor(const LossOptions& options) const;
  const HeadConfig config_;
  const int part_;  // the index among the parts that divide the classes of one copy of the head
  const bool has_norm_;
  const bool is_split_;  // the head is split by vocabulary
  // This part delivers row results, and other results that are the same for all parts. The first part does.
  const bool reports_;
  const ShardRows classes_;  // the classes whose logits are computed here
  const int64_t chunk_rows_;
  ThreadPool* const pool_;
  const MemoryAccounting::Reservation reservation_;
  const HeadArenas arenas_;
  // For a pooled head, the values point to where the last chunk found them in the pool.
  HeadBuffers buffers_;
  CpuParams params_;
  const RowGuard guard_;
  std::shared_ptr<PartExchange> exchange_;
};

// The choices that CpuHead::Describe returns.
std::vector<Choice> DescribeCpuHead(const HeadConfig& config, int64_t chunk_rows, int64_t workspace_bytes,
                                    int threads);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_HEAD_H_
