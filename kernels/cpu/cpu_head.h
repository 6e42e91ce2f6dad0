// SPDX-License-Identifier: Apache-2.0
// One head on the CPU (CpuHead): HeadKernels with every product in fp32. It is synchronous: Submit returns
// when the chunk is done, and calls back on the calling thread. CpuHead::ComputeResults calls the steps of a
// chunk in their order. The norm before the classifier (NormForward) and the guard of rows that are
// not finite (RowGuard) stand here too, because only this head uses them.
#ifndef LOSSD_KERNELS_CPU_CPU_HEAD_H_
#define LOSSD_KERNELS_CPU_CPU_HEAD_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/class_exchange.h"
#include "kernels/cpu/cpu_params.h"
#include "kernels/cpu/head_buffers.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/head_config.h"

namespace lossd::kernels {

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

  // Finds the slices with a row whose result is not finite and clears all their rows, so that they add
  // exactly nothing to any sum over rows (a factor 0 alone would not do: 0 * NaN is NaN).
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

// One head. Thread-safety as HeadKernels. Borrows the pool and the accounting behind the reservation.
//
// Memory on the path of a chunk is taken when the head is created; OpenBLAS keeps packing buffers of its own.
// A row also counts as not finite if a factor of its gradient (row weight, grad_loss, ...) is not, or if W x
// before a softcap is not. A chunk fails with what the exchange of a split head says.
class CpuHead final : public HeadKernels {
 public:
  // `config` is valid; `reservation` holds PlanBuffers(config, replica, chunk_rows).
  static absl::StatusOr<std::unique_ptr<CpuHead>> Create(const HeadConfig& config, Replica replica,
                                                         int64_t chunk_rows, ThreadPool* pool,
                                                         MemoryAccounting::Reservation reservation);

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return DType::kFloat32; }
  int64_t chunk_rows() const override { return chunk_rows_; }
  MemoryBytes memory() const override { return reservation_.bytes(); }
  std::vector<Choice> Describe() const override;

  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override;

  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                          absl::Span<uint8_t> out) override {
    return params_.ReadTensor(id, row_begin, rows, dtype, out);
  }
  absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                           absl::Span<const uint8_t> in) override {
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
  CpuHead(const HeadConfig& config, Replica replica, int64_t chunk_rows, ThreadPool* pool,
          MemoryAccounting::Reservation reservation, HeadArenas arenas, const HeadBuffers& buffers);

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
  NormParams norm_params() const;

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
  const HeadBuffers buffers_;
  CpuParams params_;
  const RowGuard guard_;
  std::shared_ptr<ClassExchange> exchange_;
};

// What a head on the CPU says of itself.
std::vector<Choice> DescribeCpuHead(const HeadConfig& config, int64_t chunk_rows, int64_t workspace_bytes,
                                    int threads);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_HEAD_H_
