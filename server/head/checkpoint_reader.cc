#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/field_error.h"
#include "server/head/checkpoint.h"
#include "server/head/checkpoint_layout.h"
#include "server/head/checksum.h"
#include "server/head/head.h"
#include "server/head/paths.h"

namespace lossd::head {
namespace {

absl::Status DataLoss(absl::string_view checkpoint, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("checkpoint ", checkpoint, ": ", what));
}

// `status`, an error, as one of the checkpoint that a request names.
absl::Status OfCheckpoint(absl::Status status, absl::string_view checkpoint) {
  return errors::WithViolation(
      std::move(status), {"checkpoint", "must name a checkpoint of this server", std::string(checkpoint)});
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(const std::string& directory,
                                                                         absl::string_view checkpoint) {
  const std::pair<absl::string_view, absl::string_view> names =
      absl::StrSplit(checkpoint, absl::MaxSplits('/', 1));
  absl::Status named = ValidateName("checkpoint's head", names.first);
  named.Update(ValidateName("checkpoint's name", names.second));
  if (!named.ok()) return OfCheckpoint(std::move(named), checkpoint);
  const absl::StatusOr<std::string> folder = ResolveBelow(directory, checkpoint);
  if (!folder.ok()) return OfCheckpoint(folder.status(), checkpoint);
  std::unique_ptr<CheckpointReader> reader(new CheckpointReader());
  reader->name_ = std::string(checkpoint);
  absl::StatusOr<FolderLock> lock = FolderLock::Wait(*folder, FolderLock::Kind::kShared);
  if (lock.ok()) {
    reader->lock_ = *std::move(lock);
  } else if (!absl::IsUnimplemented(lock.status())) {  // without locks no server removes checkpoints either
    return lock.status();
  }
  absl::StatusOr<Manifest> manifest = ReadManifest(directory, checkpoint);
  if (!manifest.ok()) return manifest.status();
  reader->subject_ = std::move(manifest->subject);
  const absl::Status matched = reader->OpenTensors(directory, *manifest);
  if (!matched.ok()) return matched;
  return reader;
}

absl::Status CheckpointReader::OpenTensors(const std::string& directory, const Manifest& manifest) {
  auto opened = OpenBelow(directory, absl::StrCat(name_, "/", kTensorFile));
  if (absl::IsNotFound(opened.status())) return DataLoss(name_, "the tensor file is missing");
  if (!opened.ok()) return OfCheckpoint(opened.status(), name_);
  const int64_t file_bytes = (*opened)->size();
  if (file_bytes != manifest.file_bytes) {
    return DataLoss(name_,
                    absl::StrCat("the tensor file has ", file_bytes, " bytes, not ", manifest.file_bytes));
  }
  auto file = formats::SafetensorsReader::Open(*std::move(opened));
  if (absl::IsInvalidArgument(file.status())) return DataLoss(name_, file.status().message());
  if (!file.ok()) return file.status();
  file_ = *std::move(file);
  const std::vector<kernels::TensorId> ids = CheckpointTensors(subject_.config);
  if (ids.size() != manifest.tensors.size() || ids.size() != file_->tensors().size()) {
    return DataLoss(name_,
                    absl::StrCat(file_->tensors().size(), " tensors in the file, ", manifest.tensors.size(),
                                 " in the manifest, and ", ids.size(), " in such a head"));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto info = file_->Find(TensorName(ids[i]));
    if (!info.ok()) return DataLoss(name_, info.status().message());
    const ManifestTensor& line = manifest.tensors[i];
    if ((*info)->dtype != formats::DType::kFloat32 ||
        (*info)->shape != FileShape(subject_.config, ids[i].param) || line.name != (*info)->name ||
        line.bytes != (*info)->bytes) {
      return DataLoss(name_, absl::StrCat("tensor ", TensorName(ids[i]), " is not what the manifest says"));
    }
    tensors_.push_back({ids[i], **info, line.checksum});
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::Load(TensorSink sink, int64_t slice_bytes) const {
  const auto drop = [](kernels::TensorId, int64_t, int64_t, absl::Span<const uint8_t>) {
    return absl::OkStatus();
  };
  for (const Tensor& tensor : tensors_) {
    if (absl::Status status = ReadTensor(tensor, slice_bytes, drop); !status.ok()) return status;
  }
  for (const Tensor& tensor : tensors_) {
    if (absl::Status status = ReadTensor(tensor, slice_bytes, sink); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::ReadTensor(const Tensor& tensor, int64_t slice_bytes, TensorSink sink) const {
  Checksum checksum;
  const kernels::TensorShape shape = kernels::ShapeOf(subject_.config, tensor.id.param);
  const int64_t most_rows = SliceRows(shape, slice_bytes);
  std::vector<uint8_t> buffer(static_cast<size_t>(Bytes({most_rows, shape.cols})));
  for (int64_t row = 0; row < shape.rows; row += most_rows) {
    const int64_t rows = std::min(most_rows, shape.rows - row);
    const auto bytes = absl::MakeSpan(buffer).first(static_cast<size_t>(Bytes({rows, shape.cols})));
    if (absl::Status status = file_->ReadRows(tensor.info, row, rows, bytes); !status.ok()) return status;
    checksum.Update(bytes);
    if (absl::Status status = sink(tensor.id, row, rows, bytes); !status.ok()) return status;
  }
  if (checksum.Digest() == tensor.checksum) return absl::OkStatus();
  return DataLoss(name_, absl::StrCat("the checksum of tensor ", tensor.info.name, " does not match"));
}

}  // namespace lossd::head
