// SPDX-License-Identifier: Apache-2.0
// HeadTensors: the tensors of one head on the device (values, gradients and moments). Between chunks, its
// functions read and write tensors, add to gradients, and apply the optimizer's step. All functions wait for
// the device, except accessors and functions whose comment says that they enqueue. Called by the backend's
// driving thread; a chunk in flight may use the tensors.
#ifndef LOSSD_KERNELS_CUDA_HEADS_HEAD_TENSORS_H_
#define LOSSD_KERNELS_CUDA_HEADS_HEAD_TENSORS_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/heads/host_tensors.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/kernels/tensor_ops.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"
#include "kernels/validation.h"

namespace lossd::kernels::cuda {

class HeadTensors {
 public:
  // Device memory in which the functions of HeadTensors work. Owned by the head.
  struct Scratch {
    uint8_t* transfer = nullptr;    // HeadSizes::transfer_bytes
    double* square_sums = nullptr;  // [kSquareSumPartials + 1]
  };

  // `device` outlives the object. `host`: the tensors of a head in host memory, which also outlive the
  // object; null for other heads.
  HeadTensors(Device* device, const HeadConfig& config, const HeadSizes& sizes, HostTensors* host)
      : host_(host),
        device_(device),
        config_(config),
        sizes_(sizes),
        shard_(OwnShard(config, sizes, device->options().replica)),
        ranges_(ShardRanges::Of(sizes, shard_)),
        class_weight_sum_(static_cast<float>(config.vocab_size)) {}

  // Allocates the tensors: zeros, except norm gain and class weights, which are 1. Enqueues its work on the
  // compute stream. For a head in host memory, allocates nothing on the device; values() are null until
  // PlaceValues.
  absl::Status Allocate();
  // For a head in host memory: chunks from now on find its values at `base` on the device.
  void PlaceValues(uint8_t* base) { values_ = ValueBuffer::Carve(config_, sizes_, base); }
  // Call before any of the functions below.
  void Use(const Scratch& scratch) { scratch_ = scratch; }

  // As HeadKernels.
  absl::Status Read(TensorId id, int64_t row_begin, int64_t rows, DType dtype, absl::Span<uint8_t> out);
  absl::Status Write(TensorId id, int64_t row_begin, int64_t rows, DType dtype, absl::Span<const uint8_t> in);
  absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                           absl::Span<const uint8_t> in);
  absl::StatusOr<double> GradNorm();
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update);
  absl::Status ZeroGradients();
  absl::Status ZeroMoments();

  const ValueBuffer& values() const { return values_; }
  const ParamBlock& gradients() const { return gradients_; }
  WeightAccumulators& accumulators() { return accumulators_; }
  const Shard& shard() const { return shard_; }
  const ShardRanges& ranges() const { return ranges_; }
  int64_t classes() const { return sizes_.vocab; }  // classes that are here
  ShardRanges RangesOf(const Shard& shard) const { return ShardRanges::Of(sizes_, shard); }
  // The weight that chunks are computed with, beginning at class `first_class`.
  void* ComputeWeightFrom(int64_t first_class) const {
    return static_cast<uint8_t*>(values_.compute_weight) +
           first_class * sizes_.padded_hidden * sizes_.element;
  }
  // Adds the sums `gain` and `shift` [padded_hidden] to the gradients of norm gain and norm shift. `shift`
  // may be null. Enqueues its work on the compute stream.
  absl::Status AddNormGradients(const float* gain, const float* shift);
  // Zeroes the gradients of another replica's shard. Enqueues its work on the compute stream.
  absl::Status ZeroGradientsOf(const Shard& shard);
  float class_weight_sum() const { return class_weight_sum_; }  // vocab_size without class weights
  // The largest absolute value of the class weights; 1 without class weights.
  float largest_class_weight() const { return largest_class_weight_; }

 private:
  // Rows of a tensor that are being copied between host and device.
  struct TransferBlock {
    DeviceMatrix tensor;  // the rows in the tensor
    DeviceMatrix buffer;  // the transfer buffer, in the host's dtype
    int64_t rows = 0;
    int64_t offset = 0;  // of these rows in the host's memory, in bytes
    int64_t bytes = 0;
  };

  // The rows of a tensor from row `row_begin` on, as a matrix on the device.
  DeviceMatrix Find(TensorId id, int64_t row_begin) const;
  // Makes the device current, checks an access to rows of a tensor, and waits for the chunks in flight.
  absl::Status Begin(TensorId id, int64_t row_begin, int64_t rows, DType dtype, size_t bytes);
  // Calls `step` for blocks of rows that fit the transfer buffer. Waits for the end of each block before the
  // next one, because the blocks share the buffer and host memory may be not pinned.
  absl::Status ForEachBlock(const DeviceMatrix& tensor, int64_t rows, DType dtype,
                            absl::FunctionRef<absl::Status(const TransferBlock&)> step);
  // Applies one step of the optimizer to a range of a tensor. Does nothing if `values` is null. The moments
  // may be null.
  absl::Status StepRange(OptimizerStepParams params, bool matrix, const ShardRange& range, float* values,
                         float* gradients, float* moment1, float* moment2);
  // The first row of the tensor that is here.
  int64_t FirstRow(TensorId id) const { return StoredRowsOf(config_, id, device_->options().replica).first; }
  absl::Status RefreshAfterWrite(TensorId id, int64_t row_begin, int64_t rows);
  absl::Status ReadClassWeights();

  HostTensors* const host_;
  Device* const device_;
  const HeadConfig config_;
  const HeadSizes sizes_;
  const Shard shard_;
  const ShardRanges ranges_;
  DeviceBuffer value_buffer_, gradient_buffer_, optimizer_buffer_;
  ValueBuffer values_;
  ParamBlock gradients_;
  ParamBlock moments_[2];  // only of the replica's shard
  WeightAccumulators accumulators_;
  Scratch scratch_;
  float class_weight_sum_;
  float largest_class_weight_ = 1.0f;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_HEAD_TENSORS_H_
