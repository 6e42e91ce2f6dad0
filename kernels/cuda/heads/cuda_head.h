// SPDX-License-Identifier: Apache-2.0
// CudaHead: one head on a GPU. It implements HeadKernels (kernels/backend.h, which has the contract) for the
// CUDA backend. CudaHead::Enqueue lists the phases of a chunk. This file also has the norm of a head
// (HeadNorm) and the planner of its chunks (ChunkPlanner). Tensors, slots, transfers, and the ways of
// computing a chunk (paths/) have files of their own.
#ifndef LOSSD_KERNELS_CUDA_HEADS_CUDA_HEAD_H_
#define LOSSD_KERNELS_CUDA_HEADS_CUDA_HEAD_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/heads/cuda_teacher_pool.h"
#include "kernels/cuda/heads/embedding_rows.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/heads/head_tensors.h"
#include "kernels/cuda/heads/row_transfers.h"
#include "kernels/cuda/kernels/norm.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/chunk_plan.h"
#include "kernels/cuda/paths/head_paths.h"
#include "kernels/cuda/paths/path_steps.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// The norm of a head's hidden states. Forward runs before the loss of a chunk, and Backward after the hidden
// gradients. Exists only for heads with a norm. Enqueues its work on the device's compute stream. Called by
// the backend's driving thread.
class HeadNorm {
 public:
  // `device`, `tensors` and `link` outlive the object; `workspace` is the head's workspace.
  HeadNorm(Device* device, const HeadConfig& config, const HeadSizes& sizes, const Workspace& workspace,
           HeadTensors* tensors, const ClassLink* link)
      : device_(device),
        config_(config),
        sizes_(sizes),
        workspace_(workspace),
        tensors_(tensors),
        link_(link) {}

  bool exists() const { return config_.norm != Norm::kNone; }
  // Writes to `plan` which kernels compute the chunk's norm. The launches choose the same kernels.
  void Plan(const ChunkFacts& chunk, DType hidden_dtype, ChunkPlan& plan) const;
  // Computes job.hidden, the normalized rows, from the raw rows of the slot. Padding rows become 0.
  absl::Status Forward(const ChunkJob& job, const ChunkSlot& slot) const;
  // Reads the gradient with respect to the normalized rows from Region::kHiddenGradient, for the rows
  // job.rows_here. Writes dL/dx over the raw rows if it is wanted, and adds to the gradients of the norm's
  // parameters if the chunk accumulates.
  absl::Status Backward(const ChunkJob& job, const ChunkSlot& slot) const;

 private:
  // `y`: the normalized rows, which Forward writes, or their gradient, which Backward reads.
  NormParams ParamsOf(const ChunkJob& job, const ChunkSlot& slot, const DeviceMatrix& y) const;
  DeviceMatrix RawRows(const ChunkJob& job, const ChunkSlot& slot) const;

  Device* const device_;
  const HeadConfig config_;
  const HeadSizes sizes_;
  const Workspace workspace_;
  HeadTensors* const tensors_;
  const ClassLink* const link_;
};

// Plans the chunks of a head, one after the other. A plan depends only on options and device, with one
// exception: after several chunks whose filtering or sampling was given up, chunks are planned to be exact
// for a while (FilterBackoff in paths/path_steps.h). Called by the backend's driving thread.
class ChunkPlanner {
 public:
  // `norm` outlives the object.
  ChunkPlanner(const Device& device, const HeadConfig& config, const HeadSizes& sizes, const HeadNorm* norm);

  // The plan of a chunk if earlier chunks are ignored.
  ChunkPlan Plan(const LossOptions& options, const ChunkFacts& facts, DType hidden_dtype) const;
  // The plan of the next chunk, which gets `slot`. Before that, tells the back-off whether the last chunk of
  // the slot was really filtered or sampled.
  ChunkPlan Next(const Chunk& chunk, const ChunkFacts& facts, ChunkSlot& slot);

 private:
  const PlanLimits limits_;
  const HeadNorm* const norm_;
  FilterBackoff backoff_;
};

class CudaHead : public PooledKernels {
 public:
  // `config` is valid, and the head fits into memory. `device` and `pool` must outlive the head. A head in
  // host memory computes in the memory of `pool`.
  static absl::StatusOr<std::unique_ptr<HeadKernels>> Create(Device* device, CudaTeacherPool* pool,
                                                             const HeadConfig& config);
  ~CudaHead() override;

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return config_.compute_dtype; }
  int64_t chunk_rows() const override { return sizes_.chunk_rows; }
  MemoryBytes memory() const override { return plan_; }
  std::vector<Choice> Describe() const override { return choices_; }

  // The teacher must have the same classes as this head. Its workspace must be large enough, because the
  // logits of both heads are computed in the teacher's workspace.
  absl::Status CheckTeacher(const HeadKernels& teacher) const override;
  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override;
  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                          absl::Span<uint8_t> out) override {
    return tensors_.Read(id, row_begin, rows, dtype, out);
  }
  absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                           absl::Span<const uint8_t> in) override {
    Invalidate();
    return tensors_.Write(id, row_begin, rows, dtype, in);
  }
  absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                           absl::Span<const uint8_t> in) override {
    return tensors_.AddGradient(param, row_begin, rows, dtype, scale, in);
  }
  absl::StatusOr<double> GradNorm() override { return tensors_.GradNorm(); }
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update) override {
    return tensors_.ApplyStep(options, update);
  }
  absl::Status ZeroGradients() override { return tensors_.ZeroGradients(); }
  absl::Status ZeroMoments() override { return tensors_.ZeroMoments(); }

  // Connects this part of a head that is split by vocabulary with the other parts. Call before the first
  // chunk.
  void Join(std::unique_ptr<ClassExchange> exchange) { link_.exchange = std::move(exchange); }
  // For the code that connects the replicas of a head.
  Device& device() { return *device_; }
  HeadTensors& tensors() { return tensors_; }

 private:
  // The teacher's part of a chunk that is distilled: it brings the teacher's hidden states of the rows into a
  // slot of the teacher, and applies the teacher's norm. The path of the student computes everything else,
  // including the teacher's logits.
  class Lesson {
   public:
    // `chunk` has the teacher `teacher`.
    Lesson(CudaHead* teacher, const Chunk& chunk);
    const TeacherRows* rows() const { return &rows_; }
    // Upload enqueues the copies to the device. Enqueue, called afterwards, makes the hidden states ready on
    // the compute stream.
    absl::Status Upload() const { return teacher_->transfers_->Upload(job_, *slot_); }
    absl::Status Enqueue() const;
    absl::Status EndUse() const { return teacher_->EndUse(); }
    // How many rows of fp32 logits fit into the memory in which `head` keeps the logits of a chunk; a
    // multiple of 8.
    static int64_t MostRows(const CudaHead& head);

   private:
    CudaHead* const teacher_;
    ChunkSlot* const slot_;
    Chunk chunk_;
    std::vector<Slice> slices_;
    ChunkJob job_;
    TeacherRows rows_;
  };
  // A chunk from Submit to its end.
  struct Pending {
    ChunkJob job;
    ChunkSlot* slot = nullptr;       // null: nothing to do on the device
    std::unique_ptr<Lesson> lesson;  // if the chunk is distilled
    // The copies to the pool for which the chunk waits: the values of the head and of its teacher, if they
    // live in host memory and were not on the device.
    std::vector<std::unique_ptr<CudaTeacherPool::Copied>> copied;
  };

  CudaHead(Device* device, CudaTeacherPool* pool, const HeadConfig& config);
  absl::Status Allocate();
  // Sets the device memory that chunks work in. Called once; for a head in host memory also later, while no
  // chunk is in flight.
  absl::Status Place(uint8_t* workspace, uint8_t* slots);
  absl::Status Tune();
  // Fills choices_; chooses the algorithms of a full chunk's GEMMs.
  absl::Status MakeChoices();

  absl::Status CheckChunk(const Chunk& chunk) const;
  // Lays the chunk out and plans it. If it has rows, also makes the pool copy the values of heads that live
  // in host memory.
  absl::Status Prepare(Chunk* chunk, Pending& pending);
  // Enqueue runs the phases of a chunk, which include Loss and HiddenGradient. Each phase enqueues its work
  // and returns.
  absl::Status Enqueue(const Pending& pending);
  absl::Status Loss(const Pending& pending, ChunkPath& path);
  absl::Status HiddenGradient(const Pending& pending, ChunkPath& path);
  void Report(const std::shared_ptr<Pending>& pending, absl::Status status, ChunkCallbacks callbacks);

  Device* const device_;
  const HeadConfig config_;
  const HeadSizes sizes_;
  const MemoryBytes plan_;
  std::vector<Choice> choices_;
  ClassLink link_;
  std::optional<HostTensors> host_;  // if the head lives in host memory
  HeadTensors tensors_;
  DeviceBuffer workspace_buffer_, slot_buffer_;
  Workspace workspace_;
  ChunkSlots slots_;
  // Set by Place.
  std::optional<RowTransfers> transfers_;
  std::optional<HeadNorm> norm_;
  std::optional<ChunkPlanner> planner_;
  std::optional<HeadPaths> paths_;
  std::optional<EmbeddingRows> embedding_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_CUDA_HEAD_H_
