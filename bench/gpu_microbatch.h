// SPDX-License-Identifier: Apache-2.0
// A microbatch in pinned memory that a backend computes again and again, in chunks of about the same size.
#ifndef LOSSD_BENCH_GPU_MICROBATCH_H_
#define LOSSD_BENCH_GPU_MICROBATCH_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "bench/gpu_data.h"
#include "bench/gpu_timer.h"
#include "kernels/backend.h"
#include "kernels/cuda/kernels/hopper/plan.h"

namespace lossd::bench {

// What is asked of a microbatch. A deferred one is retained first, which also returns entropies; its backward
// brings upstream gradients of each row and takes the hidden states from where they were retained.
enum class Call { kLoss, kLossAndGradients, kRetain, kBackward };

// What the two calls of a deferred microbatch share.
struct Deferral {
  RowGradients gradients;
  std::unique_ptr<kernels::RetainedMemory> memory;
};

// Hidden states of `dtype`: fp32 or bf16. `head`, `data` and `deferral` (of a deferred microbatch) outlive
// it.
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
        entropy_(shape.rows) {
    const int64_t elements = shape.rows * shape.hidden;
    hidden_ = Take(backend.AllocateStaging(elements * element_), "AllocateStaging");
    gradient_ = Take(backend.AllocateStaging(elements * element_), "AllocateStaging");
    uint8_t* hidden = hidden_->bytes().data();
    Check(cudaMemcpy(hidden, data.hidden, static_cast<size_t>(elements * 2), cudaMemcpyDefault),
          "cudaMemcpy");
    for (int64_t i = elements - 1; element_ == 4 && i >= 0; --i) {  // widen in place, from the end
      const uint16_t low = 0;
      const uint16_t high = reinterpret_cast<const uint16_t*>(hidden)[i];
      std::memcpy(hidden + 4 * i, &low, 2);
      std::memcpy(hidden + 4 * i + 2, &high, 2);
    }
    const int64_t chunks = kernels::cuda::CeilDiv(shape.rows, head.chunk_rows());
    const int64_t panels = kernels::cuda::hopper::Panels(kernels::cuda::CeilDiv(shape.rows, chunks));
    chunk_rows_ = std::min(panels * kernels::cuda::hopper::kPanelRows, head.chunk_rows());
  }

  int64_t chunk_rows() const { return chunk_rows_; }
  const std::vector<float>& lse() const { return lse_; }
  const std::vector<float>& loss() const { return loss_; }
  const uint8_t* gradient() const { return gradient_->bytes().data(); }
  // How the last microbatch was computed.
  const std::vector<kernels::Choice>& choices() const { return choices_; }
  // Of the last microbatch, per row.
  double dropped_mass() const { return sums_.dropped_mass / static_cast<double>(shape_.rows); }
  // The predicted relative error of the last microbatch; 0 unless it was sampled.
  double predicted_error() const {
    return sums_.squared_gradient > 0.0 ? std::sqrt(sums_.sampling_variance / sums_.squared_gradient) : 0.0;
  }
  float sample_threshold() const { return sample_threshold_; }
  // Of the microbatches from now on.
  void set_sample_seed(uint64_t seed) { sample_seed_ = seed; }

  void WarmUp(int in_flight) {
    const Clock::time_point begin = Clock::now();
    while (SecondsSince(begin) < kWarmUpSeconds) Run(kWarmUps, in_flight);
  }

  // Runs `count` microbatches back to back; the times between their ends, the first left out.
  std::vector<double> Run(int count, int in_flight) {
    std::vector<Clock::time_point> ends;
    for (int i = 0; i < count; ++i) {
      for (int64_t begin = 0; begin < shape_.rows; begin += chunk_rows_) {
        {
          absl::MutexLock lock(&mutex_);
          AwaitUnfinished(in_flight - 1);
          ++unfinished_;
        }
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

  // Waits until no more than `chunks` of them are unfinished.
  void AwaitUnfinished(int chunks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto few = [this, chunks]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return unfinished_ <= chunks; };
    mutex_.Await(absl::Condition(&few));
  }

  void Submit(int64_t begin, std::vector<Clock::time_point>* ends) {
    auto work = std::make_shared<Work>();
    const bool gradients = call_ == Call::kLossAndGradients || call_ == Call::kBackward;
    const int64_t end = std::min(begin + chunk_rows_, shape_.rows);
    // As many slices as there are devices that divide a chunk's rows.
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
      if (deferral_ != nullptr) Defer(first, slice, work->chunk);
      work->slices.push_back(slice);
    }
    work->chunk.options = options_;
    work->chunk.hidden_dtype = dtype_;
    work->chunk.accumulate_gradients = gradients;
    work->chunk.slices = absl::MakeSpan(work->slices);
    kernels::ChunkCallbacks callbacks;
    callbacks.on_results = [](absl::Status status) { Check(status, "on_results"); };
    callbacks.on_done = [this, work, ends, begin](absl::Status status) {
      Check(status, "on_done");
      absl::MutexLock lock(&mutex_);
      if (begin == 0) sums_ = {};
      for (const kernels::Slice& slice : work->slices) {
        sums_.dropped_mass += slice.sums.dropped_mass;
        sums_.sampling_variance += slice.sums.sampling_variance;
        sums_.squared_gradient += slice.sums.squared_gradient;
      }
      sample_threshold_ = work->chunk.sample_threshold;
      choices_ = work->chunk.choices;
      if (ends != nullptr) ends->push_back(Clock::now());
      --unfinished_;
    };
    head_.Submit(&work->chunk, std::move(callbacks));
  }

  // What a deferred microbatch has more than others.
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
  const kernels::LossOptions options_;
  const Call call_;
  const Deferral* const deferral_;
  const int64_t element_ = static_cast<int64_t>(kernels::SizeOf(dtype_));
  std::vector<float> lse_, loss_, entropy_;
  std::unique_ptr<kernels::StagingMemory> hidden_, gradient_;
  int64_t chunk_rows_ = 0;
  absl::Mutex mutex_;
  int unfinished_ ABSL_GUARDED_BY(mutex_) = 0;
  // Of the last microbatch; written by the backend's thread, read when no chunk is under way.
  kernels::SliceSums sums_;
  float sample_threshold_ = 0.0f;
  std::vector<kernels::Choice> choices_;
  uint64_t sample_seed_ = 1;
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_GPU_MICROBATCH_H_
