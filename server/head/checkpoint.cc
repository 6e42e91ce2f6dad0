#include "server/head/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/errors/field_error.h"
#include "server/head/checksum.h"
#include "server/head/head.h"
#include "server/head/paths.h"
#include "server/head/read_ahead.h"
#include "server/head/temporary_folder.h"

namespace lossd::head {
namespace {

using formats::FileError;

constexpr char kTensorFile[] = "tensors.safetensors";
constexpr char kManifestFile[] = "manifest.json";
constexpr absl::Duration kProgressInterval = absl::Milliseconds(200);

absl::Status DataLoss(absl::string_view checkpoint, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("checkpoint ", checkpoint, ": ", what));
}

absl::Span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// `status`, an error, as one of the checkpoint that a request names.
absl::Status OfCheckpoint(absl::Status status, absl::string_view checkpoint) {
  return errors::WithViolation(
      std::move(status), {"checkpoint", "must name a checkpoint of this server", std::string(checkpoint)});
}

// The folder of a head's checkpoints, made if need be, with its own name on the disk.
absl::StatusOr<std::string> HeadFolder(Disk* disk, const std::string& directory, const std::string& head) {
  absl::Status created = disk->CreateFolder(absl::StrCat(directory, "/", head));
  if (!created.ok() && !absl::IsAlreadyExists(created)) return created;
  if (absl::Status status = disk->SyncFolder(directory); !status.ok()) return status;
  return ResolveBelow(directory, head);
}

std::vector<int64_t> FileShape(const kernels::HeadConfig& config, kernels::Param param) {
  const kernels::TensorShape shape = kernels::ShapeOf(config, param);
  if (param == kernels::Param::kWeight) return {shape.rows, shape.cols};
  return {shape.rows};
}

// How many rows of a tensor are handled at once.
int64_t SliceRows(const kernels::TensorShape& shape, int64_t slice_bytes) {
  const int64_t row_bytes = shape.cols * static_cast<int64_t>(sizeof(float));
  return std::min(std::max<int64_t>(slice_bytes / row_bytes, 1), shape.rows);
}

int64_t Bytes(const kernels::TensorShape& shape) {
  return shape.elements() * static_cast<int64_t>(sizeof(float));
}

absl::Status WriteFile(Disk* disk, const std::string& path, const std::string& text) {
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> file = disk->CreateFile(path);
  if (!file.ok()) return file.status();
  absl::Status status = (*file)->Append(AsBytes(text));
  if (status.ok()) status = (*file)->Sync();
  if (status.ok()) status = (*file)->Close();
  return status;
}

absl::StatusOr<int64_t> FileBytes(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return FileError(path, "stat", errno);
  return status.st_size;
}

// One save: the calling thread reads from the source, a thread of its own does all that concerns the disk.
class Save {
 public:
  Save(const std::string& directory, const std::string& name, bool automatic,
       const CheckpointSubject& subject, const SaveOptions& options)
      : directory_(directory),
        name_(name),
        automatic_(automatic),
        subject_(subject),
        options_(options),
        ids_(CheckpointTensors(subject.config)),
        ahead_(BufferBytes(), BufferCount()) {
    for (const kernels::TensorId id : ids_) progress_.total_bytes += Bytes(ShapeOf(id));
  }

  // Returns the bytes of the checkpoint.
  absl::StatusOr<int64_t> Run(TensorSource source) {
    absl::StatusOr<int64_t> bytes;
    std::thread disk_thread([&] {
      bytes = WriteCheckpoint();
      ahead_.End(bytes.status());
    });
    absl::Status status = Read(source);
    options_.on_read();
    ahead_.Close(status);
    status.Update(AwaitDisk());
    disk_thread.join();
    if (!status.ok()) return status;
    return bytes;
  }

 private:
  kernels::TensorShape ShapeOf(kernels::TensorId id) const {
    return kernels::ShapeOf(subject_.config, id.param);
  }

  // Of a buffer that takes a slice of any tensor.
  size_t BufferBytes() const {
    int64_t most = 1;
    for (const kernels::TensorId id : ids_) {
      const kernels::TensorShape shape = ShapeOf(id);
      most = std::max(most, Bytes({SliceRows(shape, options_.slice_bytes), shape.cols}));
    }
    return static_cast<size_t>(most);
  }

  int64_t BufferCount() const {
    return std::max<int64_t>(2, options_.buffer_bytes / static_cast<int64_t>(BufferBytes()));
  }

  // ---- The calling thread ----

  absl::Status Read(TensorSource source) {
    for (size_t tensor = 0; tensor < ids_.size(); ++tensor) {
      const kernels::TensorShape shape = ShapeOf(ids_[tensor]);
      const int64_t most_rows = SliceRows(shape, options_.slice_bytes);
      for (int64_t row = 0; row < shape.rows; row += most_rows) {
        const int64_t rows = std::min(most_rows, shape.rows - row);
        absl::StatusOr<ReadAhead::Block> block = AwaitBlock();
        if (!block.ok()) return block.status();
        block->tensor = tensor;
        block->bytes = static_cast<size_t>(Bytes({rows, shape.cols}));
        if (absl::Status status = source(ids_[tensor], row, rows, block->span()); !status.ok()) return status;
        progress_.read_bytes += static_cast<int64_t>(block->bytes);
        ahead_.Put(*std::move(block));
        ReportIfDue();
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<ReadAhead::Block> AwaitBlock() {
    while (!options_.cancelled()) {
      std::optional<ReadAhead::Block> block = ahead_.Take(absl::Now() + kProgressInterval);
      if (block.has_value()) return *std::move(block);
      if (absl::Status status = ahead_.result(); !status.ok()) return status;
      ReportIfDue();
    }
    return absl::CancelledError("the save was cancelled");
  }

  // Until everything is on the disk.
  absl::Status AwaitDisk() {
    while (!ahead_.WaitUntilEnded(absl::Now() + kProgressInterval)) {
      if (options_.cancelled()) ahead_.Close(absl::CancelledError("the save was cancelled"));
      ReportIfDue();
    }
    return ahead_.result();
  }

  void ReportIfDue() {
    if (absl::Now() < next_report_) return;
    next_report_ = absl::Now() + kProgressInterval;
    progress_.written_bytes = written_bytes_;
    options_.on_progress(progress_);
  }

  // ---- The disk's thread ----

  absl::StatusOr<int64_t> WriteCheckpoint() {
    const absl::StatusOr<std::string> head_folder = HeadFolder(options_.disk, directory_, subject_.head);
    if (!head_folder.ok()) return head_folder.status();
    RemoveLeftovers(options_.disk, *head_folder);
    absl::StatusOr<TemporaryFolder> folder = TemporaryFolder::Create(options_.disk, *head_folder, name_);
    if (!folder.ok()) return folder.status();
    const absl::StatusOr<int64_t> bytes = WriteFiles(*folder);
    if (!bytes.ok()) return bytes;
    absl::Status status = folder->Become(absl::StrCat(*head_folder, "/", name_));
    if (status.ok()) status = options_.disk->SyncFolder(*head_folder);
    if (!status.ok()) return status;
    return bytes;
  }

  absl::StatusOr<int64_t> WriteFiles(const TemporaryFolder& folder) {
    absl::StatusOr<std::vector<ManifestTensor>> tensors = WriteTensors(folder.File(kTensorFile));
    if (!tensors.ok()) return tensors.status();
    const absl::StatusOr<int64_t> file_bytes = FileBytes(folder.File(kTensorFile));
    if (!file_bytes.ok()) return file_bytes.status();
    const std::string manifest = EncodeManifest({.subject = subject_,
                                                 .saved_at = absl::Now(),
                                                 .automatic = automatic_,
                                                 .file = kTensorFile,
                                                 .file_bytes = *file_bytes,
                                                 .tensors = *std::move(tensors)});
    const absl::Status written = WriteFile(options_.disk, folder.File(kManifestFile), manifest);
    if (!written.ok()) return written;
    return *file_bytes + static_cast<int64_t>(manifest.size());
  }

  // Writes what the reading thread brings; returns the tensors' lines of the manifest.
  absl::StatusOr<std::vector<ManifestTensor>> WriteTensors(const std::string& path) {
    absl::StatusOr<std::unique_ptr<formats::DataWriter>> writer = CreateTensorFile(path);
    if (!writer.ok()) return writer.status();
    std::vector<Checksum> checksums(ids_.size());
    while (std::optional<ReadAhead::Block> block = ahead_.Next()) {
      checksums[block->tensor].Update(block->span());
      if (absl::Status status = (*writer)->Append(block->span()); !status.ok()) return status;
      written_bytes_ += static_cast<int64_t>(block->bytes);
      ahead_.GiveBack(*std::move(block));
    }
    absl::Status status = ahead_.closed_with();
    if (status.ok()) status = (*writer)->Finish();
    if (!status.ok()) return status;
    std::vector<ManifestTensor> lines;
    for (size_t tensor = 0; tensor < ids_.size(); ++tensor) {
      lines.push_back({TensorName(ids_[tensor]), Bytes(ShapeOf(ids_[tensor])), checksums[tensor].Digest()});
    }
    return lines;
  }

  absl::StatusOr<std::unique_ptr<formats::DataWriter>> CreateTensorFile(const std::string& path) const {
    std::vector<formats::SafetensorsSpec> specs;
    for (const kernels::TensorId id : ids_) {
      specs.push_back({TensorName(id), formats::DType::kFloat32, FileShape(subject_.config, id.param)});
    }
    return formats::CreateSafetensors(
        path, specs, {}, [this](const std::string& file) { return options_.disk->CreateFile(file); });
  }

  const std::string& directory_;
  const std::string& name_;
  const bool automatic_;
  const CheckpointSubject& subject_;
  const SaveOptions& options_;
  const std::vector<kernels::TensorId> ids_;
  ReadAhead ahead_;
  SaveProgress progress_;
  absl::Time next_report_ = absl::InfinitePast();
  std::atomic<int64_t> written_bytes_{0};
};

absl::Status CheckFree(const std::string& path) {
  struct stat existing {};
  if (lstat(path.c_str(), &existing) == 0) return FileError(path, "save", EEXIST);
  return absl::OkStatus();
}

template <typename T>
absl::Status CheckSame(absl::string_view field, const T& saved, const T& head) {
  if (saved == head) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the checkpoint has ", field, " ", saved, ", the head has ", head));
}

}  // namespace

std::vector<kernels::TensorId> CheckpointTensors(const kernels::HeadConfig& config) {
  std::vector<kernels::TensorId> ids;
  for (const kernels::Param param : kernels::kAllParams) {
    for (const kernels::Role role :
         {kernels::Role::kValue, kernels::Role::kMoment1, kernels::Role::kMoment2}) {
      if (kernels::HasTensor(config, {param, role})) ids.push_back({param, role});
    }
  }
  return ids;
}

absl::Status CheckLoadable(const kernels::HeadConfig& saved, const kernels::HeadConfig& head) {
  const absl::Status checks[] = {
      CheckSame("hidden_size", saved.hidden_size, head.hidden_size),
      CheckSame("vocab_size", saved.vocab_size, head.vocab_size),
      CheckSame("bias", saved.has_bias, head.has_bias),
      CheckSame("class_weights", saved.has_class_weights, head.has_class_weights),
      CheckSame("norm", Name(saved.norm), Name(head.norm)),
      CheckSame("norm_epsilon", saved.norm_epsilon, head.norm_epsilon),
      CheckSame("optimizer_state", Name(saved.optimizer_state), Name(head.optimizer_state)),
      CheckSame("frozen", !saved.trainable, !head.trainable),
  };
  for (const absl::Status& check : checks) {
    if (!check.ok()) return check;
  }
  return absl::OkStatus();
}

std::string AutomaticName(uint64_t step) { return absl::StrFormat("step-%010d", step); }

absl::StatusOr<int64_t> SaveCheckpoint(const std::string& directory, absl::string_view name,
                                       const CheckpointSubject& subject, TensorSource source,
                                       const SaveOptions& options) {
  const bool automatic = name.empty();
  const std::string full_name = automatic ? AutomaticName(subject.step) : std::string(name);
  if (absl::Status status = ValidateName("head", subject.head); !status.ok()) return status;
  if (absl::Status status = ValidateName("name", full_name); !status.ok()) return status;
  if (absl::Status status = kernels::Validate(subject.config); !status.ok()) return status;
  const absl::Status free = CheckFree(absl::StrCat(directory, "/", subject.head, "/", full_name));
  if (!free.ok()) return free;
  return Save(directory, full_name, automatic, subject, options).Run(source);
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(const std::string& directory,
                                                                         absl::string_view checkpoint) {
  const std::pair<absl::string_view, absl::string_view> names =
      absl::StrSplit(checkpoint, absl::MaxSplits('/', 1));
  absl::Status named = ValidateName("checkpoint's head", names.first);
  named.Update(ValidateName("checkpoint's name", names.second));
  if (!named.ok()) return OfCheckpoint(std::move(named), checkpoint);
  const absl::StatusOr<std::string> folder = ResolveBelow(directory, checkpoint);
  if (!folder.ok()) return OfCheckpoint(folder.status(), checkpoint);
  absl::StatusOr<FolderLock> lock = FolderLock::Wait(*folder, FolderLock::Kind::kShared);
  if (!lock.ok()) return lock.status();
  absl::StatusOr<Manifest> manifest = ReadManifest(absl::StrCat(*folder, "/", kManifestFile), checkpoint);
  if (!manifest.ok()) return manifest.status();

  std::unique_ptr<CheckpointReader> reader(new CheckpointReader());
  reader->name_ = std::string(checkpoint);
  reader->lock_ = *std::move(lock);
  reader->subject_ = std::move(manifest->subject);
  const absl::Status matched = reader->OpenTensors(absl::StrCat(*folder, "/", kTensorFile), *manifest);
  if (!matched.ok()) return matched;
  return reader;
}

absl::Status CheckpointReader::OpenTensors(const std::string& path, const Manifest& manifest) {
  auto file = formats::SafetensorsReader::Open(path, kTensorFile);
  if (absl::IsNotFound(file.status())) return DataLoss(name_, "the tensor file is missing");
  const absl::StatusOr<int64_t> file_bytes = FileBytes(path);
  if (!file_bytes.ok()) return file_bytes.status();
  if (*file_bytes != manifest.file_bytes) {
    return DataLoss(name_,
                    absl::StrCat("the tensor file has ", *file_bytes, " bytes, not ", manifest.file_bytes));
  }
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
