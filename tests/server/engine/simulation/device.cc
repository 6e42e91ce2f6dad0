// SPDX-License-Identifier: Apache-2.0
#include "tests/server/engine/simulation/device.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lossd::engine::simulation {
namespace {

class Memory final : public kernels::StagingMemory, public kernels::RetainedMemory {
 public:
  explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(bytes), 0xff) {}  // NaN where nothing was sent
  absl::Span<uint8_t> bytes() override { return absl::MakeSpan(bytes_); }
  int64_t size() const override { return static_cast<int64_t>(bytes_.size()); }

 private:
  std::vector<uint8_t> bytes_;
};

absl::Status Failed(const char* what) { return absl::InternalError(absl::StrCat("the plan fails ", what)); }

int64_t CountValid(const kernels::Slice& slice) {
  int64_t valid = 0;
  for (int64_t i = 0; i < slice.rows; ++i) valid += slice.targets[i] != kernels::kIgnoredTarget ? 1 : 0;
  return valid;
}

// Rows of zeros, in the places of rows that nobody sent; streams have numbers from 1 on.
bool IsGap(const kernels::Slice& slice) {
  return slice.hidden != nullptr && static_cast<const float*>(slice.hidden)[1] == 0.0f;
}

bool IsAccumulated(const kernels::Slice& slice, int64_t row) {
  return slice.accumulate == nullptr || slice.accumulate[row] != 0;
}

}  // namespace

// ---- Heads ----

DeviceHead::DeviceHead(Device* device, const kernels::HeadConfig& config) : device_(device), config_(config) {
  Restart();
  version_ = ++device_->versions_;
  device_->heads_[config.vocab_size] = this;
}

DeviceHead::~DeviceHead() {
  CheckIdle("the end of the head");
  if (device_->heads_[config_.vocab_size] == this) device_->heads_.erase(config_.vocab_size);
}

int64_t DeviceHead::chunk_rows() const { return device_->chunk_rows; }

std::string CheckPromises(const Generation& generation) {
  if (generation.broken) return "";
  for (const int64_t name : generation.promised) {
    if (!generation.times.contains(name))
      return absl::StrCat("row ", name % kMostRows, " of ", name / kMostRows,
                          " was promised and is not there");
  }
  return "";
}

void DeviceHead::Restart() {
  generation_number_ = static_cast<int64_t>(device_->generations_.size());
  device_->generations_.push_back(std::make_unique<Generation>());
  device_->vocab_of_generation_[generation_number_] = config_.vocab_size;
  generations_.push_back(device_->generations_.back().get());
}

void DeviceHead::CheckIdle(const char* what) {
  if (in_flight_ > 0) device_->violation_(absl::StrCat(what, " came while a chunk of the head is in flight"));
  if (std::string wrong = CheckPromises(generation()); !wrong.empty())
    device_->violation_(absl::StrCat(what, " found that ", wrong));
}

void DeviceHead::Submit(kernels::Chunk* chunk, kernels::ChunkCallbacks callbacks) {
  int64_t rows = 0;
  for (const kernels::Slice& slice : chunk->slices) rows += slice.rows;
  if (rows > chunk_rows()) device_->violation_(absl::StrCat("a chunk of ", rows, " rows"));
  if (++device_->in_flight_ > device_->chunks_in_flight) device_->violation_("too many chunks in flight");
  ++in_flight_;
  device_->scheduler_->Yield();
  if (!device_->asynchronous) return Compute(*chunk, callbacks);
  device_->jobs_.push_back({this, chunk, std::move(callbacks)});
}

void DeviceHead::Compute(kernels::Chunk& chunk, kernels::ChunkCallbacks& callbacks) {
  const int64_t number = device_->chunks++;
  int64_t total = 0, position = 0;
  for (const kernels::Slice& slice : chunk.slices) {
    total += CountValid(slice);
    if (!IsGap(slice)) {
      device_->computed_rows += slice.rows;
      device_->rows_of_kind[chunk.options.embedding] += slice.rows;
    }
    if (!IsGap(slice) && !device_->failures.results.contains(number))
      device_->computed_valid_rows += CountValid(slice);
  }
  Added added{.row_gradients = chunk.options.embedding == kernels::Embedding::kGradients};
  const bool failed = device_->failures.results.contains(number);
  const bool breaks = !failed && device_->failures.done.contains(number);
  if (failed) {
    ++device_->failed_results;
  } else {
    for (kernels::Slice& slice : chunk.slices) ComputeSlice(chunk, slice, total, position, added);
    chunk.gradients = chunk.options.gradients;
  }
  const absl::Status results = failed ? Failed("a chunk") : absl::OkStatus();
  callbacks.on_results(results);
  device_->scheduler_->Yield();
  if (breaks) {
    ++device_->broken;
    generation().broken = true;
  }
  if (!failed && !breaks && chunk.accumulate_gradients) {
    for (const Added::Row& row : added.rows) {
      if (!row.accumulated) continue;
      ++generation().times[row.name];
      ++generation().rows;
    }
    generation().added.push_back(std::move(added));
  }
  --in_flight_;
  --device_->in_flight_;
  callbacks.on_done(breaks ? Failed("the accumulation of a chunk") : results);
}

void DeviceHead::ComputeSlice(const kernels::Chunk& chunk, kernels::Slice& slice, int64_t total,
                              int64_t& position, Added& added) {
  if (chunk.options.is_embedding()) {
    CheckEmbedding(chunk, slice);
    return added.row_gradients ? TakeRowGradients(chunk, slice, added) : EmbedSlice(slice);
  }
  auto* kept = static_cast<Memory*>(chunk.retained);
  float* const retained = slice.retained_offset < 0
                              ? nullptr
                              : reinterpret_cast<float*>(kept->bytes().data() + slice.retained_offset);
  const auto* hidden = slice.hidden != nullptr ? static_cast<const float*>(slice.hidden) : retained;
  if (retained != nullptr && slice.hidden != nullptr)
    std::memcpy(retained, hidden, static_cast<size_t>(slice.rows * kHidden) * sizeof(float));
  auto* const grad = static_cast<float*>(slice.grad_hidden);
  std::vector<Added::Row> rows;
  for (int64_t i = 0; i < slice.rows; ++i) {
    const bool valid = slice.targets[i] != kernels::kIgnoredTarget;
    const float name = hidden[i * kHidden];
    const float stream = hidden[i * kHidden + 1];
    const float loss = valid ? name * (slice.row_weights != nullptr ? slice.row_weights[i] : 1.0f) : 0.0f;
    if (valid && !std::isfinite(loss) && slice.first_nonfinite_row < 0) slice.first_nonfinite_row = i;
    if (slice.out.loss != nullptr) slice.out.loss[i] = loss;
    if (slice.out.lse != nullptr) slice.out.lse[i] = valid ? static_cast<float>(version_) : 0.0f;
    if (grad != nullptr) {
      const float upstream = slice.grad_scale * (slice.grad_loss != nullptr ? slice.grad_loss[i] : 1.0f);
      grad[i * kHidden] = valid ? upstream * name : 0.0f;
      grad[i * kHidden + 1] = valid ? static_cast<float>(position * kMostRows + total) : 0.0f;
    }
    if (!valid) continue;
    ++position;
    slice.sums.loss += loss;
    ++slice.sums.valid_rows;
    if (!std::isfinite(name)) continue;
    slice.sums.correct_rows += static_cast<int64_t>(name) % kVocab == slice.targets[i] ? 1 : 0;
    rows.push_back({.name = static_cast<int64_t>(name),
                    .accumulated = IsAccumulated(slice, i),
                    .stream = static_cast<int64_t>(stream),
                    .target = slice.targets[i]});
  }
  NoteRows(chunk, slice, std::move(rows), added);
}

void DeviceHead::EmbedSlice(kernels::Slice& slice) {
  auto* const out = static_cast<float*>(slice.grad_hidden);
  for (int64_t i = 0; i < slice.rows; ++i) {
    const bool valid = slice.targets[i] != kernels::kIgnoredTarget;
    out[i * kHidden] = valid ? static_cast<float>(version_) : 0.0f;
    out[i * kHidden + 1] = valid ? static_cast<float>(slice.targets[i] + 1) : 0.0f;
    slice.sums.valid_rows += valid ? 1 : 0;
  }
}

void DeviceHead::TakeRowGradients(const kernels::Chunk& chunk, kernels::Slice& slice, Added& added) {
  const auto* const gradients = static_cast<const float*>(slice.hidden);
  std::vector<Added::Row> rows;
  for (int64_t i = 0; i < slice.rows; ++i) {
    if (slice.targets[i] == kernels::kIgnoredTarget) continue;
    ++slice.sums.valid_rows;
    const float name = gradients[i * kHidden];
    if (std::isfinite(name)) {
      rows.push_back({.name = static_cast<int64_t>(name),
                      .accumulated = IsAccumulated(slice, i),
                      .stream = static_cast<int64_t>(gradients[i * kHidden + 1]),
                      .target = slice.targets[i],
                      .scale = slice.grad_scale});
    } else if (slice.first_nonfinite_row < 0) {
      slice.first_nonfinite_row = i;
    }
  }
  NoteRows(chunk, slice, std::move(rows), added);
}

void DeviceHead::CheckEmbedding(const kernels::Chunk& chunk, const kernels::Slice& slice) {
  const bool gradients = chunk.options.embedding == kernels::Embedding::kGradients;
  const bool goes_in = slice.hidden != nullptr, goes_out = slice.grad_hidden != nullptr;
  const kernels::RowOutputs& out = slice.out;
  const bool wants = out.loss != nullptr || out.lse != nullptr || out.entropy != nullptr ||
                     out.target_logprob != nullptr || out.argmax != nullptr;
  const bool has_more = slice.row_weights != nullptr || slice.grad_loss != nullptr ||
                        slice.retained_offset >= 0 || slice.target_count > 0;
  if (goes_in != gradients || goes_out == gradients || chunk.accumulate_gradients != gradients || wants ||
      has_more)
    device_->violation_("a chunk of an embedding that does not keep to its contract");
}

void DeviceHead::NoteRows(const kernels::Chunk& chunk, const kernels::Slice& slice,
                          std::vector<Added::Row> rows, Added& added) {
  if (slice.first_nonfinite_row < 0) {
    added.rows.insert(added.rows.end(), rows.begin(), rows.end());
  } else if (chunk.accumulate_gradients) {
    generation().has_bad_rows = true;
  }
}

absl::Status DeviceHead::ReadTensor(kernels::TensorId, int64_t, int64_t rows, kernels::DType,
                                    absl::Span<uint8_t> out) {
  CheckIdle("ReadTensor");
  device_->scheduler_->Yield();
  const std::vector<float> values(static_cast<size_t>(rows * kHidden), static_cast<float>(version_));
  std::memcpy(out.data(), values.data(), out.size());
  return absl::OkStatus();
}

absl::Status DeviceHead::WriteTensor(kernels::TensorId, int64_t, int64_t, kernels::DType,
                                     absl::Span<const uint8_t>) {
  CheckIdle("WriteTensor");
  device_->scheduler_->Yield();
  version_ = ++device_->versions_;
  device_->scheduler_->Yield();
  return absl::OkStatus();
}

absl::Status DeviceHead::AddGradient(kernels::Param, int64_t, int64_t, kernels::DType, float,
                                     absl::Span<const uint8_t> in) {
  CheckIdle("AddGradient");
  device_->scheduler_->Yield();
  if (device_->failures.adds.contains(device_->adds_++)) {
    ++device_->broken;
    generation().broken = true;
    return Failed("AddGradient");
  }
  Added added{.contribution = true};
  for (size_t at = 0; at < in.size(); at += kHidden * sizeof(float)) {
    float name = 0;
    std::memcpy(&name, in.data() + at, sizeof(name));
    added.rows.push_back({.name = static_cast<int64_t>(name), .accumulated = true});
    ++generation().times[static_cast<int64_t>(name)];
    ++device_->added_rows;
  }
  generation().added.push_back(std::move(added));
  device_->scheduler_->Yield();
  return absl::OkStatus();
}

absl::StatusOr<double> DeviceHead::GradNorm() {
  CheckIdle("GradNorm");
  device_->scheduler_->Yield();
  return static_cast<double>(generation().times.size());
}

absl::Status DeviceHead::ApplyStep(const kernels::OptimizerOptions& options, int64_t) {
  CheckIdle("ApplyStep");
  device_->scheduler_->Yield();
  if (generation().broken) device_->violation_("a step was applied whose gradients are broken");
  if (device_->failures.steps.contains(device_->steps_++)) {
    ++device_->broken;
    return Failed("ApplyStep");
  }
  version_ = ++device_->versions_;
  generation().closed_lazily = options.lazy_rows;
  Restart();
  device_->scheduler_->Yield();
  return absl::OkStatus();
}

absl::Status DeviceHead::ZeroGradients() {
  CheckIdle("ZeroGradients");
  device_->scheduler_->Yield();
  if (device_->failures.zeros.contains(device_->zeros_++)) {
    ++device_->broken;
    generation().broken = true;
    return Failed("ZeroGradients");
  }
  Restart();
  device_->scheduler_->Yield();
  return absl::OkStatus();
}

absl::Status DeviceHead::ZeroMoments() {
  CheckIdle("ZeroMoments");
  device_->scheduler_->Yield();
  return absl::OkStatus();
}

// ---- The device ----

absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> Device::CreateHead(const kernels::HeadConfig& config) {
  scheduler_->Yield();
  return std::make_unique<DeviceHead>(this, config);
}

absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> Device::AllocateStaging(int64_t bytes) {
  return std::make_unique<Memory>(bytes);
}

absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> Device::AllocateRetained(int64_t bytes) {
  return std::make_unique<Memory>(bytes);
}

DeviceHead* Device::Find(int64_t vocab_size) const {
  const auto it = heads_.find(vocab_size);
  return it == heads_.end() ? nullptr : it->second;
}

void Device::Work() {
  while (true) {
    scheduler_->WaitUntil("chunks", [this] { return !jobs_.empty() || stopping_; });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    job.head->Compute(*job.chunk, job.callbacks);
    scheduler_->Yield();
  }
}

}  // namespace lossd::engine::simulation
