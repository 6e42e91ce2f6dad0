// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/loss_work.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/call_errors.h"
#include "client/cpp/cuda_driver.h"

namespace lossd::client::internal {

// ---- The work ----

namespace {

// Opening messages, with targets and weights of the range, are kept below what any gRPC peer takes.
constexpr uint64_t kMaxOpenBytes = 4 << 20;
constexpr uint64_t kOpenOverhead = 64 << 10;  // room for the small fields of an opening message

uint64_t RowsPerStream(uint64_t max_message_bytes, uint64_t bytes_per_row) {
  const uint64_t open_bytes = std::clamp(max_message_bytes, kOpenOverhead + 1024, kMaxOpenBytes);
  return (open_bytes - kOpenOverhead) / bytes_per_row;
}

// What a caller says of one of its pointers.
struct CallersRows {
  absl::string_view field;
  const void* address = nullptr;  // null: there are none
};

// The GPU that all of them are on; nullopt for memory of the host.
absl::StatusOr<std::optional<int>> Locate(Memory memory, std::initializer_list<CallersRows> all) {
  std::optional<int> gpu;
  absl::string_view first;
  for (const CallersRows& rows : all) {
    if (memory == Memory::kHost || rows.address == nullptr) continue;
    const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
    if (!driver.ok()) return driver.status();
    const absl::StatusOr<int> found = (*driver)->DeviceOf(rows.address);
    if (!found.ok()) {
      return ArgumentError(rows.field, absl::StrCat(absl::Hex(reinterpret_cast<uintptr_t>(rows.address))),
                           absl::StrCat("is not memory of a GPU: ", found.status().message()));
    }
    if (gpu.value_or(*found) != *found) {
      return ArgumentError(rows.field, *found,
                           absl::StrCat("is on GPU ", *found, "; ", first, " is on GPU ", *gpu));
    }
    gpu = *found;
    first = rows.field;
  }
  return gpu;
}

// A stream that is given, in the field of that name, is of the GPU of the rows.
absl::StatusOr<std::shared_ptr<const StreamPoint>> PointOf(absl::string_view field,
                                                           const std::optional<void*>& stream, Memory memory,
                                                           std::optional<int> gpu) {
  if (!stream.has_value()) return nullptr;
  if (memory == Memory::kHost)
    return ArgumentError(field, "a stream", "is given, and the rows are memory of the host");
  if (!gpu.has_value()) return nullptr;  // nothing is copied
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  return driver.ok() ? (*driver)->PointOf(*stream, *gpu) : driver.status();
}

absl::StatusOr<RowsPlace> PlaceOf(absl::string_view stream_field, const std::optional<void*>& stream,
                                  Memory memory, std::initializer_list<CallersRows> rows) {
  const absl::StatusOr<std::optional<int>> gpu = Locate(memory, rows);
  if (!gpu.ok()) return gpu.status();
  auto after = PointOf(stream_field, stream, memory, *gpu);
  if (!after.ok()) return after.status();
  return RowsPlace{*gpu, *std::move(after)};
}

class ForwardWork : public LossWork {
 public:
  ForwardWork(const Microbatch& microbatch, const LossOutputs& outputs, const ComputeOptions& options)
      : LossWork(
            microbatch.head, microbatch.step, options.accumulate_gradients,
            options.accumulate_gradients || options.retain, microbatch.hidden_size, microbatch.hidden_dtype,
            PlaceOf(
                "microbatch.stream", microbatch.stream, microbatch.memory,
                {{"microbatch.hidden", microbatch.hidden}, {"outputs.grad_hidden", outputs.grad_hidden}})),
        targets_(microbatch.targets.begin(), microbatch.targets.end()),
        row_weights_(microbatch.row_weights.begin(), microbatch.row_weights.end()),
        microbatch_(microbatch),
        outputs_(outputs),
        options_(options),
        ignore_index_(IgnoreIndex(options.loss)),
        valid_rows_(CountValid(targets_, ignore_index_)) {
    microbatch_.targets = targets_;
    microbatch_.row_weights = row_weights_;
  }

  absl::Status Validate() const override {
    absl::Status status = ValidateCall(microbatch_, outputs_, options_);
    status.Update(located());
    return status;
  }

  uint64_t MovedRows() const override { return valid_rows_; }

  std::vector<Rows> Split(int streams, uint64_t max_message_bytes) const override {
    return SplitRanges(targets_, ignore_index_, streams,
                       RowsPerStream(max_message_bytes, sizeof(int32_t) + sizeof(float)));
  }

  absl::StatusOr<StreamWork> Prepare(Rows rows, const SliceRule& rule,
                                     std::optional<GradientsId> meant) const override {
    StreamWork work;
    *work.first.mutable_open() = MakeOpen(rows);
    SetMeant(meant, work.first.mutable_open());
    work.rows = rows;
    work.slices = DivideIntoSlices(targets_, ignore_index_, rows, rule);
    work.hidden = static_cast<const char*>(microbatch_.hidden);
    work.row_bytes = row_bytes();
    work.outputs = outputs_;
    work.gpu = gpu();
    work.after = after();
    absl::Status filled = FillUnsent(outputs_, rows, work.slices);
    if (!filled.ok()) return filled;
    return work;
  }

  absl::Status Conclude(LossResult* total) const override {
    if (total->valid_rows != valid_rows_) {
      return ServerSent("a count of ", total->valid_rows, " valid rows; ", valid_rows_, " were sent");
    }
    if (options_.reduction == v1::REDUCTION_MEAN) total->normalizer = Normalizer();
    total->loss = valid_rows_ > 0 ? total->loss_sum / total->normalizer : 0.0;
    return absl::OkStatus();
  }

 private:
  double Normalizer() const { return options_.normalizer.value_or(static_cast<double>(valid_rows_)); }

  v1::OpenMicrobatch MakeOpen(Rows rows) const {
    v1::OpenMicrobatch open;
    open.set_head(head());
    if (step().has_value()) open.set_step(*step());
    open.set_microbatch_id(microbatch_.id);
    open.set_microbatch_rows(targets_.size());
    open.mutable_rows()->set_begin(rows.begin);
    open.mutable_rows()->set_end(rows.end);
    open.set_hidden_dtype(microbatch_.hidden_dtype);
    *open.mutable_options() = options_.loss;
    open.set_reduction(options_.reduction);
    if (options_.reduction == v1::REDUCTION_MEAN) open.set_normalizer(Normalizer());
    if (options_.grad_output.has_value()) open.set_grad_output(*options_.grad_output);
    open.set_retain(options_.retain);
    SetWanted(&open);
    open.mutable_targets()->Add(targets_.begin() + rows.begin, targets_.begin() + rows.end);
    if (!row_weights_.empty()) {
      open.mutable_row_weights()->Add(row_weights_.begin() + rows.begin, row_weights_.begin() + rows.end);
    }
    return open;
  }

  void SetWanted(v1::OpenMicrobatch* open) const {
    open->set_want_grad_hidden(outputs_.grad_hidden != nullptr);
    open->set_accumulate_gradients(accumulates());
    open->set_want_row_loss(!outputs_.row_loss.empty());
    open->set_want_row_lse(!outputs_.row_lse.empty());
    open->set_want_row_entropy(!outputs_.row_entropy.empty());
    open->set_want_row_logprob(!outputs_.row_logprob.empty());
    open->set_want_row_argmax(!outputs_.row_argmax.empty());
  }

  const std::vector<int32_t> targets_;
  const std::vector<float> row_weights_;
  Microbatch microbatch_;  // refers to the copies above
  const LossOutputs outputs_;
  const ComputeOptions options_;
  const int32_t ignore_index_;
  const uint64_t valid_rows_;
};

class BackwardWork : public LossWork {
 public:
  BackwardWork(const RetainedGradients& gradients, void* grad_hidden, const BackwardOptions& options)
      : LossWork(
            gradients.head, gradients.step, options.accumulate_gradients, /*in_step=*/true,
            gradients.hidden_size, gradients.hidden_dtype,
            PlaceOf("gradients.stream", gradients.stream, gradients.memory, {{"grad_hidden", grad_hidden}})),
        grad_loss_(gradients.grad_loss.begin(), gradients.grad_loss.end()),
        grad_lse_(gradients.grad_lse.begin(), gradients.grad_lse.end()),
        grad_entropy_(gradients.grad_entropy.begin(), gradients.grad_entropy.end()),
        gradients_(gradients) {
    gradients_.grad_loss = grad_loss_;
    gradients_.grad_lse = grad_lse_;
    gradients_.grad_entropy = grad_entropy_;
    outputs_.grad_hidden = grad_hidden;
  }

  absl::Status Validate() const override {
    absl::Status status = ValidateBackward(gradients_);
    status.Update(located());
    if (accumulates() && !step().has_value()) {
      status.Update(ArgumentError("gradients.step", "nothing", "is absent; accumulate_gradients needs it"));
    }
    return status;
  }

  uint64_t MovedRows() const override { return outputs_.grad_hidden == nullptr ? 0 : grad_loss_.size(); }

  std::vector<Rows> Split(int streams, uint64_t max_message_bytes) const override {
    // No row is known to be ignored.
    return SplitRanges(std::vector<int32_t>(grad_loss_.size(), 0), /*ignore_index=*/-1, streams,
                       RowsPerStream(max_message_bytes, 3 * sizeof(float)));
  }

  absl::StatusOr<StreamWork> Prepare(Rows rows, const SliceRule&,
                                     std::optional<GradientsId> meant) const override {
    StreamWork work;
    v1::OpenBackward* open = work.first.mutable_backward();
    open->set_head(head());
    if (step().has_value()) open->set_step(*step());
    open->set_microbatch_id(gradients_.id);
    open->mutable_rows()->set_begin(rows.begin);
    open->mutable_rows()->set_end(rows.end);
    open->set_want_grad_hidden(outputs_.grad_hidden != nullptr);
    open->set_accumulate_gradients(accumulates());
    SetMeant(meant, open);
    const auto add = [rows](const std::vector<float>& values, auto* field) {
      if (!values.empty()) field->Add(values.begin() + rows.begin, values.begin() + rows.end);
    };
    add(grad_loss_, open->mutable_grad_loss());
    add(grad_lse_, open->mutable_grad_lse());
    add(grad_entropy_, open->mutable_grad_entropy());
    work.rows = rows;
    work.server_cuts = true;
    work.row_bytes = row_bytes();
    work.outputs = outputs_;
    work.gpu = gpu();
    work.after = after();
    absl::Status filled = FillUnsent(outputs_, rows, {});
    if (!filled.ok()) return filled;
    return work;
  }

  absl::Status Conclude(LossResult* total) const override {
    total->loss = total->loss_sum;
    return absl::OkStatus();
  }

 private:
  const std::vector<float> grad_loss_, grad_lse_, grad_entropy_;
  RetainedGradients gradients_;  // refers to the copies above
  LossOutputs outputs_;
};

}  // namespace

absl::Status LossWork::FillUnsent(const LossOutputs& outputs, Rows rows,
                                  absl::Span<const Rows> slices) const {
  LossOutputs on_host = outputs;
  if (gpu().has_value()) on_host.grad_hidden = nullptr;
  FillUnsentRows(on_host, row_bytes_, rows, slices);
  if (!gpu().has_value() || outputs.grad_hidden == nullptr) return absl::OkStatus();
  for (const Rows& unsent : UnsentRows(rows, slices)) {
    uint8_t* const to = static_cast<uint8_t*>(outputs.grad_hidden) + unsent.begin * row_bytes_;
    absl::Status status = FillZeros(to, unsent.size() * row_bytes_, gpu(), after().get());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::unique_ptr<LossWork> LossWork::Forward(const Microbatch& microbatch, const LossOutputs& outputs,
                                            const ComputeOptions& options) {
  return std::make_unique<ForwardWork>(microbatch, outputs, options);
}

std::unique_ptr<LossWork> LossWork::Backward(const RetainedGradients& gradients, void* grad_hidden,
                                             const BackwardOptions& options) {
  return std::make_unique<BackwardWork>(gradients, grad_hidden, options);
}

// ---- SlicePlaces ----

namespace {

uint64_t ShareOf(const SharedRegion& region) { return ShareOfRegion(region.size()); }

}  // namespace

SlicePlaces::SlicePlaces(std::shared_ptr<SharedRegion> region, bool may_wait, std::optional<int> gpu)
    : region_(std::move(region)), may_wait_(may_wait), copiers_(CopiersFor(region_.get(), gpu)) {}

SlicePlaces::Copiers SlicePlaces::CopiersFor(const SharedRegion* region, std::optional<int> gpu) {
  const std::optional<int> owner = region == nullptr ? std::nullopt : region->gpu();
  if (!owner.has_value()) return {gpu, gpu};
  // Of two GPUs each writes what it has to the other's memory: reading from there is far slower on some.
  const bool both = gpu.has_value() && *gpu != *owner;
  if (both && LetReach(region->At(0), region->size(), *owner, *gpu)) return {gpu, owner};
  return {owner, owner};
}

SliceRule SlicePlaces::RuleFor(const SliceRule& rule, Rows rows, uint64_t row_bytes) const {
  if (region_ == nullptr) return rule;
  return InRegion(rule, rows.size(), WantedRows(region_->size(), region_->gpu().has_value(), row_bytes));
}

void SlicePlaces::Name(const StreamWork& work, v1::ComputeLossRequest* first) {
  if (region_ == nullptr) return;
  after_ = work.after;
  if (!work.server_cuts) {
    first->mutable_open()->set_region(region_->id());
    return;
  }
  if (work.outputs.grad_hidden == nullptr || work.rows.size() == 0) return;
  absl::MutexLock lock(&mu_);
  uint64_t rows = std::min(work.rows.size(), ShareOf(*region_) / work.row_bytes);
  for (; rows > 0 && !room_.has_value(); rows /= 2) {
    const std::optional<uint64_t> offset = region_->Take(rows * work.row_bytes);
    if (offset.has_value()) room_ = {*offset, rows * work.row_bytes, work.rows.begin, work.row_bytes};
  }
  if (!room_.has_value()) return;
  v1::OpenBackward* const open = first->mutable_backward();
  open->set_region(region_->id());
  open->mutable_in_region()->set_offset(room_->offset);
  open->mutable_in_region()->set_bytes(room_->bytes);
}

absl::StatusOr<SlicePlaces::Place> SlicePlaces::Put(uint64_t row, absl::Span<const uint8_t> hidden) {
  if (region_ == nullptr || hidden.empty()) return Place();
  Place place;
  {
    absl::MutexLock lock(&mu_);
    const bool more_than_share = !taken_.empty() && taken_bytes_ + hidden.size() > ShareOf(*region_);
    const std::optional<uint64_t> offset = more_than_share ? std::nullopt : region_->Take(hidden.size());
    if (!offset.has_value()) return Place{WithoutRoom(hidden.size())};
    taken_[row] = {*offset, hidden.size()};
    taken_bytes_ += hidden.size();
    place = {Place::Kind::kRegion, *offset};
  }
  const absl::Status copied =
      CopyBytes(region_->At(place.offset), hidden.data(), hidden.size(), copiers_.to_region, after_.get());
  if (!copied.ok()) return copied;
  return place;
}

SlicePlaces::Place::Kind SlicePlaces::WithoutRoom(uint64_t bytes) {
  if (!may_wait_) return Place::Kind::kMessage;
  if (!taken_.empty()) return Place::Kind::kWait;
  // A call that has nothing in the region cannot wait for its own answers.
  const bool waits = freed_ != nullptr && region_->Await(bytes, this, freed_);
  return waits ? Place::Kind::kWaitForOthers : Place::Kind::kMessage;
}

bool SlicePlaces::WaitForOthers(std::function<void()> freed) {
  if (region_ == nullptr || !may_wait_) return false;
  absl::MutexLock lock(&mu_);
  freed_ = std::move(freed);
  return true;
}

void SlicePlaces::StopWaitingForOthers() {
  if (region_ == nullptr) return;
  absl::MutexLock lock(&mu_);
  freed_ = nullptr;
  region_->StopWaiting(this);
}

const uint8_t* SlicePlaces::Find(uint64_t row, uint64_t bytes) const {
  absl::MutexLock lock(&mu_);
  if (room_.has_value()) {
    const uint64_t before = (row - room_->first_row) * room_->row_bytes;
    const bool inside = row >= room_->first_row && before <= room_->bytes && bytes <= room_->bytes - before;
    return inside ? region_->At(room_->offset + before) : nullptr;
  }
  const auto place = taken_.find(row);
  return place == taken_.end() || place->second.bytes != bytes ? nullptr : region_->At(place->second.offset);
}

absl::Status SlicePlaces::Fetch(const uint8_t* from, uint64_t bytes, void* to) const {
  return CopyBytes(to, from, bytes, copiers_.from_region, after_.get());
}

void SlicePlaces::Free(uint64_t row) {
  absl::MutexLock lock(&mu_);
  const auto place = taken_.find(row);
  if (place == taken_.end()) return;
  region_->Give(place->second.offset);
  taken_bytes_ -= place->second.bytes;
  taken_.erase(place);
}

void SlicePlaces::End(const absl::Status& status) {
  StopWaitingForOthers();
  if (region_ == nullptr) return;
  absl::MutexLock lock(&mu_);
  if (status.ok()) {
    if (room_.has_value()) region_->Give(room_->offset);
  } else {
    region_->AfterFailure(status, !taken_.empty() || room_.has_value());
  }
}

}  // namespace lossd::client::internal
