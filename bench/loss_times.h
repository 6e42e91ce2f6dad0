// SPDX-License-Identifier: Apache-2.0
// The measurements of `cuda_bench loss`, a benchmark of a loss on GPUs: a microbatch that is computed
// repeatedly (Microbatch), its deferred form (TimeDeferred), its errors (MeasureErrors), the bare products to
// which its time is compared (the floor), the norm kernels, and the end of a step. Not thread-safe; aborts on
// a CUDA error.
#ifndef LOSSD_BENCH_LOSS_TIMES_H_
#define LOSSD_BENCH_LOSS_TIMES_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "bench/gpu_data.h"
#include "bench/gpu_timer.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/cuda/device/gemm.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/kernels/row_loss.h"
#include "kernels/exchange_times.h"
#include "kernels/group/group_backend.h"
#include "kernels/head_config.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

// ---- The backend, on one GPU or several ----

// A backend on the GPUs 0 to devices - 1, which share every head. `options` apply to each GPU.
absl::StatusOr<std::unique_ptr<kernels::Backend>> CreateGpus(int devices,
                                                             const kernels::CudaBackendOptions& options);

// Measures the time that each GPU of a backend spends in exchanges with the other GPUs, including the wait
// for slower GPUs.
class ExchangeWatch {
 public:
  // Counts from the construction on. `backend` must outlive the object.
  explicit ExchangeWatch(const kernels::Backend& backend);
  // For each kind of exchange {"least", "most"}: the times in milliseconds, divided by `count`, of the GPU
  // with the least time and of the GPU with the most time. Null if there is only one GPU.
  nlohmann::json PerOne(int count) const;

 private:
  std::vector<kernels::ExchangeTimes> Read() const;

  const kernels::Backend& backend_;
  const std::vector<kernels::ExchangeTimes> begin_;
};

// ---- A microbatch in pinned memory that is computed repeatedly, in chunks of about the same size ----

// The results that are computed for a microbatch. A deferred microbatch has two calls: kRetain computes
// losses and entropies and retains the hidden states; kBackward reads the retained hidden states and computes
// gradients from the upstream gradients of each row.
enum class Call { kLoss, kLossAndGradients, kRetain, kBackward };

// Data that the calls kRetain and kBackward of one deferred microbatch share.
struct Deferral {
  RowGradients gradients;
  std::unique_ptr<kernels::RetainedMemory> memory;
};

// A microbatch and the memory of its inputs and results. Its hidden states have the type `dtype`, fp32 or
// bf16. `head`, `data` and `deferral` (null unless the microbatch is deferred) must outlive the object.
class Microbatch {
 public:
  Microbatch(kernels::Backend& backend, kernels::HeadKernels& head, const DataShape& shape,
             const LossData& data, kernels::DType dtype, const kernels::LossOptions& options, Call call,
             const Deferral* deferral = nullptr)
      : head_(head),
        shape_(shape),
        data_(data),
        dtype_(dtype),
        options_(options),
        call_(call),
        deferral_(deferral),
        lse_(shape.rows),
        loss_(shape.rows),
        entropy_(shape.rows),
        logprob_(shape.rows) {
    const int64_t elements = shape.rows * shape.hidden;
    hidden_ = Take(backend.AllocateStaging(elements * element_), "AllocateStaging");
    gradient_ = Take(backend.AllocateStaging(elements * element_), "AllocateStaging");
    uint8_t* hidden = hidden_->bytes().data();
    Check(cudaMemcpy(hidden, data.hidden, static_cast<size_t>(elements * 2), cudaMemcpyDefault),
          "cudaMemcpy");
    // Widens bf16 to fp32 in place. From the end, so that no value is overwritten before it is read: fp32 is
    // the bits of bf16 (high), behind 16 zero bits (low).
    for (int64_t i = elements - 1; element_ == 4 && i >= 0; --i) {
      const uint16_t low = 0;
      const uint16_t high = reinterpret_cast<const uint16_t*>(hidden)[i];
      std::memcpy(hidden + 4 * i, &low, 2);
      std::memcpy(hidden + 4 * i + 2, &high, 2);
    }
    // As few chunks as the head allows. They have about the same size: whole panels, which the Hopper kernels
    // compute at a time.
    const int64_t chunks = kernels::cuda::CeilDiv(shape.rows, head.chunk_rows());
    const int64_t panels = kernels::cuda::hopper::Panels(kernels::cuda::CeilDiv(shape.rows, chunks));
    chunk_rows_ = std::min(panels * kernels::cuda::hopper::kPanelRows, head.chunk_rows());
  }

  int64_t chunk_rows() const { return chunk_rows_; }
  const std::vector<float>& lse() const { return lse_; }
  const std::vector<float>& loss() const { return loss_; }
  const uint8_t* gradient() const { return gradient_->bytes().data(); }
  // The choices with which the last microbatch was computed.
  const std::vector<kernels::Choice>& choices() const { return choices_; }
  // The mean dropped mass of a row in the last microbatch.
  double dropped_mass() const { return sums_.dropped_mass / static_cast<double>(shape_.rows); }
  // The predicted relative error of the last microbatch; 0 if it was not sampled.
  double predicted_error() const { return sums_.gradient_error(); }
  float sample_threshold() const { return sample_threshold_; }
  // Sets the seed of the following microbatches.
  void set_sample_seed(uint64_t seed) { sample_seed_ = seed; }
  // Sets whether the log-probability of each row's target and each row's entropy are also computed.
  void set_row_values(bool wanted) { row_values_ = wanted; }
  // Replaces the loss by `objective`. Each row gets a random advantage around 0. Its log-probabilities of the
  // old and the reference policy are near the log-probability of the row's last loss, which must have been
  // the cross-entropy.
  void set_objective(const kernels::Objective& objective) {
    options_.objective = objective;
    if (!objective.active()) return;
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    for (auto* numbers : {&advantages_, &old_logprobs_, &ref_logprobs_}) numbers->resize(loss_.size());
    for (size_t row = 0; row < loss_.size(); ++row) {
      advantages_[row] = normal(rng);
      old_logprobs_[row] = std::min(0.0f, 0.1f * normal(rng) - loss_[row]);
      ref_logprobs_[row] = std::min(0.0f, 0.2f * normal(rng) - loss_[row]);
    }
  }
  // Replaces the loss by distillation from `teacher`, a head with the same classes and hidden size. The
  // teacher's hidden states are the hidden states of the rows. Null: no teacher.
  void set_teacher(kernels::HeadKernels* teacher, const kernels::Distillation& distillation) {
    teacher_ = teacher;
    options_.distillation = distillation;
  }
  // Also computes the `top_k` most probable classes of each row.
  void set_top_k(int32_t top_k) {
    top_k_ = top_k;
    top_logprobs_.resize(static_cast<size_t>(shape_.rows * top_k));
    top_classes_.resize(static_cast<size_t>(shape_.rows * top_k));
  }

  void WarmUp(int in_flight) {
    const Clock::time_point begin = Clock::now();
    while (SecondsSince(begin) < kWarmUpSeconds) Run(kWarmUps, in_flight);
  }

  // Runs `count` microbatches without a pause. Returns the count - 1 times between the ends of two
  // consecutive microbatches. So callers that want n times pass n + 1.
  std::vector<double> Run(int count, int in_flight) {
    std::vector<Clock::time_point> ends;
    for (int i = 0; i < count; ++i) {
      for (int64_t begin = 0; begin < shape_.rows; begin += chunk_rows_) {
        {
          absl::MutexLock lock(&mutex_);
          AwaitUnfinished(in_flight - 1);
          ++unfinished_;
        }
        // Only the last chunk of a microbatch notes its end.
        Submit(begin, begin + chunk_rows_ >= shape_.rows ? &ends : nullptr);
      }
    }
    absl::MutexLock lock(&mutex_);
    AwaitUnfinished(0);
    std::vector<double> times;
    for (size_t i = 1; i < ends.size(); ++i) {
      times.push_back(std::chrono::duration<double, std::milli>(ends[i] - ends[i - 1]).count());
    }
    return times;
  }

 private:
  struct Work {
    std::vector<kernels::Slice> slices;
    kernels::Chunk chunk;
  };

  // Waits until at most `chunks` chunks are unfinished.
  void AwaitUnfinished(int chunks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto few = [this, chunks]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return unfinished_ <= chunks; };
    mutex_.Await(absl::Condition(&few));
  }

  void Submit(int64_t begin, std::vector<Clock::time_point>* ends) {
    auto work = std::make_shared<Work>();
    const bool gradients = call_ == Call::kLossAndGradients || call_ == Call::kBackward;
    const int64_t end = std::min(begin + chunk_rows_, shape_.rows);
    // One slice for each device among which the rows of a chunk are divided.
    const int64_t parts = head_.chunk_rows() / head_.slice_rows();
    const int64_t most = std::min(head_.slice_rows(), kernels::cuda::CeilDiv(end - begin, parts));
    for (int64_t first = begin; first < end; first += most) {
      kernels::Slice slice;
      slice.rows = std::min(most, end - first);
      slice.hidden = hidden_->bytes().data() + first * shape_.hidden * element_;
      slice.targets = data_.targets.data() + first;
      slice.grad_scale = 1.0f / static_cast<float>(shape_.rows);
      slice.sample_seed = sample_seed_;
      slice.first_row = first;
      if (gradients) slice.grad_hidden = gradient_->bytes().data() + first * shape_.hidden * element_;
      slice.out.lse = lse_.data() + first;
      slice.out.loss = loss_.data() + first;
      if (row_values_) {
        slice.out.target_logprob = logprob_.data() + first;
        slice.out.entropy = entropy_.data() + first;
      }
      if (options_.objective.active()) {
        slice.advantages = advantages_.data() + first;
        slice.old_logprobs = old_logprobs_.data() + first;
        slice.ref_logprobs = ref_logprobs_.data() + first;
      }
      if (teacher_ != nullptr) slice.teacher_hidden = slice.hidden;
      slice.top_k = top_k_;
      slice.out.top_logprobs = top_logprobs_.data() + first * top_k_;
      slice.out.top_classes = top_classes_.data() + first * top_k_;
      if (deferral_ != nullptr) Defer(first, slice, work->chunk);
      work->slices.push_back(slice);
    }
    work->chunk.options = options_;
    work->chunk.teacher = teacher_;
    work->chunk.hidden_dtype = dtype_;
    work->chunk.accumulate_gradients = gradients;
    work->chunk.slices = absl::MakeSpan(work->slices);
    kernels::ChunkCallbacks callbacks;
    callbacks.on_results = [](absl::Status status) { Check(status, "on_results"); };
    callbacks.on_done = [this, work, ends, begin](absl::Status status) {
      Check(status, "on_done");
      absl::MutexLock lock(&mutex_);
      if (begin == 0) sums_ = {};  // the first chunk of a microbatch
      for (const kernels::Slice& slice : work->slices) sums_ += slice.sums;
      sample_threshold_ = work->chunk.sample_threshold;
      choices_ = work->chunk.choices;
      if (ends != nullptr) ends->push_back(Clock::now());
      --unfinished_;
    };
    head_.Submit(&work->chunk, std::move(callbacks));
  }

  // Sets the members of a slice and its chunk that only a deferred microbatch has.
  void Defer(int64_t begin, kernels::Slice& slice, kernels::Chunk& chunk) {
    chunk.retained = deferral_->memory.get();
    slice.retained_offset = begin * shape_.hidden * element_;
    if (call_ == Call::kRetain) slice.out.entropy = entropy_.data() + begin;
    if (call_ != Call::kBackward) return;
    slice.hidden = nullptr;
    slice.grad_loss = deferral_->gradients.loss.data() + begin;
    slice.grad_lse = deferral_->gradients.lse.data() + begin;
    slice.grad_entropy = deferral_->gradients.entropy.data() + begin;
  }

  kernels::HeadKernels& head_;
  const DataShape shape_;
  const LossData& data_;
  const kernels::DType dtype_;
  kernels::LossOptions options_;
  const Call call_;
  const Deferral* const deferral_;
  const int64_t element_ = static_cast<int64_t>(kernels::SizeOf(dtype_));
  std::vector<float> lse_, loss_, entropy_, logprob_;
  bool row_values_ = false;
  std::vector<float> advantages_, old_logprobs_, ref_logprobs_;
  kernels::HeadKernels* teacher_ = nullptr;
  int32_t top_k_ = 0;
  std::vector<float> top_logprobs_;   // [rows, top_k_]
  std::vector<int32_t> top_classes_;  // [rows, top_k_]
  std::unique_ptr<kernels::StagingMemory> hidden_, gradient_;
  int64_t chunk_rows_ = 0;
  absl::Mutex mutex_;
  int unfinished_ ABSL_GUARDED_BY(mutex_) = 0;
  // The values of the last microbatch. The backend's thread writes them; they are read when no chunk is in
  // flight.
  kernels::LossSums sums_;
  float sample_threshold_ = 0.0f;
  std::vector<kernels::Choice> choices_;
  uint64_t sample_seed_ = 1;
};

// ---- The three bare products of a loss with gradients, and the row loss between them, each measured alone
// ----

inline kernels::cuda::GemmShape LogitsGemm(const DataShape& s, int64_t rows) {
  return {.transpose_a = true,
          .m = s.vocab,
          .n = rows,
          .k = s.hidden,
          .lda = s.hidden,
          .ldb = s.hidden,
          .ldc = s.vocab};
}
inline kernels::cuda::GemmShape HiddenGemm(const DataShape& s, int64_t rows) {
  return {.m = s.hidden, .n = rows, .k = s.vocab, .lda = s.hidden, .ldb = s.vocab, .ldc = s.hidden};
}
inline kernels::cuda::GemmShape WeightGemm(const DataShape& s, int64_t rows, kernels::DType output) {
  return {.transpose_b = true,
          .m = s.hidden,
          .n = s.vocab,
          .k = rows,
          .lda = s.hidden,
          .ldb = s.vocab,
          .ldc = s.hidden,
          .input = kernels::DType::kBFloat16,
          .output = output};
}

// The buffers for the products of `rows` rows, and the functions that time each product. `data` and `timer`
// must outlive the object.
class BareProducts {
 public:
  BareProducts(const DataShape& shape, const LossData& data, int64_t rows, int iterations, bool autotune,
               Timer& timer)
      : shape_(shape),
        data_(data),
        rows_(rows),
        iterations_(iterations),
        autotune_(autotune),
        timer_(timer),
        gemms_(Take(kernels::cuda::Gemms::Create(), "Gemms")) {
    scratch_ = DeviceAlloc<uint8_t>(kernels::cuda::kGemmWorkspaceBytes);
    logits_ = DeviceAlloc<float>(rows * shape.vocab);
    dx_ = DeviceAlloc<uint16_t>(rows * shape.hidden);
    dw_ = DeviceAlloc<float>(shape.vocab * shape.hidden);
    targets_ = DeviceAlloc<int32_t>(rows);
    Check(cudaMemcpy(targets_, data.targets.data(), static_cast<size_t>(rows) * 4, cudaMemcpyDefault),
          "cudaMemcpy");
    // Ten arrays [rows] for the row loss (RowParams): row weights and coef_loss, which are 1, coef_lse and
    // coef_entropy, which are 0, and six results.
    floats_ = DeviceAlloc<float>(10 * rows);
    const std::vector<float> ones(static_cast<size_t>(2 * rows), 1.0f);
    Check(cudaMemset(floats_, 0, static_cast<size_t>(40 * rows)), "cudaMemset");
    Check(cudaMemcpy(floats_, ones.data(), ones.size() * 4, cudaMemcpyDefault), "cudaMemcpy");
    int device = 0;
    cudaDeviceProp properties = {};
    Check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    // 2 KiB of the shared memory are left for static variables of kernels.
    limits_ = {properties.multiProcessorCount, static_cast<int>(properties.sharedMemPerBlockOptin) - 2048,
               static_cast<int>(properties.sharedMemPerMultiprocessor), properties.major >= 9};
  }
  ~BareProducts() {
    for (void* p : {static_cast<void*>(scratch_), static_cast<void*>(logits_), static_cast<void*>(dx_),
                    static_cast<void*>(dw_), static_cast<void*>(targets_), static_cast<void*>(floats_)}) {
      cudaFree(p);
    }
  }

  Times Product(const kernels::cuda::GemmShape& shape, const kernels::cuda::GemmOperands& operands) {
    if (autotune_) Check(gemms_->Tune(shape, operands, scratch_, timer_.stream()), "Tune");
    return timer_.Measure(
        iterations_, [&](int) { Check(gemms_->Run(shape, operands, scratch_, timer_.stream()), "Run"); });
  }

  Times Logits() {
    return Product(LogitsGemm(shape_, rows_), {.a = data_.weight, .b = data_.hidden, .c = logits_});
  }
  Times HiddenGradient() {
    return Product(HiddenGemm(shape_, rows_), {.a = data_.weight, .b = logits_, .c = dx_});
  }
  Times WeightGradient(kernels::DType output, float beta) {
    return Product(WeightGemm(shape_, rows_, output),
                   {.a = data_.hidden, .b = logits_, .c = dw_, .beta = beta});
  }
  // The row loss from fp32 logits. The logits are computed again before each run, because the kernel
  // overwrites them.
  Times RowLoss(bool gradient) {
    const kernels::cuda::RowLossParams p = RowParams(gradient);
    kernels::cuda::GemmShape logits = LogitsGemm(shape_, rows_);
    logits.output = kernels::DType::kFloat32;
    std::vector<double> times;
    for (int i = 0; i < kWarmUps + iterations_; ++i) {
      Check(gemms_->Run(logits, {.a = data_.weight, .b = data_.hidden, .c = logits_}, scratch_,
                        timer_.stream()),
            "Run");
      times.push_back(timer_.MeasureOnce(
          [&] { Check(kernels::cuda::LaunchRowLoss(p, limits_, timer_.stream()), "LaunchRowLoss"); }));
    }
    return Summarise({times.begin() + kWarmUps, times.end()});
  }

 private:
  kernels::cuda::RowLossParams RowParams(bool gradient) const {
    kernels::cuda::RowLossParams p;
    p.logits = {logits_, kernels::DType::kFloat32, shape_.vocab, shape_.vocab};
    p.gradient = kernels::cuda::InPlaceOf(p.logits, kernels::DType::kBFloat16);
    if (!gradient) p.gradient.data = nullptr;
    p.terms.vocab = shape_.vocab;
    p.terms.class_weight_sum = static_cast<float>(shape_.vocab);
    p.in = {.rows = rows_,
            .padded_rows = rows_,
            .targets = targets_,
            .weights = floats_,
            .coef_loss = floats_ + rows_,
            .coef_lse = floats_ + 2 * rows_,
            .coef_entropy = floats_ + 3 * rows_};
    p.out = {floats_ + 4 * rows_, floats_ + 5 * rows_, floats_ + 6 * rows_,
             floats_ + 7 * rows_, floats_ + 8 * rows_, reinterpret_cast<int32_t*>(floats_ + 9 * rows_)};
    return p;
  }

  const DataShape shape_;
  const LossData& data_;
  const int64_t rows_;
  const int iterations_;
  const bool autotune_;
  Timer& timer_;
  std::unique_ptr<kernels::cuda::Gemms> gemms_;
  kernels::cuda::DeviceLimits limits_;
  uint8_t* scratch_ = nullptr;
  float* logits_ = nullptr;  // products with 16-bit output use half of this memory
  uint16_t* dx_ = nullptr;
  float* dw_ = nullptr;
  int32_t* targets_ = nullptr;
  float* floats_ = nullptr;
};

// Times the two calls of a deferred microbatch. The first call returns the losses and entropies of the rows
// and retains their hidden states. The second call is the backward with upstream gradients of each row's
// loss, log-sum-exp and entropy; it computes the logits once more.
//
// Returns {"retain", "backward", "choices"} and, with `errors`, {"errors"}; choices and errors are of the
// backward. Each call is repeated with as many chunks in flight as the backend takes. The head's gradients
// are not zeroed at the end.
nlohmann::json TimeDeferred(kernels::Backend& backend, kernels::HeadKernels& head, const DataShape& shape,
                            const LossData& data, kernels::DType dtype, const kernels::LossOptions& options,
                            int iterations, bool errors);

// One line for people from the result of TimeDeferred. The caller must have added "backward_ratio" to it: the
// time of the backward divided by the time of a loss with gradients.
std::string DeferredText(const nlohmann::json& deferred);

// Measures the errors of the loss and the gradients of a microbatch against double precision, for some rows
// and classes.
//
// The errors are ||a - ref|| / ||ref|| of the microbatch that was computed last; the head's gradients must be
// the gradients of this microbatch alone. Also measures the projection of the microbatch's dW on the exact
// dW, for the classes that are not the target of any row. With seeds > 0, also measures the errors of the
// mean over this number of sample seeds. For this it computes more microbatches, whose gradients stay in the
// head. row_gradients: the upstream gradients of a backward; null: a loss with gradients.
nlohmann::json MeasureErrors(kernels::HeadKernels& head, Microbatch& batch, const DataShape& shape,
                             const LossData& data, const RowGradients* row_gradients, int seeds);

// Options of MeasureFloor and MeasureParts, which measure the parts of a loss with gradients.
struct BareOptions {
  int iterations = 10;
  bool autotune = false;  // choose the products' algorithms by timing them
};

// The times of the three bare products of a loss with gradients.
struct Floor {
  Times logits, hidden_gradient, weight_gradient;
  int64_t rows = 0;  // the rows that were measured
  double total() const { return logits.median + hidden_gradient.median + weight_gradient.median; }
};

// The floor of all rows of the shape. If the logits of all rows are too large for memory, fewer rows are
// measured and the times are scaled up.
Floor MeasureFloor(const DataShape& shape, const LossData& data, const BareOptions& options, Timer& timer);

// Times the parts of a loss with gradients one by one and returns {"logits", "row_loss_forward", "row_loss",
// ..., "row_loss_gbps"}. `rows`: the rows of a chunk, at most the rows of the shape.
nlohmann::json MeasureParts(const DataShape& shape, const LossData& data, int64_t rows,
                            const BareOptions& options, Timer& timer);

inline constexpr int64_t kNormRows = 4096;

// The times of the norm kernels in fp16. The data of a launch are never in L2 when it begins.
struct NormTimes {
  Times forward, backward;                         // of one launch
  double forward_gbps = 0.0, backward_gbps = 0.0;  // counting the rows read and written
};

// `centred`: LayerNorm; false: RMSNorm.
NormTimes TimeNorm(int64_t cols, bool centred, Timer& timer);

// Times the end of a step: the norm of the gradient, then AdamW's update of all parameters.
//
// Returns {"norm_and_update", "exchanges"}. "norm_and_update" is the host time of `count` steps, after two
// steps that are not timed; "exchanges" is ExchangeWatch of the last step. `accumulate` computes a microbatch
// that accumulates gradients, and waits for it; that time does not count. `head` must have AdamW's state.
nlohmann::json TimeSteps(const kernels::Backend& backend, kernels::HeadKernels& head, int count,
                         const std::function<void()>& accumulate);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_LOSS_TIMES_H_
