// One head on a GPU: the HeadKernels of the CUDA backend (see kernels/backend.h for its contract).
#ifndef LOSSD_KERNELS_CUDA_CUDA_HEAD_H_
#define LOSSD_KERNELS_CUDA_CUDA_HEAD_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/chunk_plan.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/device_branch.h"
#include "kernels/cuda/filtered/filter_trials.h"
#include "kernels/cuda/filtered/filtered.h"
#include "kernels/cuda/head_memory.h"
#include "kernels/cuda/hopper/product.h"
#include "kernels/cuda/row_loss.h"
#include "kernels/cuda/rows.h"

namespace lossd::kernels::cuda {

class CudaHead : public HeadKernels {
 public:
  // `config` is valid and its plan fits; `device` must outlive the head.
  static absl::StatusOr<std::unique_ptr<HeadKernels>> Create(Device* device, const HeadConfig& config);
  ~CudaHead() override;

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return config_.compute_dtype; }
  int64_t chunk_rows() const override { return sizes_.chunk_rows; }
  MemoryBytes memory() const override { return plan_; }
  std::vector<Choice> Describe() const override { return choices_; }

  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override;
  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                          absl::Span<uint8_t> out) override;
  absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                           absl::Span<const uint8_t> in) override;
  absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                           absl::Span<const uint8_t> in) override;
  absl::StatusOr<double> GradNorm() override;
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update) override;
  absl::Status ZeroGradients() override;

 private:
  // What belongs to one chunk from Submit to its end.
  struct Slot {
    PinnedBuffer host_inputs;
    PinnedBuffer host_outputs;
    RowInputBlock host_in, device_in;
    RowOutputBlock host_out, device_out;
    Event uploaded, row_results, hidden_gradient, results, done;
    DeviceBranch rows_branch, weight_branch;  // of a filtered chunk
    // The options of its chunk if that says whether others should try the filter, in host_out.decision.
    std::optional<LossOptions> trial;
  };
  // A chunk while it is being enqueued.
  struct Job;

  CudaHead(Device* device, const HeadConfig& config);
  absl::Status Allocate();
  absl::Status Tune();
  // Fills choices_ (cuda_head_describe.cc); chooses the algorithms of a full chunk's products.
  absl::Status MakeChoices();
  RowLossParams FullChunk() const;
  absl::Status AddProduct(absl::string_view what, const GemmShape& shape);

  // The phases of a chunk; each enqueues its work and returns.
  absl::Status Enqueue(const Job& job);
  absl::Status Upload(const Job& job);
  absl::Status UploadSlice(const Job& job, const SliceLayout& place);
  absl::Status Forward(const Job& job);
  RowLossParams RowLoss(const Job& job) const;
  ChunkPlan Plan(const LossOptions& options, const RowLossParams& loss, DType hidden) const;
  void PlanNorm(const RowLossParams& loss, DType hidden, ChunkPlan& plan) const;
  // Notes what became of the slot's last chunk and plans this one.
  ChunkPlan PlanJob(const Job& job);
  absl::Status FusedForward(const Job& job, const RowLossParams& row);
  absl::Status LogitsForward(const Job& job, const RowLossParams& row);
  absl::Status HiddenGradient(const Job& job);
  absl::Status NormBackward(const Job& job);
  absl::Status Download(const Job& job);
  absl::Status DownloadSlice(const Job& job, const SliceLayout& place);
  absl::Status WeightGradient(const Job& job);
  bool IsDirect(const Job& job, const SliceLayout& place) const;
  // The products after the loss (cuda_head_products.cc).
  absl::Status PrepareGemms(const Job& job);
  absl::Status HiddenProduct(const Job& job);
  absl::Status WeightProduct(const Job& job);
  // By our own kernel; fills in what is the same for both.
  absl::Status Multiply(hopper::ProductParams product);
  // dx as its product leaves it: its factor and dtype.
  float HiddenGradientScale(const Job& job) const;
  DType HiddenGradientType(const Job& job) const;
  // Filtered chunks (cuda_head_filtered.cc).
  FilterShape FilterShapeOfChunk(const Job& job) const;
  absl::Status FilteredForward(const Job& job, const RowLossParams& row);
  // From compact row `begin` on.
  RowSelection SelectionOf(const Job& job, int64_t begin) const;
  absl::Status PrepareFilter(const Job& job, const RowLossParams& row);
  // `row`: rows of the chunk from `begin` on.
  absl::Status FilterRows(const Job& job, const RowLossParams& row, int64_t begin);
  absl::Status FilteredWeightGradient(const Job& job);
  absl::Status AddKept(const Job& job);
  // What `exact` enqueues if the chunk's decision is to be exact, else what `filtered` does.
  absl::Status Branch(const Job& job, DeviceBranch& branch, absl::FunctionRef<absl::Status()> exact,
                      absl::FunctionRef<absl::Status()> filtered);
  absl::Status AddUniform(const Job& job);
  // Algorithm::kCut (cuda_head_cut.cc).
  bool IsCut() const { return config_.algorithm == Algorithm::kCut; }
  // Of `rows` padded rows, where the plan is to filter.
  FilterBlock PlanFilterBlock(const ChunkPlan& plan, int64_t rows) const;
  void ChooseBlocks(Job& job) const;
  absl::Status PrepareCutGemms(const Job& job);
  absl::Status CutForward(const Job& job, const RowLossParams& row);
  absl::Status CutStatistics(const Job& job, const RowLossParams& row);
  absl::Status FusedStatistics(const Job& job, const RowLossParams& rows, int64_t begin,
                               const hopper::FusedRows& memory);
  absl::Status CutFilter(const Job& job, const RowLossParams& row);
  absl::Status CutBackward(const Job& job);
  absl::Status CutGradients(const Job& job);
  absl::Status CutRowBlock(const Job& job, const RowLossParams& row, int64_t begin);
  absl::Status BlockLogits(const Job& job, const ClassBlock& block, int64_t begin);
  absl::Status BlockGradient(const Job& job, const ClassBlock& block, int64_t begin);
  absl::Status BlockHiddenGradient(const Job& job, const ClassBlock& block, void* gradient);
  absl::Status BlockWeightGradient(const Job& job, const ClassBlock& block, int64_t begin);
  CutArena Arena(const Job& job) const;
  uint8_t* HiddenRows(const Job& job, int64_t begin) const;
  uint8_t* WeightRows(int64_t first_class) const;

  void Report(const std::shared_ptr<Job>& job, absl::Status status, ChunkCallbacks callbacks);

  // Of all classes, or of a block of them. Without scratch for Algorithm::kCut.
  GemmShape LogitsShape(int64_t rows) const { return LogitsShape(rows, sizes_.padded_vocab); }
  GemmShape LogitsShape(int64_t rows, int64_t classes) const;
  GemmShape HiddenGradientShape(int64_t rows, DType output) const {
    return HiddenGradientShape(rows, sizes_.padded_vocab, output);
  }
  GemmShape HiddenGradientShape(int64_t rows, int64_t classes, DType output) const;
  GemmShape WeightGradientShape(int64_t rows) const { return WeightGradientShape(rows, sizes_.padded_vocab); }
  GemmShape WeightGradientShape(int64_t rows, int64_t classes) const;

  // A tensor of this head from row `row_begin` on, as a matrix on the device.
  DeviceMatrix FindTensor(TensorId id, int64_t row_begin) const;
  // Rows of a tensor on their way between host and device.
  struct Piece {
    DeviceMatrix tensor;  // their place in the tensor
    DeviceMatrix buffer;  // the upload piece, in the host's dtype
    int64_t rows = 0;
    int64_t offset = 0;  // in the host's memory, bytes
    int64_t bytes = 0;
  };
  absl::Status ForEachPiece(const DeviceMatrix& tensor, int64_t rows, DType dtype,
                            absl::FunctionRef<absl::Status(const Piece&)> step);
  absl::Status RefreshAfterWrite(TensorId id, int64_t row_begin, int64_t rows);
  absl::Status ReadClassWeights();

  Device* const device_;
  const HeadConfig config_;
  HeadSizes sizes_;
  MemoryBytes plan_;
  std::vector<Choice> choices_;
  DeviceBuffer value_buffer_, gradient_buffer_, optimizer_buffer_, workspace_buffer_, slot_buffer_;
  ValueBuffer values_;
  ParamBlock gradients_;
  ParamBlock moments_[2];
  Workspace workspace_;
  Slot slots_[kChunkSlots];
  int next_slot_ = 0;
  Event download_idle_;  // the last download from workspace_.hidden_gradient
  bool weight_gradient_is_zero_ = true;
  FilterTrials trials_;
  float class_weight_sum_ = 0.0f;
  float largest_class_weight_ = 1.0f;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_CUDA_HEAD_H_
