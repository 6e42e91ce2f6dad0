// SPDX-License-Identifier: Apache-2.0
// The parameters of a head on the CPU, with their gradients and moments: reads, writes and sums (CpuParams),
// and the update that the optimizer makes of a parameter (UpdateParams). kernels/head_config.h names the
// tensors and their dimensions. A replica has the rows that StoredRowsOf() says: others are NOT_FOUND, or
// rows out of range.
#ifndef LOSSD_KERNELS_CPU_CPU_PARAMS_H_
#define LOSSD_KERNELS_CPU_CPU_PARAMS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cpu/head_buffers.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"
#include "kernels/validation.h"

namespace lossd::kernels {

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

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_PARAMS_H_
