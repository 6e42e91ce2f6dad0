// SPDX-License-Identifier: Apache-2.0
// One head on the CPU (CpuHead): HeadKernels with every product in fp32. It is synchronous: Submit returns
// when the chunk is done, and calls back on the calling thread. CpuHead::ComputeResults calls the steps of a
// chunk in their order. Before it stand its parts: the buffers of a chunk, the norm before the classifier
// (NormForward), the guard of rows that are not finite (RowGuard), and the parameters (CpuParams).
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
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/row_loss.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"
#include "kernels/validation.h"

namespace lossd::kernels {

// Everything a head on the CPU keeps in memory, laid out in one arena per memory kind (HeadBuffers); the
// order in which it gathers the rows of a chunk (RowOrder); and the rows of a chunk's slices in host memory,
// as the head reads and writes them.
//
// Functions are stateless, and thread-safe on different rows.

inline constexpr int64_t kMostChunkRows = 4096;

// Where a gathered row came from.
struct RowSource {
  int64_t slice;
  int64_t row;
};

// Pointers into the arenas; R = chunk rows. A tensor that the head does not have is null. Tensors begin with
// the first row that the replica keeps (StoredRowsOf). C are the classes that it computes.
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

  float* hidden = nullptr;             // [R, D], after the norm
  float* unit = nullptr;               // [R, D], after the norm but for gain and shift; only with a norm
  float* inverse_deviation = nullptr;  // [R]; only with a norm
  float* grad_hidden = nullptr;        // [R, D]
  float* logits = nullptr;             // [R, C], then their gradient
  RowSource* sources = nullptr;        // [R]
  RowResult* results = nullptr;        // [R]
  // Only of a head that is split by vocabulary:
  RowStatistics* statistics = nullptr;  // [R], of the replica's classes
  RowStatistics* merged = nullptr;      // [R], of all classes
  GradientSums* gradients = nullptr;    // [R], of the replica's classes
  TaughtRow* taught = nullptr;          // [R], of rows with a teacher, of the replica's classes
  TaughtRow* merged_taught = nullptr;   // [R], likewise, of all classes
  RankedClass* ranked = nullptr;        // [ClassEntries(R)], of the replica's classes, of some rows at a time
  float* class_logits = nullptr;        // [ClassEntries(R)], likewise; 0 of classes elsewhere
  float* bad_rows = nullptr;            // [2 R], of this part and of all: not 0 where dx is not finite
  float* norm_sums = nullptr;           // [2 D]; only with a norm
};

// Entries of single classes that the parts of a head exchange at a time: at least those of one row.
constexpr int64_t ClassEntries(int64_t chunk_rows) {
  return std::max<int64_t>(kMostTopClasses, kMostGivenClasses) + 2 * chunk_rows;
}

// Arenas of a head, indexed by MemoryKind.
using HeadArenas = std::array<Arena, kMemoryKinds>;

// Takes all arrays of a head with `chunk_rows` rows a chunk.
HeadBuffers LayOut(const HeadConfig& config, Replica replica, int64_t chunk_rows, HeadArenas& arenas);
// The bytes LayOut takes, by kind.
MemoryBytes PlanBuffers(const HeadConfig& config, Replica replica, int64_t chunk_rows);
// Zeroed arenas for such a plan.
absl::StatusOr<HeadArenas> AllocateArenas(const MemoryBytes& plan);

// The most rows a chunk may have so that the workspace stays within `workspace_bytes`, at most
// kMostChunkRows; the same for all replicas. RESOURCE_EXHAUSTED naming the bytes if one row does not fit.
absl::StatusOr<int64_t> ChunkRowsFor(const HeadConfig& config, int replicas, int64_t workspace_bytes);

// In which order the rows of a chunk are gathered, so that every later step works on a contiguous range.
// Gathered rows come in four groups: accumulated only, accumulated with grad_hidden, grad_hidden only,
// neither. Rows without target are left out. Within a group the order is that of the slices.
struct RowOrder {
  int64_t rows = 0;          // all gathered rows
  int64_t accumulated = 0;   // [0, accumulated) reach the accumulators
  int64_t hidden_begin = 0;  // [hidden_begin, hidden_end) have grad_hidden
  int64_t hidden_end = 0;
  // [0, with_gradient()) need the gradient of their logits.
  int64_t with_gradient() const { return hidden_end; }
};

// Writes sources[0 .. rows). `accumulate`: Chunk::accumulate_gradients.
RowOrder OrderRows(absl::Span<const Slice> slices, bool accumulate, RowSource* sources);

// Where the retained rows of a slice lie; the slice has a retained_offset.
inline uint8_t* RetainedRows(const Chunk& chunk, const Slice& slice) {
  return static_cast<CpuRetained*>(chunk.retained)->data() + slice.retained_offset;
}

inline const uint8_t* HiddenRow(const Chunk& chunk, const Slice& slice, int64_t row, int64_t d) {
  const void* const rows = slice.hidden != nullptr ? slice.hidden : RetainedRows(chunk, slice);
  return static_cast<const uint8_t*>(rows) + SizeOf(row * d, chunk.hidden_dtype);
}

// Keeps the hidden states of slices that ask for it.
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

// The parameters of a head on the CPU, with their gradients and moments: reads, writes and sums (CpuParams),
// and the update that the optimizer makes of a parameter (UpdateParams). kernels/head_config.h names the
// tensors and their dimensions. A replica has the rows that StoredRowsOf() says: others are NOT_FOUND, or
// rows out of range.

// The members have the contracts that HeadKernels states for them, thread-safety included. Borrows the pool
// and the arenas that the buffers point into.
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
  // All rows that the replica keeps; null if the head has no such tensor.
  float* value(Param param) const { return buffers_.tensor({param, Role::kValue}); }
  float* gradient(Param param) const { return buffers_.tensor({param, Role::kGradient}); }

 private:
  ShardRows shard(Param param) const { return ShardRowsOf(config_, param, replica_); }
  float* RowOf(TensorId id, int64_t row) const;
  int64_t Elements(Param param) const;  // of the gradient that the replica keeps
  bool CountsInNorm(Param param) const;

  const HeadConfig config_;
  const Replica replica_;
  ThreadPool* const pool_;
  const HeadBuffers buffers_;
};

// A range of one parameter; [n] each. Moments that the optimizer does not use may be null.
struct ParamRange {
  float* value = nullptr;
  float* gradient = nullptr;
  float* moment1 = nullptr;
  float* moment2 = nullptr;
  int64_t n = 0;
};

// The optimizer's update number `update` (1-based) in fp32, in one pass over the range: value, moments and
// gradient are each read and written once, and the gradient is zero afterwards. `is_vector`: a bias or norm
// parameter. Stateless; thread-safe on disjoint ranges.
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

// Keeps rows that are not finite out of the accumulators of one head. Borrows everything. Thread-compatible.
class RowGuard {
 public:
  RowGuard(const HeadBuffers& buffers, int64_t hidden_size, int64_t classes, ThreadPool* pool)
      : buffers_(buffers), hidden_size_(hidden_size), classes_(classes), pool_(pool) {}

  // Sets first_nonfinite_row of all slices: the first row whose result is not finite, or -1. True if a slice
  // has one.
  bool FindFailedSlices(const Chunk& chunk, const RowOrder& order) const;
  // Finds those slices and clears all their rows, so that they add exactly nothing to any sum over rows (a
  // factor 0 alone would not do: 0 * NaN is NaN).
  void ClearFailedSlices(const Chunk& chunk, const RowOrder& order) const;
  // The same for rows whose gradient in grad_hidden, before it goes through a norm, is not finite. `rows`
  // have one; here it is complete for those of them in `here`, on other parts of a head for the others.
  absl::Status CheckGradients(const Chunk& chunk, const RowOrder& order, RowRange rows, RowRange here,
                              int part, ClassExchange& exchange) const;

 private:
  const HeadBuffers& buffers_;
  const int64_t hidden_size_;
  const int64_t classes_;
  ThreadPool* const pool_;
};

// A head that may live in host memory: its membership in the pool.
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

// One head. Thread-safety as HeadKernels. Borrows the pool and the accounting behind the reservation.
//
// Memory on the path of a chunk is taken when the head is created; OpenBLAS keeps packing buffers of its own.
// A row also counts as not finite if a factor of its gradient (row weight, grad_loss, ...) is not, or if W x
// before a softcap is not. A chunk fails with what the exchange of a split head says.
class CpuHead final : public CpuPooledKernels {
 public:
  // `config` is valid; `reservation` holds PlanBuffers(config, replica, chunk_rows). `pooled`: of a head that
  // lives in host memory, with its MemoryKind::kHostValues; else null.
  static absl::StatusOr<std::unique_ptr<CpuHead>> Create(const HeadConfig& config, Replica replica,
                                                         int64_t chunk_rows, ThreadPool* pool,
                                                         MemoryAccounting::Reservation reservation,
                                                         std::unique_ptr<CpuPooled> pooled);

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return DType::kFloat32; }
  int64_t chunk_rows() const override { return chunk_rows_; }
  MemoryBytes memory() const override { return reservation_.bytes(); }
  std::vector<Choice> Describe() const override;

  // A teacher's workspace is used for its logits. Both heads have the same classes here.
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

  // For the replicas of a head.
  CpuParams& params() { return params_; }
  // For a head that is split by vocabulary, before its first chunk: what connects it with the other parts.
  void Join(std::shared_ptr<ClassExchange> exchange) { exchange_ = std::move(exchange); }

 private:
  class Distiller;  // computes the rows of chunks with a teacher in the place of ComputeRows
  // All that is computed of a chunk of an embedding (cpu_embedding.cc). Borrows everything.
  // Thread-compatible.
  class EmbeddingRows {
   public:
    EmbeddingRows(Chunk& chunk, const RowOrder& order, CpuHead* head)
        : chunk_(chunk), order_(order), head_(*head) {}

    absl::Status Compute();

   private:
    absl::Status LookUp();
    absl::Status GatherGradients();
    absl::Status ShareVerdicts();
    void AddGradients();
    // The gathered row's class among those that are here; -1: it is elsewhere.
    int64_t OwnPlaceOf(int64_t gathered) const;

    Chunk& chunk_;
    const RowOrder& order_;
    CpuHead& head_;
  };

  CpuHead(const HeadConfig& config, Replica replica, int64_t chunk_rows, ThreadPool* pool,
          MemoryAccounting::Reservation reservation, HeadArenas arenas, const HeadBuffers& buffers,
          std::unique_ptr<CpuPooled> pooled);

  // All of a chunk but the weight gradient.
  absl::Status ComputeResults(Chunk& chunk, const RowOrder& order);
  // The steps of a chunk, in order.
  void Gather(const Chunk& chunk, const RowOrder& order);
  absl::Status ComputeChunk(Chunk& chunk, const RowOrder& order);
  absl::Status ComputeRows(const Chunk& chunk, const LossOptions& options, const RowOrder& order);
  // Returns the rows whose gradient is delivered here; a head that is split may deliver others elsewhere.
  absl::StatusOr<RowRange> ComputeGradHidden(const Chunk& chunk, const RowOrder& order);
  // dy becomes dx for the rows `here` that want it, and has its part in the gradients of the norm.
  absl::Status BackThroughNorm(const RowOrder& order, RowRange here);
  absl::Status AddNormGradients(RowRange rows);
  void ScatterResults(const Chunk& chunk, const RowOrder& order);
  void ScatterGradHidden(const Chunk& chunk, RowRange rows);
  void AccumulateWeight(const RowOrder& order);

  RowRequest RequestFor(const Chunk& chunk, const RowOrder& order, int64_t gathered) const;
  RowLossContext ContextFor(const LossOptions& options) const;
  const HeadConfig config_;
  const int part_;  // of those that divide the classes of its copy of the head
  const bool has_norm_;
  const bool is_split_;      // by vocabulary
  const bool reports_;       // row results, and what is the same for all parts of a head: the first does
  const ShardRows classes_;  // whose logits are computed here
  const int64_t chunk_rows_;
  ThreadPool* const pool_;
  const MemoryAccounting::Reservation reservation_;
  const HeadArenas arenas_;
  HeadBuffers buffers_;  // of a pooled head with the values that the last chunk found
  CpuParams params_;
  const RowGuard guard_;
  std::shared_ptr<ClassExchange> exchange_;
};

// What a head on the CPU says of itself.
std::vector<Choice> DescribeCpuHead(const HeadConfig& config, int64_t chunk_rows, int64_t workspace_bytes,
                                    int threads);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_HEAD_H_
