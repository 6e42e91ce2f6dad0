// SPDX-License-Identifier: Apache-2.0
// FakeDevice: a backend with trivial arithmetic and scripted failures, so that engine tests see exactly which
// rows were accumulated, and when.
//
// For a row with hidden state x and target y: loss = x[0] * row_weight, and dL/dx = grad_scale * grad_loss *
// x. The row is correct if y is the last digit of x[0]. Its z-loss is 0.25 and its entropy 0.5. The head's
// "weight gradient" is the list of the x[0] values that were accumulated since the last step. A row whose
// x[0] is not finite is bad.
#ifndef LOSSD_TESTS_SERVER_ENGINE_FAKE_BACKEND_H_
#define LOSSD_TESTS_SERVER_ENGINE_FAKE_BACKEND_H_

#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/engine_options.h"

namespace lossd::engine {

// The script and the record of the fake backend. The test and the backend share it; it must outlive the
// backend.
class FakeDevice {
 public:
  int64_t chunk_rows = 16;
  int64_t slice_rows = 0;  // 0: chunk_rows
  int chunks_in_flight = 1;
  bool asynchronous = false;  // chunks finish on a thread of the backend's own
  absl::Duration delay = absl::ZeroDuration();
  // Called for every chunk, with its number from 0. If the status is not OK, the chunk fails at that point.
  std::function<absl::Status(int64_t)> fail_results = [](int64_t) { return absl::OkStatus(); };
  std::function<absl::Status(int64_t)> fail_done = [](int64_t) { return absl::OkStatus(); };
  // If not OK, every step, or every zeroing of gradients, fails with it, when something may already have
  // changed.
  absl::Status fail_step;
  absl::Status fail_zero;
  absl::Status fail_moments;  // for every zeroing of moments
  absl::Status fail_write;    // for every write of a tensor
  absl::Status fail_norm;
  // Called while a step is being applied.
  std::function<void()> on_step = [] {};

  // Called for every slice before it is computed.
  std::function<void(const kernels::Slice&)> inspect = [](const kernels::Slice&) {};

  // Close keeps chunks from being computed until Open is called.
  void Close() {
    absl::MutexLock lock(&mutex_);
    open_ = false;
  }
  void Open() {
    absl::MutexLock lock(&mutex_);
    open_ = true;
  }
  void WaitUntilOpen() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&open_));
  }

  // Between BeginRecord and EndRecord, a chunk has returned results, which may end calls, but is not recorded
  // yet. Questions about the record wait for EndRecord.
  void BeginRecord() {
    absl::MutexLock lock(&mutex_);
    ++unrecorded_;
  }
  void EndRecord() {
    absl::MutexLock lock(&mutex_);
    --unrecorded_;
  }
  void Record(std::vector<int64_t> chunk_rows_of_slices, const std::vector<float>& accumulated) {
    absl::MutexLock lock(&mutex_);
    chunks_.push_back(std::move(chunk_rows_of_slices));
    accumulated_.insert(accumulated_.end(), accumulated.begin(), accumulated.end());
  }
  std::vector<float> accumulated() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &FakeDevice::AllIsRecorded));
    return accumulated_;
  }
  void ClearAccumulated() {
    absl::MutexLock lock(&mutex_);
    accumulated_.clear();
  }
  // The rows of each slice, for each chunk.
  std::vector<std::vector<int64_t>> chunks() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &FakeDevice::AllIsRecorded));
    return chunks_;
  }
  int64_t NextChunk() {
    absl::MutexLock lock(&mutex_);
    return next_chunk_++;
  }
  // Called for every AddGradient; a status that is not OK makes it fail.
  std::function<absl::Status()> fail_add = [] { return absl::OkStatus(); };
  // Decides how a chunk's gradients are computed.
  std::function<kernels::Gradients(const kernels::Chunk&)> decide = [](const kernels::Chunk& chunk) {
    return chunk.options.gradients;
  };
  // Called for every chunk before it is computed.
  std::function<void(const kernels::Chunk&)> on_chunk = [](const kernels::Chunk&) {};
  double dropped_mass = 0.0;       // for each row whose gradients are filtered
  double sampling_variance = 0.0;  // for each row whose gradients are sampled; also the next one
  double squared_gradient = 0.0;
  std::optional<double> grad_norm;  // replaces the default, which is the number of accumulated values
  int steps = 0;                    // the number of applied steps
  int64_t last_update = 0;          // the update number of the last step
  int moments_zeroed = 0;           // how often moments were zeroed
  std::atomic<int> heads = 0;       // the number of heads that exist

 private:
  bool AllIsRecorded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return unrecorded_ == 0; }

  absl::Mutex mutex_;
  int unrecorded_ ABSL_GUARDED_BY(mutex_) = 0;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
  std::vector<float> accumulated_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::vector<int64_t>> chunks_ ABSL_GUARDED_BY(mutex_);
  int64_t next_chunk_ ABSL_GUARDED_BY(mutex_) = 0;
};

class FakeRetained final : public kernels::RetainedMemory {
 public:
  explicit FakeRetained(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {}
  int64_t size() const override { return static_cast<int64_t>(bytes_.size()); }
  uint8_t* data() { return bytes_.data(); }

 private:
  std::vector<uint8_t> bytes_;
};

class FakeHead final : public kernels::HeadKernels {
 public:
  FakeHead(FakeDevice* device, kernels::HeadConfig config) : device_(device), config_(config) {
    ++device_->heads;
    if (device->asynchronous) thread_ = std::thread([this] { Work(); });
  }
  ~FakeHead() override {
    --device_->heads;
    if (!thread_.joinable()) return;
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    thread_.join();
  }

  const kernels::HeadConfig& config() const override { return config_; }
  kernels::DType compute_dtype() const override { return kernels::DType::kFloat32; }
  int64_t chunk_rows() const override { return device_->chunk_rows; }
  int64_t slice_rows() const override {
    return device_->slice_rows > 0 ? device_->slice_rows : device_->chunk_rows;
  }
  kernels::MemoryBytes memory() const override { return {}; }
  std::vector<kernels::Choice> Describe() const override { return {{.what = "head", .choice = "fake"}}; }

  void Submit(kernels::Chunk* chunk, kernels::ChunkCallbacks callbacks) override {
    if (!device_->asynchronous) return Compute(*chunk, callbacks);
    absl::MutexLock lock(&mutex_);
    queue_.emplace_back(chunk, std::move(callbacks));
  }

  // The tensors of the fake head have no values.
  absl::Status ReadTensor(kernels::TensorId, int64_t, int64_t, kernels::DType, absl::Span<uint8_t>) override {
    return absl::OkStatus();
  }
  absl::Status WriteTensor(kernels::TensorId, int64_t, int64_t, kernels::DType,
                           absl::Span<const uint8_t>) override {
    return device_->fail_write;
  }
  // Appends the values, multiplied by `scale`, to the list; fp32 only. Fails if fail_add says so.
  absl::Status AddGradient(kernels::Param, int64_t, int64_t rows, kernels::DType, float scale,
                           absl::Span<const uint8_t> in) override {
    if (absl::Status status = device_->fail_add(); !status.ok()) return status;
    std::vector<float> values(in.size() / sizeof(float));
    std::memcpy(values.data(), in.data(), in.size());
    for (float& value : values) value *= scale;
    device_->Record({rows}, values);
    return absl::OkStatus();
  }
  absl::StatusOr<double> GradNorm() override {
    if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
    if (!device_->fail_norm.ok()) return device_->fail_norm;
    return device_->grad_norm.value_or(static_cast<double>(device_->accumulated().size()));
  }
  absl::Status ApplyStep(const kernels::OptimizerOptions&, int64_t update) override {
    device_->on_step();
    if (!device_->fail_step.ok()) return device_->fail_step;
    ++device_->steps;
    device_->last_update = update;
    device_->ClearAccumulated();
    return absl::OkStatus();
  }
  absl::Status ZeroGradients() override {
    if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
    if (!device_->fail_zero.ok()) return device_->fail_zero;
    device_->ClearAccumulated();
    return absl::OkStatus();
  }
  absl::Status ZeroMoments() override {
    if (!device_->fail_moments.ok()) return device_->fail_moments;
    ++device_->moments_zeroed;
    return absl::OkStatus();
  }

 private:
  void Compute(kernels::Chunk& chunk, kernels::ChunkCallbacks& callbacks) {
    device_->WaitUntilOpen();
    chunk.gradients = device_->decide(chunk);
    chunk.choices = {{.what = "gradients", .choice = std::string(Name(chunk.gradients))}};
    if (device_->delay > absl::ZeroDuration()) absl::SleepFor(device_->delay);
    const int64_t number = device_->NextChunk();
    device_->on_chunk(chunk);
    if (absl::Status status = device_->fail_results(number); !status.ok()) {
      callbacks.on_results(status);
      const absl::Status done = device_->fail_done(number);
      callbacks.on_done(done.ok() ? status : done);
      return;
    }
    std::vector<float> accumulated;
    std::vector<int64_t> rows;
    for (kernels::Slice& slice : chunk.slices) {
      rows.push_back(slice.rows);
      device_->inspect(slice);
      const std::vector<float> added = ComputeSlice(chunk, slice);
      if (slice.first_nonfinite_row < 0) accumulated.insert(accumulated.end(), added.begin(), added.end());
    }
    device_->BeginRecord();
    callbacks.on_results(absl::OkStatus());
    const absl::Status status = device_->fail_done(number);
    if (status.ok()) device_->Record(std::move(rows), accumulated);
    device_->EndRecord();
    callbacks.on_done(status);
  }

  std::vector<float> ComputeSlice(const kernels::Chunk& chunk, kernels::Slice& slice) {
    std::vector<float> accumulated;
    auto* const retained = slice.retained_offset < 0
                               ? nullptr
                               : reinterpret_cast<float*>(static_cast<FakeRetained*>(chunk.retained)->data() +
                                                          slice.retained_offset);
    const auto* hidden = slice.hidden != nullptr ? static_cast<const float*>(slice.hidden) : retained;
    if (retained != nullptr && slice.hidden != nullptr) {
      std::memcpy(retained, hidden, static_cast<size_t>(slice.rows * config_.hidden_size) * sizeof(float));
    }
    auto* grad = static_cast<float*>(slice.grad_hidden);
    const int64_t d = config_.hidden_size;
    for (int64_t i = 0; i < slice.rows; ++i) {
      const bool valid = slice.targets[i] != kernels::kIgnoredTarget;
      const float id = hidden[i * d];
      const float loss = valid ? id * (slice.row_weights != nullptr ? slice.row_weights[i] : 1.0f) : 0.0f;
      if (valid && !std::isfinite(loss) && slice.first_nonfinite_row < 0) slice.first_nonfinite_row = i;
      if (slice.out.loss != nullptr) slice.out.loss[i] = loss;
      for (int64_t j = 0; grad != nullptr && j < d; ++j) {
        const float upstream = slice.grad_loss != nullptr ? slice.grad_loss[i] : 1.0f;
        grad[i * d + j] = valid ? slice.grad_scale * upstream * hidden[i * d + j] : 0.0f;
      }
      if (!valid) continue;
      slice.sums.loss += loss;
      slice.sums.z_loss += 0.25;
      slice.sums.entropy += 0.5;
      if (chunk.gradients == kernels::Gradients::kFiltered) slice.sums.dropped_mass += device_->dropped_mass;
      if (chunk.gradients == kernels::Gradients::kSampled) {
        slice.sums.sampling_variance += device_->sampling_variance;
        slice.sums.squared_gradient += device_->squared_gradient;
      }
      ++slice.sums.valid_rows;
      if (std::fmod(id, 10.0f) == static_cast<float>(slice.targets[i])) ++slice.sums.correct_rows;
      const bool wanted = slice.accumulate == nullptr || slice.accumulate[i] != 0;
      if (chunk.accumulate_gradients && wanted) accumulated.push_back(id);
    }
    return accumulated;
  }

  void Work() {
    while (true) {
      std::pair<kernels::Chunk*, kernels::ChunkCallbacks> next;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &FakeHead::HasWorkOrStops));
        if (queue_.empty()) return;
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      Compute(*next.first, next.second);
    }
  }
  bool HasWorkOrStops() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !queue_.empty(); }

  FakeDevice* const device_;
  const kernels::HeadConfig config_;
  absl::Mutex mutex_;
  std::deque<std::pair<kernels::Chunk*, kernels::ChunkCallbacks>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class FakeStaging final : public kernels::StagingMemory {
 public:
  explicit FakeStaging(size_t bytes) : bytes_(bytes) {}
  absl::Span<uint8_t> bytes() override { return absl::MakeSpan(bytes_); }

 private:
  std::vector<uint8_t> bytes_;
};

class FakeBackend final : public kernels::Backend {
 public:
  explicit FakeBackend(FakeDevice* device) : device_(device) {}
  kernels::BackendInfo info() const override { return {"fake", "fake", kernels::DType::kFloat32}; }
  kernels::MemoryStats memory() const override { return {}; }
  int max_chunks_in_flight() const override { return device_->chunks_in_flight; }
  absl::StatusOr<kernels::MemoryBytes> PlanHead(const kernels::HeadConfig&) const override {
    return kernels::MemoryBytes{};
  }
  absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> CreateHead(
      const kernels::HeadConfig& config) override {
    if (config.vocab_size > 1'000'000)
      return absl::ResourceExhaustedError("vocab_size is too large for the fake");
    return std::make_unique<FakeHead>(device_, config);
  }
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateStaging(int64_t bytes) override {
    return std::make_unique<FakeStaging>(static_cast<size_t>(bytes));
  }
  absl::Status PlanHostMemory(kernels::MemoryKind kind, int64_t bytes) override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> AllocateRetained(int64_t bytes) override {
    return std::make_unique<FakeRetained>(bytes);
  }

 private:
  FakeDevice* const device_;
};

// An observer that does nothing. Tests derive from it to observe only some events.
class SilentObserver : public EngineObserver {
 public:
  void OnChunk(const ChunkReport&) override {}
  void OnChunkLeft(const ChunkReport&) override {}
  void OnChoices(const ChoicesReport&) override {}
  void OnContribution(const ContributionReport&) override {}
  void OnStep(const StepReport&) override {}
  void OnDeviceError(const absl::Status&) override {}
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_FAKE_BACKEND_H_
