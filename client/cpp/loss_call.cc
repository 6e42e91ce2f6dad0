// SPDX-License-Identifier: Apache-2.0
// One loss computation (loss_call.h): the work of a forward and of a backward, the places of slices, the
// messages, LossStream and LossCall, and the end of Core, which waits for its calls.
//
// A LossCall runs on the executor, step by step: Begin, StartDescribe and FinishDescribe (if the client does
// not know the head), Launch, StartPart for each range of rows, FinishPart at the end of each stream, Finish.
// A part is a range of rows. Its stream is sent again after a transient error: each try is an attempt of the
// part. A call that does not belong to a step leaves nothing in the server when it fails. If the server
// aborts such a call, for example because the weights have changed, all parts begin again: that is a new
// round (StartOver). It begins when no stream of the old round is under way any more.
//
// This file is longer than 1,200 lines, because a loss call and its streams change together.
#include "client/cpp/loss_call.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::client::internal {

// ---- The work ----

namespace {

// An opening message has the targets and weights of its range of rows. It stays below 4 MiB, the limit that
// gRPC peers have by default.
constexpr uint64_t kMaxOpenBytes = 4 << 20;
constexpr uint64_t kOpenOverhead = 64 << 10;  // bytes for the small fields of an opening message

uint64_t RowsPerStream(uint64_t max_message_bytes, uint64_t bytes_per_row) {
  const uint64_t open_bytes = std::clamp(max_message_bytes, kOpenOverhead + 1024, kMaxOpenBytes);
  return (open_bytes - kOpenOverhead) / bytes_per_row;
}

// An address of the caller's rows, and the name of the field that has it, for errors.
struct CallersRows {
  absl::string_view field;
  const void* address = nullptr;  // null: the field is not given
};

// The addresses of all pieces of rows of a call.
std::vector<CallersRows> PlacesOf(const Microbatch& microbatch, const LossOutputs& outputs) {
  std::vector<CallersRows> places;
  for (const void* address : HiddenOf(microbatch).Addresses())
    places.push_back({"microbatch.hidden", address});
  places.push_back({"microbatch.teacher_hidden", microbatch.teacher_hidden});
  for (const void* address : GradientsOf(microbatch, outputs).Addresses())
    places.push_back({"outputs.grad_hidden", address});
  return places;
}

// The one GPU that has the memory at all these addresses; nullopt: it is host memory.
absl::StatusOr<std::optional<int>> Locate(Memory memory, const std::vector<CallersRows>& all) {
  std::optional<int> gpu;
  absl::string_view first;
  for (const CallersRows& rows : all) {
    if (memory == Memory::kHost || rows.address == nullptr) continue;
    LOSSD_TRY(CudaDriver* const driver, CudaDriver::Get());
    const absl::StatusOr<int> found = driver->DeviceOf(rows.address);
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

// The point after all work that the caller has put on `stream` so far. `field` names the stream in errors.
// The stream belongs to the GPU of the rows. Null: there is no stream, or nothing is copied.
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
                                  Memory memory, const std::vector<CallersRows>& rows) {
  LOSSD_TRY(const std::optional<int> gpu, Locate(memory, rows));
  LOSSD_TRY(auto after, PointOf(stream_field, stream, memory, gpu));
  return RowsPlace{gpu, std::move(after)};
}

// RowPieces has const addresses, but the caller gave this memory for writing gradients.
uint8_t* GradientsAt(const RowPieces& grad_hidden, uint64_t row, uint64_t row_bytes) {
  return const_cast<uint8_t*>(grad_hidden.At(row, row_bytes));
}

// The work of ComputeLoss.
class ForwardWork : public LossWork {
 public:
  ForwardWork(const Microbatch& microbatch, const LossOutputs& outputs, const ComputeOptions& options)
      : LossWork(microbatch.head, microbatch.step, options.accumulate_gradients,
                 options.accumulate_gradients || options.retain, microbatch.hidden_size,
                 microbatch.hidden_dtype,
                 PlaceOf("microbatch.stream", microbatch.stream, microbatch.memory,
                         PlacesOf(microbatch, outputs))),
        targets_(microbatch.targets.begin(), microbatch.targets.end()),
        row_weights_(microbatch.row_weights.begin(), microbatch.row_weights.end()),
        advantages_(microbatch.advantages.begin(), microbatch.advantages.end()),
        old_logprobs_(microbatch.old_logprobs.begin(), microbatch.old_logprobs.end()),
        ref_logprobs_(microbatch.ref_logprobs.begin(), microbatch.ref_logprobs.end()),
        classes_(microbatch.classes.begin(), microbatch.classes.end()),
        target_classes_(microbatch.target_classes.begin(), microbatch.target_classes.end()),
        target_weights_(microbatch.target_weights.begin(), microbatch.target_weights.end()),
        microbatch_(microbatch),
        outputs_(outputs),
        hidden_(HiddenOf(microbatch)),
        grad_hidden_(GradientsOf(microbatch, outputs)),
        options_(OptionsOf(microbatch, options)),
        ignore_index_(IgnoreIndex(options.loss)),
        valid_rows_(CountValid(targets_, ignore_index_)) {
    microbatch_.targets = targets_;
    microbatch_.row_weights = row_weights_;
    microbatch_.advantages = advantages_;
    microbatch_.old_logprobs = old_logprobs_;
    microbatch_.ref_logprobs = ref_logprobs_;
    microbatch_.classes = classes_;
    microbatch_.target_classes = target_classes_;
    microbatch_.target_weights = target_weights_;
  }

  absl::Status Validate() const override {
    absl::Status status = ValidateCall(microbatch_, outputs_, options_);
    status.Update(located());
    return status;
  }

  absl::Status KnowHead(const HeadInfo& head) override {
    LOSSD_RETURN_IF_ERROR(CheckRowValues(microbatch_, options_, head.vocab_size, head.classes.get()));
    planned_.clear();
    // If the loss does not depend on targets, they need not be in the head's class list.
    if (head.classes != nullptr && TargetsCount(options_)) {
      planned_ = targets_;
      for (int32_t& target : planned_) {
        if (!std::binary_search(head.classes->begin(), head.classes->end(), target)) target = ignore_index_;
      }
    }
    valid_rows_ = CountValid(planned(), ignore_index_);
    return absl::OkStatus();
  }

  uint64_t MovedRows() const override { return valid_rows_; }
  uint64_t sent_row_bytes() const override { return row_bytes() + TeacherRowBytes(); }

  std::vector<Rows> Split(int streams, uint64_t max_message_bytes) const override {
    return SplitRanges(
        planned(), ignore_index_, streams,
        RowsPerStream(max_message_bytes, sizeof(int32_t) + (1 + NumbersOfRow()) * sizeof(float) +
                                             classes_each() * sizeof(int32_t) +
                                             microbatch_.target_count * (sizeof(int32_t) + sizeof(float))));
  }

  absl::StatusOr<StreamWork> Prepare(Rows rows, const SliceRule& rule,
                                     std::optional<GradientsId> meant) const override {
    StreamWork work;
    *work.first.mutable_open() = MakeOpen(rows);
    SetMeant(meant, work.first.mutable_open());
    work.rows = rows;
    SliceRule with_classes = rule;
    with_classes.max_rows = std::min(rule.max_rows, MostRowsWithClasses(outputs_));
    work.slices = DivideIntoSlices(planned(), ignore_index_, rows, with_classes, microbatch_.depths);
    work.hidden = hidden_;
    work.grad_hidden = grad_hidden_;
    work.row_bytes = row_bytes();
    work.teacher = static_cast<const char*>(microbatch_.teacher_hidden);
    work.teacher_row_bytes = TeacherRowBytes();
    work.outputs = outputs_;
    work.gpu = gpu();
    work.after = after();
    LOSSD_RETURN_IF_ERROR(FillUnsent(outputs_, grad_hidden_, rows, work.slices));
    return work;
  }

  absl::Status Conclude(LossResult* total) const override {
    if (total->valid_rows != valid_rows_) {
      return ServerSent("a count of ", total->valid_rows, " valid rows; ", valid_rows_, " were sent");
    }
    if (!microbatch_.depths.empty()) return ConcludeDepths(total);
    if (options_.reduction == v1::REDUCTION_MEAN) total->normalizer = Normalizer();
    total->loss = valid_rows_ > 0 ? total->loss_sum / total->normalizer : 0.0;
    return absl::OkStatus();
  }

 private:
  // A call for embedding rows has no loss, so its reduction does not matter; the server gets a sum.
  static ComputeOptions OptionsOf(const Microbatch& microbatch, ComputeOptions options) {
    if (microbatch.embedding != v1::EMBEDDING_UNSPECIFIED) options.reduction = v1::REDUCTION_SUM;
    return options;
  }

  // The number of floats that each row has for the objective.
  uint64_t NumbersOfRow() const {
    return (advantages_.empty() ? 0u : 1u) + (old_logprobs_.empty() ? 0u : 1u) +
           (ref_logprobs_.empty() ? 0u : 1u);
  }

  uint64_t TeacherRowBytes() const {
    return microbatch_.teacher_hidden_size * ElementSize(microbatch_.hidden_dtype);
  }
  uint64_t ValidRowsOf(Rows rows) const {
    return CountValid(absl::MakeSpan(planned()).subspan(rows.begin, rows.size()), ignore_index_);
  }
  double NormalizerOf(size_t depth) const {
    if (options_.reduction != v1::REDUCTION_MEAN) return 1.0;
    return microbatch_.depths[depth].normalizer.value_or(
        static_cast<double>(ValidRowsOf(RowsOfDepths(microbatch_.depths)[depth])));
  }

  absl::Status ConcludeDepths(LossResult* total) const {
    const std::vector<Rows> rows = RowsOfDepths(microbatch_.depths);
    if (total->depths.size() != rows.size())
      return ServerSent("sums of ", total->depths.size(), " depths; ", rows.size(), " were sent");
    for (size_t i = 0; i < rows.size(); ++i) {
      DepthResult& depth = total->depths[i];
      const uint64_t valid = ValidRowsOf(rows[i]);
      if (depth.valid_rows != valid) {
        return ServerSent("a count of ", depth.valid_rows, " valid rows of depth ", i, "; ", valid,
                          " were sent");
      }
      depth.normalizer = NormalizerOf(i);
      depth.loss = valid > 0 ? depth.loss_sum / depth.normalizer : 0.0;
      total->loss += double{microbatch_.depths[i].weight} * depth.loss;
    }
    return absl::OkStatus();
  }

  void SetDepths(v1::OpenMicrobatch* open) const {
    for (size_t i = 0; i < microbatch_.depths.size(); ++i) {
      v1::Depth* const depth = open->add_depths();
      depth->set_rows(microbatch_.depths[i].rows);
      depth->set_weight(microbatch_.depths[i].weight);
      if (options_.reduction == v1::REDUCTION_MEAN) depth->set_normalizer(NormalizerOf(i));
    }
  }

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
    open.set_hidden_size(hidden_size());
    *open.mutable_options() = options_.loss;
    open.set_reduction(options_.reduction);
    if (microbatch_.depths.empty() && options_.reduction == v1::REDUCTION_MEAN)
      open.set_normalizer(Normalizer());
    SetDepths(&open);
    if (options_.grad_output.has_value()) open.set_grad_output(*options_.grad_output);
    open.set_retain(options_.retain);
    open.set_embedding(microbatch_.embedding);
    SetWanted(&open);
    open.mutable_targets()->Add(targets_.begin() + rows.begin, targets_.begin() + rows.end);
    const auto add = [rows](const std::vector<float>& values, google::protobuf::RepeatedField<float>* out) {
      if (!values.empty()) out->Add(values.begin() + rows.begin, values.begin() + rows.end);
    };
    add(row_weights_, open.mutable_row_weights());
    add(advantages_, open.mutable_advantages());
    add(old_logprobs_, open.mutable_old_logprobs());
    add(ref_logprobs_, open.mutable_ref_logprobs());
    const auto each = static_cast<std::ptrdiff_t>(classes_each());
    const bool shared = each == 0;
    open.mutable_classes()->Add(
        classes_.begin() + each * static_cast<std::ptrdiff_t>(rows.begin),
        shared ? classes_.end() : classes_.begin() + each * static_cast<std::ptrdiff_t>(rows.end));
    const auto first = static_cast<std::ptrdiff_t>(rows.begin * microbatch_.target_count);
    const auto last = static_cast<std::ptrdiff_t>(rows.end * microbatch_.target_count);
    open.set_target_count(microbatch_.target_count);
    open.mutable_target_classes()->Add(target_classes_.begin() + first, target_classes_.begin() + last);
    open.mutable_target_weights()->Add(target_weights_.begin() + first, target_weights_.begin() + last);
    return open;
  }

  void SetWanted(v1::OpenMicrobatch* open) const {
    open->set_want_grad_hidden(!grad_hidden_.empty() || microbatch_.embedding == v1::EMBEDDING_ROWS);
    open->set_accumulate_gradients(accumulates());
    open->set_want_row_loss(!outputs_.row_loss.empty());
    open->set_want_row_lse(!outputs_.row_lse.empty());
    open->set_want_row_entropy(!outputs_.row_entropy.empty());
    open->set_want_row_logprob(!outputs_.row_logprob.empty());
    open->set_want_row_argmax(!outputs_.row_argmax.empty());
    open->set_class_count(outputs_.class_count);
    open->set_top_k(outputs_.top_k);
  }

  const std::vector<int32_t>& planned() const { return planned_.empty() ? targets_ : planned_; }

  // The number of entries of classes_ for each row; 0: all rows have the same classes.
  uint64_t classes_each() const { return classes_.size() == outputs_.class_count ? 0 : outputs_.class_count; }

  const std::vector<int32_t> targets_;
  const std::vector<float> row_weights_;
  const std::vector<float> advantages_, old_logprobs_, ref_logprobs_;
  const std::vector<int32_t> classes_;
  const std::vector<int32_t> target_classes_;
  const std::vector<float> target_weights_;
  Microbatch microbatch_;  // refers to the copies above
  const LossOutputs outputs_;
  const RowPieces hidden_, grad_hidden_;
  const ComputeOptions options_;
  const int32_t ignore_index_;
  uint64_t valid_rows_;
  std::vector<int32_t>
      planned_;  // targets_, with ignore_index for classes that the head lacks; empty: as targets_
};

// The work of Backward.
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
    absl::Status status = ValidateBackward(gradients_, {.accumulate_gradients = accumulates()});
    status.Update(located());
    return status;
  }

  absl::Status KnowHead(const HeadInfo& head) override { return CheckRowValues(gradients_); }

  uint64_t MovedRows() const override { return outputs_.grad_hidden == nullptr ? 0 : grad_loss_.size(); }

  std::vector<Rows> Split(int streams, uint64_t max_message_bytes) const override {
    // The client does not know which rows are ignored, so all count as valid.
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
    if (outputs_.grad_hidden != nullptr) open->set_hidden_dtype(gradients_.hidden_dtype);
    open->set_hidden_size(hidden_size());
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
    work.grad_hidden = RowPieces(outputs_.grad_hidden);
    work.gpu = gpu();
    work.after = after();
    LOSSD_RETURN_IF_ERROR(FillUnsent(outputs_, work.grad_hidden, rows, {}));
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

absl::Status LossWork::FillUnsent(const LossOutputs& outputs, const RowPieces& grad_hidden, Rows rows,
                                  absl::Span<const Rows> slices) const {
  LossOutputs on_host = outputs;
  on_host.grad_hidden = nullptr;
  FillUnsentRows(on_host, row_bytes_, rows, slices);
  if (grad_hidden.empty()) return absl::OkStatus();
  for (const Rows& unsent : UnsentRows(rows, slices)) {
    for (const Rows& part : grad_hidden.Cut(unsent)) {
      LOSSD_RETURN_IF_ERROR(FillZeros(GradientsAt(grad_hidden, part.begin, row_bytes_),
                                      part.size() * row_bytes_, gpu(), after().get()));
    }
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
  // The result is {to_region, from_region}. A region of the host, or none: the GPU of the rows copies both
  // ways, or the CPU.
  if (!owner.has_value()) return {gpu, gpu};
  // Between two GPUs, each writes its data to the other's memory, because on some machines reading from there
  // is far slower.
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
  if (work.grad_hidden.empty() || work.rows.size() == 0) return;
  absl::MutexLock lock(&mu_);
  uint64_t rows = std::min(work.rows.size(), ShareOf(*region_) / work.row_bytes);
  // Room for all rows if possible, else for half of them, and so on. The gradients of other rows come in
  // messages.
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

absl::StatusOr<SlicePlaces::Place> SlicePlaces::Put(uint64_t row, uint64_t bytes,
                                                    absl::Span<const uint8_t> hidden,
                                                    absl::Span<const uint8_t> teacher) {
  if (region_ == nullptr || bytes == 0) return Place();
  Place place;
  {
    absl::MutexLock lock(&mu_);
    // A call that has slices in the region takes at most its share, so that other calls find room, too.
    const bool more_than_share = !taken_.empty() && taken_bytes_ + bytes > ShareOf(*region_);
    const std::optional<uint64_t> offset = more_than_share ? std::nullopt : region_->Take(bytes);
    if (!offset.has_value()) return Place{WithoutRoom(bytes)};
    taken_[row] = {*offset, bytes};
    taken_bytes_ += bytes;
    place = {Place::Kind::kRegion, *offset};
  }
  if (hidden.empty()) return place;
  LOSSD_RETURN_IF_ERROR(
      CopyBytes(region_->At(place.offset), hidden.data(), hidden.size(), copiers_.to_region, after_.get()));
  if (teacher.empty()) return place;
  LOSSD_RETURN_IF_ERROR(CopyBytes(region_->At(place.offset + hidden.size()), teacher.data(), teacher.size(),
                                  copiers_.to_region, after_.get()));
  return place;
}

SlicePlaces::Place::Kind SlicePlaces::WithoutRoom(uint64_t bytes) {
  if (!may_wait_) return Place::Kind::kMessage;
  if (!taken_.empty()) return Place::Kind::kWait;
  // If the call has no slice in the region, none of its own answers frees room, so it can only wait for
  // others.
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
  return place == taken_.end() || place->second.bytes < bytes ? nullptr : region_->At(place->second.offset);
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

// ---- PayloadHolds ----

absl::AnyInvocable<void()> PayloadHolds::Take() {
  absl::MutexLock lock(&mu_);
  ++held_;
  return [self = shared_from_this()] { self->GiveBack(); };
}

void PayloadHolds::GiveBack() {
  absl::AnyInvocable<void()> task;
  {
    absl::MutexLock lock(&mu_);
    if (--held_ == 0) task = std::exchange(task_, nullptr);
  }
  if (task) task();
}

void PayloadHolds::WhenFree(absl::AnyInvocable<void()> task) {
  {
    absl::MutexLock lock(&mu_);
    if (held_ > 0) {
      task_ = std::move(task);
      return;
    }
  }
  task();
}

bool PayloadHolds::free() {
  absl::MutexLock lock(&mu_);
  return held_ == 0;
}

void PayloadHolds::WaitUntilFree() {
  auto free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return held_ == 0; };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&free));
}

// ---- Messages ----

namespace {

std::string Text(const v1::RowRange& rows) {
  return absl::StrCat("rows [", rows.begin(), ", ", rows.end(), ")");
}

absl::Status CheckCount(absl::string_view name, int count, bool wanted, const v1::RowRange& rows) {
  const uint64_t expected = wanted ? rows.end() - rows.begin() : 0;
  if (static_cast<uint64_t>(count) == expected) return absl::OkStatus();
  return ServerSent(count, " values of ", name, " for ", Text(rows), "; ", expected, " were expected");
}

absl::Status CheckClasses(absl::string_view name, int count, uint64_t each, const v1::RowRange& rows) {
  const uint64_t expected = (rows.end() - rows.begin()) * each;
  if (static_cast<uint64_t>(count) == expected) return absl::OkStatus();
  return ServerSent(count, " values of ", name, " for ", Text(rows), "; ", expected, " were expected");
}

template <typename Field, typename T>
void CopyRows(const Field& field, uint64_t begin, absl::Span<T> out) {
  if (!out.empty()) std::copy(field.begin(), field.end(), out.begin() + begin);
}

}  // namespace

absl::StatusOr<grpc::ByteBuffer> EncodeSlice(const StreamWork& work, Rows rows,
                                             absl::AnyInvocable<void()> release) {
  v1::ComputeLossRequest request;
  request.mutable_slice()->mutable_rows()->set_begin(rows.begin);
  request.mutable_slice()->mutable_rows()->set_end(rows.end);
  const absl::Span<const uint8_t> hidden = HiddenOf(work, rows);
  const absl::Span<const uint8_t> teacher = TeacherOf(work, rows);
  if (!work.gpu.has_value() && teacher.empty()) return wire::Encode(request, hidden, std::move(release));
  auto copy = std::make_unique<std::vector<uint8_t>>(hidden.size() + teacher.size());
  absl::Status copied = CopyBytes(copy->data(), hidden.data(), hidden.size(), work.gpu, work.after.get());
  if (!teacher.empty()) {
    copied.Update(
        CopyBytes(copy->data() + hidden.size(), teacher.data(), teacher.size(), work.gpu, work.after.get()));
  }
  release();  // the copy does not need the caller's memory any more
  if (!copied.ok()) return copied;
  const absl::Span<const uint8_t> bytes = *copy;
  return wire::Encode(request, bytes, [copy = std::move(copy)] {});
}

grpc::ByteBuffer EncodeSliceInRegion(const StreamWork& work, Rows rows, uint64_t offset) {
  v1::ComputeLossRequest request;
  request.mutable_slice()->mutable_rows()->set_begin(rows.begin);
  request.mutable_slice()->mutable_rows()->set_end(rows.end);
  request.mutable_slice()->mutable_in_region()->set_offset(offset);
  request.mutable_slice()->mutable_in_region()->set_bytes(rows.size() *
                                                          (work.row_bytes + work.teacher_row_bytes));
  return wire::Encode(request);
}

absl::Span<const uint8_t> HiddenOf(const StreamWork& work, Rows rows) {
  if (work.hidden.empty()) return {};
  return absl::MakeConstSpan(work.hidden.At(rows.begin, work.row_bytes), rows.size() * work.row_bytes);
}

absl::Span<const uint8_t> TeacherOf(const StreamWork& work, Rows rows) {
  if (work.teacher_row_bytes == 0) return {};
  const auto* data = reinterpret_cast<const uint8_t*>(work.teacher) + rows.begin * work.teacher_row_bytes;
  return absl::MakeConstSpan(data, rows.size() * work.teacher_row_bytes);
}

StreamAnswers::StreamAnswers(const StreamWork& work, AcceptFn accept, SlicePlaces* places)
    : work_(work),
      accept_(std::move(accept)),
      places_(places),
      answers_(work.server_cuts ? AnswerTracker::Within(work.rows) : AnswerTracker::Exactly(work.slices)) {}

absl::Status StreamAnswers::Handle(const grpc::ByteBuffer& message) {
  v1::ComputeLossResponse response;
  absl::StatusOr<wire::PayloadView> payload = wire::Decode(message, &response);
  if (!payload.ok()) return ServerSent("an unreadable message: ", payload.status().message());
  if (summary_.has_value()) return ServerSent("a message after the summary");
  switch (response.kind_case()) {
    case v1::ComputeLossResponse::kAccepted:
      return HandleAccepted(response.accepted());
    case v1::ComputeLossResponse::kSlice:
      return HandleSlice(response.slice(), *payload);
    case v1::ComputeLossResponse::kSummary:
      return HandleSummary(response.summary());
    case v1::ComputeLossResponse::KIND_NOT_SET:
      break;
  }
  return ServerSent("a message of unknown kind");
}

absl::Status StreamAnswers::HandleAccepted(const v1::MicrobatchAccepted& accepted) {
  if (accepted_.has_value()) return ServerSent("`accepted` twice");
  accepted_ = accepted;
  return accept_(accepted.state());
}

absl::Status StreamAnswers::HandleSlice(const v1::SliceResult& result, const wire::PayloadView& payload) {
  if (!accepted_.has_value()) return ServerSent("a slice before `accepted`");
  LOSSD_RETURN_IF_ERROR(answers_.Take(result.rows()));
  const Rows rows{result.rows().begin(), result.rows().end()};
  const uint8_t* in_region = nullptr;
  if (result.in_region()) {
    in_region = places_ == nullptr ? nullptr : places_->Find(rows.begin, rows.size() * work_.row_bytes);
    if (in_region == nullptr || !payload.empty())
      return ServerSent("gradients in a region for ", Text(result.rows()), ", which are not in one");
  }
  const size_t gradient_bytes = in_region != nullptr ? rows.size() * work_.row_bytes : payload.size();
  LOSSD_RETURN_IF_ERROR(CheckSizes(result, gradient_bytes, rows.size()));
  LOSSD_RETURN_IF_ERROR(TakeGradients(payload, in_region, rows));
  Scatter(result, rows);
  if (places_ != nullptr) places_->Free(rows.begin);
  received_bytes_ += gradient_bytes;
  received_in_messages_ += payload.size();
  return absl::OkStatus();
}

absl::Status StreamAnswers::CheckSizes(const v1::SliceResult& result, size_t gradient_bytes,
                                       uint64_t rows) const {
  const uint64_t expected = work_.grad_hidden.empty() ? 0 : rows * work_.row_bytes;
  if (gradient_bytes != expected) {
    return ServerSent(errors::ExactBytes(gradient_bytes), " of gradients for ", Text(result.rows()), "; ",
                      expected, " were expected");
  }
  const LossOutputs& outputs = work_.outputs;
  absl::Status status =
      CheckCount("row_loss", result.row_loss_size(), !outputs.row_loss.empty(), result.rows());
  status.Update(CheckCount("row_lse", result.row_lse_size(), !outputs.row_lse.empty(), result.rows()));
  status.Update(
      CheckCount("row_entropy", result.row_entropy_size(), !outputs.row_entropy.empty(), result.rows()));
  status.Update(
      CheckCount("row_logprob", result.row_logprob_size(), !outputs.row_logprob.empty(), result.rows()));
  status.Update(
      CheckCount("row_argmax", result.row_argmax_size(), !outputs.row_argmax.empty(), result.rows()));
  status.Update(
      CheckClasses("class_logprobs", result.class_logprobs_size(), outputs.class_count, result.rows()));
  status.Update(CheckClasses("top_logprobs", result.top_logprobs_size(), outputs.top_k, result.rows()));
  status.Update(CheckClasses("top_classes", result.top_classes_size(), outputs.top_k, result.rows()));
  return status;
}

absl::Status StreamAnswers::TakeGradients(const wire::PayloadView& payload, const uint8_t* in_region,
                                          Rows rows) const {
  if (work_.grad_hidden.empty()) return absl::OkStatus();
  uint8_t* const to = GradientsAt(work_.grad_hidden, rows.begin, work_.row_bytes);
  if (in_region != nullptr) return places_->Fetch(in_region, rows.size() * work_.row_bytes, to);
  if (work_.gpu.has_value()) {
    std::vector<uint8_t> bytes(payload.size());
    payload.CopyTo(bytes.data());
    return CopyBytes(to, bytes.data(), bytes.size(), work_.gpu, work_.after.get());
  }
  payload.CopyTo(to);
  return absl::OkStatus();
}

void StreamAnswers::Scatter(const v1::SliceResult& result, Rows rows) const {
  const LossOutputs& outputs = work_.outputs;
  CopyRows(result.row_loss(), rows.begin, outputs.row_loss);
  CopyRows(result.row_lse(), rows.begin, outputs.row_lse);
  CopyRows(result.row_entropy(), rows.begin, outputs.row_entropy);
  CopyRows(result.row_logprob(), rows.begin, outputs.row_logprob);
  CopyRows(result.row_argmax(), rows.begin, outputs.row_argmax);
  CopyRows(result.class_logprobs(), rows.begin * outputs.class_count, outputs.class_logprobs);
  CopyRows(result.top_logprobs(), rows.begin * outputs.top_k, outputs.top_logprobs);
  CopyRows(result.top_classes(), rows.begin * outputs.top_k, outputs.top_classes);
}

absl::Status StreamAnswers::HandleSummary(const v1::MicrobatchSummary& summary) {
  if (!accepted_.has_value()) return ServerSent("the summary before `accepted`");
  if (!answers_.Complete() || answers_.answered_rows() < summary.valid_rows()) {
    return ServerSent("the summary of ", summary.valid_rows(), " valid rows after results of ",
                      answers_.answered_rows(), " rows");
  }
  if (summary.state().incarnation() != accepted_->state().incarnation()) {
    return ServerSent("another incarnation in the summary than in `accepted`");
  }
  if (summary.depths_size() != work_.first.open().depths_size()) {
    return ServerSent("sums of ", summary.depths_size(), " depths; ", work_.first.open().depths_size(),
                      " were sent");
  }
  summary_ = summary;
  return absl::OkStatus();
}

absl::Status StreamAnswers::CheckEnd() const {
  if (!summary_.has_value()) return ServerSent("no summary before it ended the call");
  return absl::OkStatus();
}

// ---- LossStream ----

namespace {

constexpr char kMethod[] = "/lossd.v1.LossService/ComputeLoss";
// The most bytes of rows that are copied on the thread that begins a computation in the server's process:
// copying more takes longer than waking another thread.
constexpr uint64_t kBytesOnCallersThread = uint64_t{64} << 10;

// What copying `bytes` of a stream's rows takes time for.
wire::ClientWork WorkOf(const StreamWork& work, uint64_t bytes) {
  if (bytes == 0) return wire::ClientWork::kLittle;
  if (work.gpu.has_value()) return wire::ClientWork::kWaitForDevice;
  return bytes > kBytesOnCallersThread ? wire::ClientWork::kCopyMuch : wire::ClientWork::kLittle;
}

// Fills in what the reactions of a stream take time for: copies of the rows that it sends, a teacher's
// included, and of the gradients that it receives.
void SetWork(const StreamWork& work, wire::DirectCallOptions* options) {
  uint64_t rows = work.server_cuts ? work.rows.size() : 0;
  for (const Rows& slice : work.slices) rows += slice.size();
  const uint64_t sent = work.hidden.empty() ? 0 : work.row_bytes + work.teacher_row_bytes;
  options->sending = WorkOf(work, rows * sent);
  options->receiving = WorkOf(work, work.grad_hidden.empty() ? 0 : rows * work.row_bytes);
}

}  // namespace

LossStream::LossStream(StreamJob job, StreamAnswers::AcceptFn accept, DoneFn done)
    : job_(std::move(job)),
      work_(job_.work),
      done_(std::move(done)),
      places_(*job_.places),
      left_(work_.slices.begin(), work_.slices.end()),
      answers_(work_, std::move(accept), &places_) {}

void LossStream::Start(const std::shared_ptr<grpc::Channel>& channel) {
  // A reaction that waits for a stream of the GPU would keep other calls waiting, which gRPC has threads for.
  if (job_.direct != nullptr && work_.after == nullptr) {
    wire::DirectCallOptions options = job_.direct_options;
    SetWork(work_, &options);
    direct_ = job_.direct->Open(this, options);
  }
  if (direct_ == nullptr) {
    SetDeadline(job_.deadline, &context_);
    context_.set_initial_metadata_corked(true);  // sent together with the first message
    stub_ = std::make_unique<grpc::GenericStub>(channel);
    stub_->PrepareBidiStreamingCall(&context_, kMethod, {}, this);
  }
  const bool may_wait =
      !work_.slices.empty() && places_.WaitForOthers([executor = job_.executor, weak = weak_from_this()] {
        executor->Post([weak] {
          if (const auto stream = weak.lock()) stream->Resume(absl::InfinitePast());
        });
      });
  {
    absl::MutexLock lock(&write_mu_);
    held_ = may_wait;
    if (held_) AddHold();
    request_ = wire::Encode(work_.first);
    Send();
  }
  {
    absl::MutexLock lock(&read_mu_);
    StartRead(&response_);
  }
  StartCall();
}

void LossStream::Cancel() {
  if (direct_ != nullptr) {
    direct_->Cancel();
  } else {
    context_.TryCancel();
  }
}

void LossStream::OnWriteDone(bool ok) {
  absl::MutexLock lock(&write_mu_);
  request_.Clear();
  if (ok) SendNext();
}

absl::StatusOr<SlicePlaces::Place> LossStream::PlaceNext() {
  while (true) {
    const Rows rows = left_.front();
    const absl::StatusOr<SlicePlaces::Place> place =
        places_.Put(rows.begin, rows.size() * (work_.row_bytes + work_.teacher_row_bytes),
                    HiddenOf(work_, rows), TeacherOf(work_, rows));
    if (!place.ok() || place->kind != SlicePlaces::Place::Kind::kMessage || rows.size() <= job_.rule.max_rows)
      return place;
    const std::vector<Rows> parts = CutForMessages(rows, job_.rule);
    left_.pop_front();
    left_.insert(left_.begin(), parts.begin(), parts.end());
    absl::MutexLock lock(&read_mu_);
    answers_.Replace(rows, parts);
  }
}

void LossStream::Send() {
  if (left_.empty()) {
    StartWriteLast(&request_, {});  // sends the end together with the message
    ReleaseHold();
  } else {
    StartWrite(&request_);
  }
}

void LossStream::SendNext() {
  if (left_.empty()) return;
  unsent_ = SendSlice();
  if (!unsent_.ok()) Cancel();
}

absl::Status LossStream::SendSlice() {
  using Kind = SlicePlaces::Place::Kind;
  const absl::StatusOr<SlicePlaces::Place> place = PlaceNext();
  const bool for_others = place.ok() && place->kind == Kind::kWaitForOthers;
  waiting_ = for_others || (place.ok() && place->kind == Kind::kWait);
  if (for_others) {
    WaitForOthers();
  } else {
    wait_end_ = absl::InfiniteFuture();
  }
  if (!place.ok() || waiting_) return place.status();
  const Rows rows = left_.front();
  left_.pop_front();
  const uint64_t bytes = HiddenOf(work_, rows).size() + TeacherOf(work_, rows).size();
  if (place->kind == Kind::kRegion) {
    request_ = EncodeSliceInRegion(work_, rows, place->offset);
  } else {
    LOSSD_TRY(request_, EncodeSlice(work_, rows, job_.holds->Take()));
    *job_.moved += bytes;
  }
  sent_bytes_ += bytes;
  Send();
  return absl::OkStatus();
}

void LossStream::WaitForOthers() {
  if (wait_end_ != absl::InfiniteFuture()) return;  // the end of this wait is planned already
  wait_end_ = clocks::SteadyNow() + job_.patience;
  job_.executor->PostAt(wait_end_, [weak = weak_from_this(), end = wait_end_] {
    if (const auto stream = weak.lock()) stream->Resume(end);
  });
}

void LossStream::Resume(absl::Time end) {
  absl::MutexLock lock(&write_mu_);
  if (!held_ || !waiting_) return;
  if (end == wait_end_) places_.StopWaitingForOthers();  // waited long enough: the slice goes in a message
  SendNext();
}

void LossStream::ReleaseHold() {
  if (std::exchange(held_, false)) RemoveHold();
}

bool LossStream::TakeAnswer() {
  absl::MutexLock lock(&read_mu_);
  const uint64_t before = answers_.received_in_messages();
  error_ = answers_.Handle(response_);
  *job_.moved += answers_.received_in_messages() - before;
  response_.Clear();
  if (!error_.ok()) Cancel();
  return error_.ok();
}

void LossStream::OnReadDone(bool ok) {
  const bool goes_on = ok && TakeAnswer();
  {
    absl::MutexLock lock(&write_mu_);
    if (!goes_on) return ReleaseHold();
    if (waiting_) SendNext();
  }
  absl::MutexLock lock(&read_mu_);
  StartRead(&response_);
}

absl::Status LossStream::EndStatus(const grpc::Status& status) {
  if (!error_.ok()) return error_;
  if (!status.ok()) return CallStatus(status, job_.peer);
  return answers_.CheckEnd();
}

void LossStream::OnDone(const grpc::Status& status) {
  StreamEnd end;
  {
    absl::MutexLock lock(&read_mu_);
    end.status = EndStatus(status);
    if (answers_.summary().has_value()) end.summary = *answers_.summary();
    end.received_bytes = answers_.received_bytes();
  }
  {
    absl::MutexLock lock(&write_mu_);
    request_.Clear();
    end.sent_bytes = sent_bytes_;
    if (!unsent_.ok()) end.status = unsent_;
  }
  places_.End(end.status);
  DoneFn done = std::move(done_);
  done(std::move(end));  // may destroy this
}

// ---- LossCall ----

namespace {

void NameRun(const std::string& run, v1::ComputeLossRequest* first) {
  first->has_backward() ? first->mutable_backward()->set_run(run) : first->mutable_open()->set_run(run);
}

bool RefusedForLimits(const absl::Status& status) {
  return status.code() == absl::StatusCode::kInvalidArgument ||
         (status.code() == absl::StatusCode::kResourceExhausted && !IsTransient(status));
}

bool Aborted(const absl::Status& status) { return status.code() == absl::StatusCode::kAborted; }

}  // namespace

struct LossCall::Describe {
  grpc::ClientContext context;
  v1::DescribeHeadRequest request;
  v1::HeadDescription response;
};

LossCall::LossCall(Core* core, std::unique_ptr<LossWork> work, const CallOptions& options,
                   LossCallback callback)
    : core_(core),
      work_(std::move(work)),
      options_(options),
      start_(clocks::SteadyNow()),
      deadline_(start_ +
                (options.timeout > absl::ZeroDuration() ? options.timeout : core->options().loss_timeout)),
      answers_(&core->head_cache(), work_->head(), work_->step(), work_->accumulates(), work_->in_step()),
      callback_(std::move(callback)) {}

void LossCall::Start() {
  core_->Add(shared_from_this());
  core_->executor().RunOrPost([self = shared_from_this()] { self->Begin(); });
}

void LossCall::Cancel() {
  absl::MutexLock lock(&mu_);
  if (done_ || cancelled_) return;
  cancelled_ = true;
  // The executor still lives here: the client waits for calls that are not done, and this call cannot become
  // done while mu_ is held.
  core_->executor().Post([self = shared_from_this()] {
    if (!self->finishing_) self->Fail(absl::CancelledError("cancelled by the caller"));
  });
}

bool LossCall::Done() const {
  absl::MutexLock lock(&mu_);
  return done_;
}

absl::StatusOr<LossResult> LossCall::Wait() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&called_back_));
  return result_;
}

bool LossCall::WaitFor(absl::Duration timeout) {
  absl::MutexLock lock(&mu_);
  return clocks::AwaitFor(mu_, absl::Condition(&called_back_), timeout);
}

void LossCall::Begin() {
  if (absl::Status status = work_->Validate(); !status.ok()) return Fail(status);
  std::optional<HeadInfo> facts = core_->head_cache().Facts(work_->head());
  if (facts.has_value() && facts->hidden_size == work_->hidden_size()) {
    Launch(*facts, /*fresh=*/false);
  } else {
    StartDescribe();
  }
}

void LossCall::StartDescribe() {
  auto describe = std::make_shared<Describe>();
  describe->request.set_head(work_->head());
  SetDeadline(deadline_, &describe->context);
  describing_ = true;
  ++describe_attempts_;
  ++under_way_;
  describe_ = describe;
  core_->connections().heads()->async()->DescribeHead(
      &describe->context, &describe->request, &describe->response,
      [self = shared_from_this()](const grpc::Status& status) {
        self->core_->executor().Post([self, result = CallStatus(status, self->core_->connections().peer())] {
          self->FinishDescribe(result);
        });
      });
}

void LossCall::FinishDescribe(const absl::Status& status) {
  --under_way_;
  const std::shared_ptr<Describe> describe = std::exchange(describe_, nullptr);
  if (finishing_) return MaybeFinish();
  if (start_over_.has_value()) return MaybeStartOver();
  if (!status.ok()) {
    const std::optional<absl::Time> next = NextAttempt(status, describe_attempts_, Repeat::kIfTransient);
    if (!next.has_value()) return Fail(WithAttempts(answers_.Interpret(status), describe_attempts_));
    core_->executor().PostAt(*next, [self = shared_from_this(), round = rounds_] {
      if (self->Goes(round)) self->StartDescribe();
    });
    return;
  }
  core_->head_cache().Learn(describe->response);
  const uint64_t hidden_size = describe->response.spec().hidden_size();
  if (hidden_size != work_->hidden_size()) {
    return Fail(ArgumentError(
        "microbatch.hidden_size", work_->hidden_size(),
        absl::StrCat("is ", work_->hidden_size(), ", but head \"", work_->head(), "\" has ", hidden_size)));
  }
  const HeadInfo facts = HeadInfo::Of(describe->response);
  describing_ = false;
  facts_are_fresh_ = !parts_.empty();
  if (parts_.empty()) {
    Launch(facts, /*fresh=*/true);
  } else {
    Relaunch(facts);
  }
}

void LossCall::Launch(const HeadInfo& facts, bool fresh) {
  facts_ = facts;
  // What the client remembers of the head may be out of date, so it asks before it refuses the call.
  if (absl::Status status = work_->KnowHead(facts); !status.ok())
    return fresh ? Fail(status) : StartDescribe();
  const int wanted = options_.streams > 0 ? options_.streams : StreamsWanted();
  lent_streams_ = core_->LendStreams(wanted - 1);
  const std::vector<Rows> ranges = work_->Split(1 + lent_streams_, core_->options().max_message_bytes);
  total_.streams = static_cast<int>(ranges.size());
  parts_.resize(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) parts_[i].rows = ranges[i];
  for (size_t i = 0; i < ranges.size() && !finishing_; ++i) StartPart(i);
}

int LossCall::StreamsWanted() const {
  const int connections = core_->connections().count();
  // In deterministic mode (row_grid above 0) rows have an order: the server may answer a range of rows only
  // after the ranges before it. Then more streams do not help.
  const uint64_t bytes = MovedBytes();
  if (bytes == 0 || work_->gpu().has_value() || facts_.limits.row_grid() > 0) return connections;
  if (core_->connections().RegionFor(std::nullopt, bytes) == nullptr) return connections;
  return std::max(connections, StreamsInRegion(bytes, std::thread::hardware_concurrency()));
}

void LossCall::StartPart(size_t index) {
  Part& part = parts_[index];
  const absl::StatusOr<SliceRule> rule = Rule();
  if (!rule.ok()) return Fail(rule.status());
  part.rule = *rule;
  const absl::StatusOr<std::optional<GradientsId>> meant = answers_.Meant();
  if (!meant.ok()) return Fail(meant.status());
  // In deterministic mode the server may need rows of other calls before it answers a slice, so a slice must
  // not wait for room (may_wait).
  auto places = std::make_unique<SlicePlaces>(
      MovedBytes() > 0 ? core_->connections().RegionFor(work_->gpu(), MovedBytes()) : nullptr,
      /*may_wait=*/rule->row_grid == 0, work_->gpu());
  const SliceRule cut = places->RuleFor(*rule, part.rows, work_->sent_row_bytes());
  absl::StatusOr<StreamWork> work = work_->Prepare(part.rows, cut, *meant);
  if (!work.ok()) return Fail(work.status());
  NameRun(core_->options().run, &work->first);
  places->Name(*work, &work->first);
  StreamJob job{
      .work = *std::move(work),
      .rule = *rule,
      .deadline = deadline_,
      .peer = core_->connections().peer(),
      .direct = wire::DirectServer::Find(core_->connections().peer().target),
      .direct_options = {.client = core_->connections().direct_client(),
                         .deadline = deadline_,
                         .max_message_bytes = static_cast<size_t>(core_->options().max_message_bytes)},
      .holds = holds_,
      .places = std::move(places),
      .moved = core_->connections().moved(),
      .executor = &core_->executor(),
      .patience = options_.patience};
  auto stream = std::make_shared<LossStream>(
      std::move(job),
      [self = shared_from_this()](const v1::HeadState& state) { return self->answers_.Accept(state); },
      [self = shared_from_this(), index](StreamEnd end) {
        // After an error, FinishPart may begin another attempt and open a region, which takes too long for
        // RunOrPost.
        const bool is_short = end.status.ok();
        auto finish = [self, index, end = std::move(end)] { self->FinishPart(index, end); };
        Executor& executor = self->core_->executor();
        is_short ? executor.RunOrPost(std::move(finish)) : executor.Post(std::move(finish));
      });
  ++part.attempts;
  ++under_way_;
  part.stream = stream;
  core_->connections().Begin();
  stream->Start(core_->connections().channel(index));
}

std::optional<absl::Time> LossCall::NextAttempt(const absl::Status& status, int attempts,
                                                Repeat repeat) const {
  RetryOptions retry = core_->options().retry;
  if (options_.max_attempts > 0) retry.max_attempts = options_.max_attempts;
  const absl::Time now = clocks::SteadyNow();
  const auto wait = WaitBeforeRepeat(retry, status, attempts, deadline_ - now, Jitter(), repeat);
  if (!wait.has_value()) return std::nullopt;
  return now + *wait;
}

bool LossCall::Relearn(Part& part, const absl::Status& status) {
  if (!RefusedForLimits(status)) return false;
  if (facts_are_fresh_ && !WouldCutOtherwise(part)) return false;
  part.refused = status;
  if (facts_are_fresh_) {
    Relaunch(facts_);
  } else if (!describing_) {
    StartDescribe();
  }
  return true;
}

void LossCall::Relaunch(const HeadInfo& facts) {
  facts_ = facts;
  for (size_t i = 0; i < parts_.size() && !finishing_; ++i) {
    Part& part = parts_[i];
    if (part.refused.ok()) continue;
    if (!WouldCutOtherwise(part)) return Fail(part.refused);
    part.refused = absl::OkStatus();
    ++total_.repeats;
    StartPart(i);
  }
}

absl::StatusOr<SliceRule> LossCall::Rule() const {
  return MakeSliceRule(work_->sent_row_bytes(), options_.slice_bytes, facts_.limits);
}

bool LossCall::WouldCutOtherwise(const Part& part) const {
  const absl::StatusOr<SliceRule> rule = Rule();
  return !rule.ok() || rule->max_rows < part.rule.max_rows || rule->row_grid != part.rule.row_grid ||
         rule->max_rows_in_region < part.rule.max_rows_in_region;
}

void LossCall::FinishPart(size_t index, const StreamEnd& end) {
  --under_way_;
  Part& part = parts_[index];
  part.stream = nullptr;
  core_->connections().End();
  total_.sent_bytes += end.sent_bytes;
  total_.received_bytes += end.received_bytes;
  // The next round sends all rows again, so the result of this stream does not count.
  if (start_over_.has_value() && !finishing_) return MaybeStartOver();
  if (end.status.ok()) {
    part.done = true;
    AddSummary(end.summary);
    return MaybeFinish();
  }
  core_->connections().DropUnusableRegions();
  if (finishing_) return MaybeFinish();

  const absl::Status status = answers_.Interpret(end.status);
  if (Relearn(part, status) || BeginAgain(status)) return;
  const std::optional<absl::Time> next = NextAttempt(status, part.attempts, Repeat::kIfTransient);
  if (!next.has_value()) return Fail(WithAttempts(status, AttemptsOf(part, status)));
  ++part.transient_failures;
  ++total_.repeats;
  core_->executor().PostAt(*next, [self = shared_from_this(), index, round = rounds_] {
    if (self->Goes(round)) self->StartPart(index);
  });
}

int LossCall::AttemptsOf(const Part& part, const absl::Status& status) const {
  if (IsTransient(status)) return part.attempts;
  // A restartable call changes nothing in the server until it succeeds, so only its rounds count.
  if (work_->restartable()) return Aborted(status) ? rounds_ : 1;
  return 1 + part.transient_failures;
}

bool LossCall::BeginAgain(const absl::Status& status) {
  if (!work_->restartable() || !Aborted(status)) return false;
  start_over_ = NextAttempt(status, rounds_, Repeat::kIfTransientOrAborted);
  if (!start_over_.has_value()) return false;
  if (describe_ != nullptr) describe_->context.TryCancel();
  CancelStreams();
  MaybeStartOver();
  return true;
}

void LossCall::MaybeStartOver() {
  if (under_way_ > 0) return;
  core_->executor().PostAt(*start_over_, [self = shared_from_this()] {
    if (!self->finishing_) self->StartOver();
  });
}

void LossCall::StartOver() {
  ++rounds_;
  start_over_.reset();
  describing_ = false;
  describe_attempts_ = 0;
  answers_.BeginAgain();
  LossResult begun;
  begun.streams = total_.streams;
  begun.repeats = total_.repeats + static_cast<int>(parts_.size());
  begun.sent_bytes = total_.sent_bytes;
  begun.received_bytes = total_.received_bytes;
  total_ = begun;
  for (Part& part : parts_) part = Part{.rows = part.rows};
  for (size_t i = 0; i < parts_.size() && !finishing_ && !start_over_.has_value(); ++i) StartPart(i);
}

namespace {

void AddTo(v1::ObjectiveSums& total, const v1::ObjectiveSums& more) {
  total.set_rows(total.rows() + more.rows());
  total.set_clipped_rows(total.clipped_rows() + more.clipped_rows());
  total.set_ratio(total.ratio() + more.ratio());
  total.set_old_kl(total.old_kl() + more.old_kl());
  total.set_ref_kl(total.ref_kl() + more.ref_kl());
}

void AddTo(std::vector<DepthResult>& total, const v1::MicrobatchSummary& more) {
  total.resize(std::max(total.size(), static_cast<size_t>(more.depths_size())));
  for (int i = 0; i < more.depths_size(); ++i) {
    const v1::DepthSummary& sums = more.depths(i);
    DepthResult& depth = total[static_cast<size_t>(i)];
    depth.loss_sum += sums.loss_sum();
    depth.z_loss_sum += sums.z_loss_sum();
    depth.entropy_sum += sums.entropy_sum();
    depth.valid_rows += sums.valid_rows();
    depth.correct_rows += sums.correct_rows();
    depth.accumulated_rows += sums.accumulated_rows();
    depth.repeated_rows += sums.repeated_rows();
  }
}

}  // namespace

void LossCall::AddSummary(const v1::MicrobatchSummary& summary) {
  total_.loss_sum += summary.loss_sum();
  total_.z_loss_sum += summary.z_loss_sum();
  total_.entropy_sum += summary.entropy_sum();
  total_.dropped_mass += summary.dropped_mass();
  total_.sampling_variance += summary.sampling_variance();
  total_.squared_gradient += summary.squared_gradient();
  AddTo(total_.objective, summary.objective());
  total_.divergence_sum += summary.divergence_sum();
  total_.target_loss_sum += summary.target_loss_sum();
  AddTo(total_.depths, summary);
  total_.valid_rows += summary.valid_rows();
  total_.correct_rows += summary.correct_rows();
  total_.unlisted_rows += summary.unlisted_rows();
  total_.accumulated_rows += summary.accumulated_rows();
  total_.repeated_rows += summary.repeated_rows();
  total_.queue_seconds += summary.queue_seconds();
  total_.compute_seconds += summary.compute_seconds();
  total_.incarnation = summary.state().incarnation();
  total_.step = summary.state().step();
  total_.weights_version = summary.state().weights_version();
}

void LossCall::Fail(const absl::Status& status) {
  if (error_.ok()) error_ = status;
  finishing_ = true;
  if (describe_ != nullptr) describe_->context.TryCancel();
  CancelStreams();
  MaybeFinish();
}

void LossCall::CancelStreams() {
  for (const Part& part : parts_) {
    if (part.stream != nullptr) part.stream->Cancel();
  }
}

void LossCall::MaybeFinish() {
  if (under_way_ > 0) return;
  const bool complete = std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.done; });
  if (!finishing_ && !complete) return;  // a part waits for its next attempt
  finishing_ = true;
  const bool calls_here = callback_ == nullptr || (options_.short_callback && error_.ok());
  if (calls_here && holds_->free()) return Finish();
  // WhenFree keeps at most one task; Finish may still be posted twice, and ignores the second call.
  holds_->WhenFree([self = shared_from_this()] { self->core_->executor().Post([self] { self->Finish(); }); });
}

absl::StatusOr<LossResult> LossCall::MakeResult() {
  if (!error_.ok()) return error_;
  LOSSD_RETURN_IF_ERROR(work_->Conclude(&total_));
  total_.wall_seconds = absl::ToDoubleSeconds(clocks::SteadyNow() - start_);
  return total_;
}

void LossCall::Finish() {
  if (finished_) return;
  finished_ = true;
  core_->GiveStreamsBack(lent_streams_);
  const absl::StatusOr<LossResult> result = MakeResult();
  {
    absl::MutexLock lock(&mu_);
    result_ = result;
    done_ = true;
  }
  if (callback_) std::exchange(callback_, nullptr)(result);
  {
    absl::MutexLock lock(&mu_);
    called_back_ = true;
  }
  core_->Remove(shared_from_this());  // the core may be destroyed from here on
}

// ---- Core ----

Core::~Core() {
  absl::flat_hash_set<std::shared_ptr<LossCall>> calls;
  {
    absl::MutexLock lock(&mu_);
    calls = calls_;
  }
  for (const auto& call : calls) call->Cancel();
  auto empty = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return calls_.empty(); };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&empty));
}

int Core::LendStreams(int wanted) {
  absl::MutexLock lock(&mu_);
  const int lent = std::clamp(wanted, 0, spare_streams_);
  spare_streams_ -= lent;
  return lent;
}

void Core::GiveStreamsBack(int count) {
  absl::MutexLock lock(&mu_);
  spare_streams_ += count;
}

void Core::Add(std::shared_ptr<LossCall> call) {
  absl::MutexLock lock(&mu_);
  calls_.insert(std::move(call));
}

void Core::Remove(const std::shared_ptr<LossCall>& call) {
  absl::MutexLock lock(&mu_);
  calls_.erase(call);
}

}  // namespace lossd::client::internal
