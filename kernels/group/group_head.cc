// SPDX-License-Identifier: Apache-2.0
// GroupHead: chunks, tensors and steps of a head with replicas (group_head.h).
#include "kernels/group/group_head.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/validation.h"

namespace lossd::kernels {

GroupHead::GroupHead(const HeadConfig& config, ReplicaLayout layout, Members* members,
                     std::vector<std::unique_ptr<HeadKernels>> heads, std::unique_ptr<Replicas> replicas)
    : config_(config),
      heads_(members, std::move(heads)),
      layout_(std::move(layout)),
      places_(PlacesOf(divided(), members->size())),
      limits_{.members = members->size() / places_,
              .member_rows = heads_.chunk_rows(),
              .least_rows = layout_.least_rows},
      members_(members),
      replicas_(std::move(replicas)) {}

GroupHead::~GroupHead() {
  heads_.WaitUntilIdle();
  members_
      ->WithAll([this] {
        replicas_.reset();
        return absl::OkStatus();
      })
      .IgnoreError();
}

std::optional<PagingStats> GroupHead::paging() const {
  std::optional<PagingStats> sum;
  for (int i = 0; i < heads_.size(); ++i) {
    const std::optional<PagingStats> one = heads_.head(i).paging();
    if (!one.has_value()) return std::nullopt;
    sum = sum.has_value() ? * sum += *one : *one;
  }
  return sum;
}

std::vector<Choice> GroupHead::Describe() const {
  return Describe(head(WithMostClasses(divided(), members_->size())).Describe(), divided(), members_->size(),
                  limits_.member_rows, layout_);
}

std::vector<Choice> GroupHead::Describe(std::vector<Choice> first, const HeadConfig& divided, int members,
                                        int64_t member_rows, const ReplicaLayout& layout) {
  const int places = PlacesOf(divided, members);
  const int replicas = members / places;
  const std::string few = absl::StrCat("fewer than ", layout.least_rows, " rows at once go to one of them");
  std::vector<Choice> own = {
      {.what = "chunk",
       .choice = absl::StrCat("up to ", replicas * member_rows, " rows"),
       .reason =
           absl::StrCat(replicas, places == 1 ? " devices" : " replicas", ", each up to ", member_rows)},
      {.what = "devices", .choice = absl::StrCat(members, ", by rows"), .reason = few}};
  if (places > 1) {
    own[1].choice = absl::StrCat(members, ", ", replicas, " replicas of ", places, " by vocabulary");
    own[1].reason = absl::StrCat(layout.reason, "; up to ", MostClassesOf(divided, members),
                                 " classes each; ", few, " replicas");
  }
  if (!first.empty()) first.erase(first.begin());  // replaces the member's entry about its own chunks
  first.insert(first.begin(), own.begin(), own.end());
  return first;
}

// ---- Chunks ----

absl::Status GroupHead::Check(const Chunk& chunk) const {
  LOSSD_RETURN_IF_ERROR(ValidateChunk(config_, chunk_rows(), chunk));
  if (chunk.teacher != nullptr) LOSSD_RETURN_IF_ERROR(CheckTeacher(*chunk.teacher));
  for (size_t i = 0; i < chunk.slices.size(); ++i) {
    if (chunk.slices[i].rows <= slice_rows()) continue;
    return errors::FieldError(absl::StrCat("slices[", i, "].rows"),
                              absl::StrCat("be at most ", slice_rows(), ", those of one device"),
                              chunk.slices[i].rows);
  }
  return absl::OkStatus();
}

std::vector<int> GroupHead::HomesOf(const Chunk& chunk) const {
  if (places_ == 1 || layout_.member_of == nullptr) return {};
  std::vector<int> homes;
  for (const Slice& slice : chunk.slices) {
    // Rows of an embedding have no hidden states, so the place of the answer counts. Retained rows have no
    // place (null).
    const void* const rows =
        slice.hidden != nullptr || slice.retained_offset >= 0 ? slice.hidden : slice.grad_hidden;
    const int member = rows == nullptr ? -1 : layout_.member_of(rows);
    homes.push_back(member < 0 ? -1 : member / places_);
  }
  return homes;
}

std::vector<ChunkPart> GroupHead::DivideRows(const Chunk& chunk) {
  const auto count = static_cast<uint64_t>(limits_.members);
  if (chunk.independent && chunk.accumulate_gradients) {
    DivisionLimits whole = limits_;
    whole.least_rows = std::numeric_limits<int64_t>::max();
    return Divide(chunk.slices, whole, static_cast<int>(chunk.turn % count));
  }
  return Divide(chunk.slices, limits_, static_cast<int>(next_first_++ % count), HomesOf(chunk));
}

std::vector<ChunkPart> GroupHead::Parts(const Chunk& chunk) {
  std::vector<ChunkPart> parts;
  for (ChunkPart& of_replica : DivideRows(chunk)) {
    const int first = of_replica.member * places_;
    for (int place = 0; place < places_; ++place) {
      of_replica.member = first + place;
      parts.push_back(of_replica);
    }
  }
  return parts;
}

void GroupHead::Submit(Chunk* chunk, ChunkCallbacks callbacks) {
  if (absl::Status status = Check(*chunk); !status.ok()) {
    heads_.Refuse(std::move(status), std::move(callbacks));
    return;
  }
  if (chunk->accumulate_gradients) summed_ = false;
  const auto* const teacher = static_cast<const GroupHead*>(chunk->teacher);  // CheckTeacher
  heads_.Submit(chunk, std::move(callbacks), Parts(*chunk), teacher == nullptr ? nullptr : &teacher->heads_);
}

absl::Status GroupHead::CheckTeacher(const HeadKernels& teacher) const {
  constexpr absl::string_view kField = "distillation.teacher";
  LOSSD_RETURN_IF_ERROR(ValidateTeacher(config_, teacher.config(), kField));
  const auto* const group = dynamic_cast<const GroupHead*>(&teacher);
  if (group == nullptr || group->members_ != members_ || group->places_ != places_) {
    return errors::FieldError(kField, "be a head that the same devices divide as they divide the student",
                              "one that is divided in another way", absl::StatusCode::kUnimplemented);
  }
  return heads_.CheckTeacher(group->heads_);
}

// ---- Tensors ----

std::vector<GroupHead::Owned> GroupHead::OwnersOf(Param param, int64_t row_begin, int64_t rows) const {
  std::vector<Owned> owners;
  for (int member = 0; member < members_->size(); ++member) {
    const ShardRows own = ShardRowsOf(divided(), param, {member, members_->size()});
    const int64_t first = std::max(row_begin, own.first);
    const int64_t end = std::min(row_begin + rows, own.end());
    if (first < end) owners.push_back({member, first, end - first, first - row_begin});
  }
  return owners;
}

absl::Status GroupHead::ForOwners(
    const std::vector<Owned>& owners,
    absl::FunctionRef<absl::Status(HeadKernels& head, const Owned& owned)> fn) const {
  for (const Owned& owned : owners) {
    absl::Status status = members_->On(owned.member, [&] { return fn(head(owned.member), owned); });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status GroupHead::SumGradients() {
  if (!sum_lost_.ok()) return sum_lost_;
  if (summed_) return absl::OkStatus();
  heads_.WaitUntilIdle();
  absl::Status status = members_->WithAll([this] { return replicas_->SumGradients(); });
  if (!status.ok()) {
    sum_lost_ =
        absl::Status(status.code(), absl::StrCat("the gradients of several devices could not be added "
                                                 "up (zero them and repeat the step): ",
                                                 status.message()));
    return sum_lost_;
  }
  summed_ = true;
  return absl::OkStatus();
}

absl::Status GroupHead::ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                   absl::Span<uint8_t> out) {
  absl::Status status = ValidateTensorAccess(config_, id, row_begin, rows, dtype, out.size());
  if (!status.ok()) return status;
  heads_.WaitUntilIdle();
  if (id.role == Role::kGradient) status = SumGradients();
  if (!status.ok()) return status;
  const size_t row_bytes = static_cast<size_t>(ShapeOf(config_, id.param).cols) * SizeOf(dtype);
  std::vector<Owned> owners = OwnersOf(id.param, row_begin, rows);
  const bool of_classes = id.param == Param::kWeight || id.param == Param::kBias;
  if (!of_classes && owners.size() > 1) owners.resize(1);  // all owners have the same values
  return ForOwners(owners, [&](HeadKernels& head, const Owned& owned) {
    return head.ReadTensor(id, owned.first, owned.rows, dtype,
                           out.subspan(static_cast<size_t>(owned.offset) * row_bytes,
                                       static_cast<size_t>(owned.rows) * row_bytes));
  });
}

absl::Status GroupHead::WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                    absl::Span<const uint8_t> in) {
  absl::Status status = ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size());
  if (!status.ok()) return status;
  heads_.WaitUntilIdle();
  const size_t row_bytes = static_cast<size_t>(ShapeOf(config_, id.param).cols) * SizeOf(dtype);
  if (id.role == Role::kValue) {
    return members_->ForEach([&](int member) {
      const ShardRows kept = StoredRowsOf(divided(), id, {member, members_->size()});
      const int64_t first = std::max(row_begin, kept.first);
      const int64_t count = std::min(row_begin + rows, kept.end()) - first;
      if (count <= 0) return absl::OkStatus();
      return head(member).WriteTensor(id, first, count, dtype,
                                      in.subspan(static_cast<size_t>(first - row_begin) * row_bytes,
                                                 static_cast<size_t>(count) * row_bytes));
    });
  }
  if (id.role == Role::kGradient) status = SumGradients();
  if (!status.ok()) return status;
  return ForOwners(OwnersOf(id.param, row_begin, rows), [&](HeadKernels& head, const Owned& owned) {
    return head.WriteTensor(id, owned.first, owned.rows, dtype,
                            in.subspan(static_cast<size_t>(owned.offset) * row_bytes,
                                       static_cast<size_t>(owned.rows) * row_bytes));
  });
}

// ---- Gradients and steps ----

absl::Status GroupHead::AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                                    absl::Span<const uint8_t> in) {
  absl::Status status =
      ValidateTensorAccess(config_, {param, Role::kGradient}, row_begin, rows, dtype, in.size());
  if (!status.ok()) return status;
  heads_.WaitUntilIdle();
  const size_t row_bytes = static_cast<size_t>(ShapeOf(config_, param).cols) * SizeOf(dtype);
  // Only the owners add the gradient. SumGradients joins the sums of other replicas later.
  return ForOwners(OwnersOf(param, row_begin, rows), [&](HeadKernels& head, const Owned& owned) {
    return head.AddGradient(param, owned.first, owned.rows, dtype, scale,
                            in.subspan(static_cast<size_t>(owned.offset) * row_bytes,
                                       static_cast<size_t>(owned.rows) * row_bytes));
  });
}

absl::StatusOr<double> GroupHead::GradNorm() {
  LOSSD_RETURN_IF_ERROR(heads_.CheckTrainable());
  heads_.WaitUntilIdle();
  LOSSD_RETURN_IF_ERROR(SumGradients());
  return heads_.GradNorm();
}

absl::Status GroupHead::ApplyStep(const OptimizerOptions& options, int64_t update) {
  heads_.WaitUntilIdle();
  LOSSD_RETURN_IF_ERROR(SumGradients());
  LOSSD_RETURN_IF_ERROR(heads_.ApplyStep(options, update));
  return members_->WithAll([this] { return replicas_->SpreadValues(); });
}

absl::Status GroupHead::ZeroGradients() {
  LOSSD_RETURN_IF_ERROR(heads_.CheckTrainable());
  heads_.WaitUntilIdle();
  LOSSD_RETURN_IF_ERROR(heads_.ZeroGradients());
  summed_ = true;
  sum_lost_ = absl::OkStatus();
  return absl::OkStatus();
}

absl::Status GroupHead::ZeroMoments() {
  heads_.WaitUntilIdle();
  return heads_.ZeroMoments();
}

}  // namespace lossd::kernels
