// SPDX-License-Identifier: Apache-2.0
// VocabularyHead: chunks, tensors, shares and steps of a head whose classes are divided (vocabulary_head.h).
#include "kernels/group/vocabulary_head.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/validation.h"

namespace lossd::kernels {

std::vector<Choice> VocabularyHead::Describe() const {
  HeadConfig split = config_;
  split.split = Split::kVocabulary;
  const int described = WithMostClasses(split, heads_->size());
  return Describe(heads_->head(described).Describe(), config_, heads_->size(), reason_);
}

std::vector<Choice> VocabularyHead::Describe(std::vector<Choice> first, const HeadConfig& config, int members,
                                             absl::string_view reason) {
  HeadConfig split = config;
  split.split = Split::kVocabulary;
  const int64_t classes = MostClassesOf(split, members);
  first.insert(first.begin() + (first.empty() ? 0 : 1),
               {.what = "devices",
                .choice = absl::StrCat(members, ", by vocabulary"),
                .reason = absl::StrCat(reason, "; up to ", classes, " classes each")});
  return first;
}

// ---- Chunks ----

absl::Status VocabularyHead::CheckTeacher(const HeadKernels& teacher) const {
  constexpr absl::string_view kField = "distillation.teacher";
  const auto* const other = dynamic_cast<const VocabularyHead*>(&teacher);
  if (other == nullptr) {
    LOSSD_RETURN_IF_ERROR(ValidateTeacher(config_, teacher.config(), kField));
    return errors::FieldError(kField, "be a head that is split by vocabulary, as the student",
                              "one that is divided in another way", absl::StatusCode::kUnimplemented);
  }
  absl::ReaderMutexLock own(&division_), of_teacher(&other->division_);
  LOSSD_RETURN_IF_ERROR(ValidateTeacher(config_, other->config_, kField));
  if (&other->heads_->members() != &heads_->members()) {
    return errors::FieldError(kField, "be a head of the same devices", "another one");
  }
  return heads_->CheckTeacher(*other->heads_);
}

void VocabularyHead::Submit(Chunk* chunk, ChunkCallbacks callbacks) {
  absl::Status valid = ValidateChunk(config_, chunk_rows(), *chunk);
  if (valid.ok() && chunk->teacher != nullptr) valid = CheckTeacher(*chunk->teacher);
  if (absl::Status status = std::move(valid); !status.ok()) {
    heads_->Refuse(std::move(status), std::move(callbacks));
    return;
  }
  ChunkPart all;
  all.slices.resize(chunk->slices.size());
  std::iota(all.slices.begin(), all.slices.end(), size_t{0});
  for (const Slice& slice : chunk->slices) all.rows += slice.rows;
  std::vector<ChunkPart> parts(static_cast<size_t>(heads_->size()), all);
  for (size_t i = 0; i < parts.size(); ++i) parts[i].member = static_cast<int>(i);
  const auto* const teacher = static_cast<const VocabularyHead*>(chunk->teacher);  // CheckTeacher
  heads_->Submit(chunk, std::move(callbacks), std::move(parts),
                 teacher == nullptr ? nullptr : teacher->heads_.get());
}

// ---- Tensors ----

absl::Status VocabularyHead::ForOwners(
    TensorId id, int64_t row_begin, int64_t rows, DType dtype, bool first_alone,
    absl::FunctionRef<absl::Status(HeadKernels& head, const Owned& owned)> fn) const {
  HeadConfig split = config_;
  split.split = Split::kVocabulary;
  const bool of_classes = id.param == Param::kWeight || id.param == Param::kBias;
  const size_t row_bytes = static_cast<size_t>(ShapeOf(config_, id.param).cols) * SizeOf(dtype);
  heads_->WaitUntilIdle();
  return heads_->ForEach([&](int member, HeadKernels& head) -> absl::Status {
    if (!of_classes && first_alone && member > 0) return absl::OkStatus();
    const ShardRows own = StoredRowsOf(split, id, {member, heads_->size()});
    const int64_t first = std::max(row_begin, own.first);
    const int64_t count = std::min(row_begin + rows, own.end()) - first;
    if (count <= 0) return absl::OkStatus();
    return fn(head, {.first = first,
                     .rows = count,
                     .offset = static_cast<size_t>(first - row_begin) * row_bytes,
                     .bytes = static_cast<size_t>(count) * row_bytes});
  });
}

absl::Status VocabularyHead::ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                        absl::Span<uint8_t> out) {
  absl::Status status = ValidateTensorAccess(config_, id, row_begin, rows, dtype, out.size());
  if (!status.ok()) return status;
  return ForOwners(
      id, row_begin, rows, dtype, /*first_alone=*/true, [&](HeadKernels& head, const Owned& owned) {
        return head.ReadTensor(id, owned.first, owned.rows, dtype, out.subspan(owned.offset, owned.bytes));
      });
}

absl::Status VocabularyHead::WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                         absl::Span<const uint8_t> in) {
  absl::Status status = ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size());
  if (!status.ok()) return status;
  return ForOwners(
      id, row_begin, rows, dtype, /*first_alone=*/false, [&](HeadKernels& head, const Owned& owned) {
        return head.WriteTensor(id, owned.first, owned.rows, dtype, in.subspan(owned.offset, owned.bytes));
      });
}

// ---- Shares ----

namespace {

constexpr int64_t kCopyBytes = int64_t{8} << 20;  // bytes copied at a time; at least one row

// Copies all tensors except gradients.
absl::Status CopyTensors(HeadKernels& from, HeadKernels& to) {
  const HeadConfig& config = from.config();
  std::vector<uint8_t> bytes;
  for (const Param param : kAllParams) {
    const TensorShape shape = ShapeOf(config, param);
    const int64_t row_bytes = shape.cols * static_cast<int64_t>(sizeof(float));
    const int64_t block = std::max<int64_t>(kCopyBytes / row_bytes, 1);
    for (const Role role : {Role::kValue, Role::kMoment1, Role::kMoment2}) {
      if (!HasTensor(config, {param, role})) continue;
      for (int64_t row = 0; row < shape.rows; row += block) {
        const int64_t rows = std::min(block, shape.rows - row);
        bytes.resize(static_cast<size_t>(rows * row_bytes));
        absl::Status status =
            from.ReadTensor({param, role}, row, rows, DType::kFloat32, absl::MakeSpan(bytes));
        if (status.ok()) status = to.WriteTensor({param, role}, row, rows, DType::kFloat32, bytes);
        if (!status.ok()) return status;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status VocabularyHead::SetShares(const std::vector<int32_t>& shares, Accept accept) {
  if (shares == config_.shares) return accept(*this);
  HeadConfig config = config_;
  config.shares = shares;
  heads_->WaitUntilIdle();
  absl::StatusOr<std::unique_ptr<VocabularyHead>> divided = make_(config);
  if (absl::IsResourceExhausted(divided.status())) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the devices have no room for the head by both divisions, which it takes while its shares "
        "change (nothing changed): ",
        divided.status().message()));
  }
  if (!divided.ok()) return divided.status();
  LOSSD_RETURN_IF_ERROR(accept(**divided));
  LOSSD_RETURN_IF_ERROR(CopyTensors(*this, **divided));
  absl::MutexLock lock(&division_);
  heads_.swap((*divided)->heads_);
  config_.shares = shares;
  return absl::OkStatus();
}

// ---- Gradients and steps ----

absl::Status VocabularyHead::AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype,
                                         float scale, absl::Span<const uint8_t> in) {
  const TensorId id{param, Role::kGradient};
  absl::Status status = ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size());
  if (!status.ok()) return status;
  return ForOwners(id, row_begin, rows, dtype, /*first_alone=*/false,
                   [&](HeadKernels& head, const Owned& owned) {
                     return head.AddGradient(param, owned.first, owned.rows, dtype, scale,
                                             in.subspan(owned.offset, owned.bytes));
                   });
}

absl::StatusOr<double> VocabularyHead::GradNorm() {
  LOSSD_RETURN_IF_ERROR(heads_->CheckTrainable());
  heads_->WaitUntilIdle();
  return heads_->GradNorm();
}

absl::Status VocabularyHead::ApplyStep(const OptimizerOptions& options, int64_t update) {
  heads_->WaitUntilIdle();
  return heads_->ApplyStep(options, update);
}

absl::Status VocabularyHead::ZeroGradients() {
  LOSSD_RETURN_IF_ERROR(heads_->CheckTrainable());
  heads_->WaitUntilIdle();
  return heads_->ZeroGradients();
}

absl::Status VocabularyHead::ZeroMoments() {
  heads_->WaitUntilIdle();
  return heads_->ZeroMoments();
}

}  // namespace lossd::kernels
