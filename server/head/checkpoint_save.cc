#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/head/checkpoint.h"
#include "server/head/checkpoint_layout.h"
#include "server/head/checksum.h"
#include "server/head/disk_limit.h"
#include "server/head/head.h"
#include "server/head/paths.h"
#include "server/head/read_ahead.h"
#include "server/head/temporary_folder.h"

namespace lossd::head {
namespace {

using formats::FileError;

constexpr absl::Duration kProgressInterval = absl::Milliseconds(200);

absl::Span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// The folder of a head's checkpoints, made if need be, with its own name on the disk.
absl::StatusOr<std::string> HeadFolder(Disk* disk, const std::string& directory, const std::string& head) {
  absl::Status created = disk->CreateFolder(absl::StrCat(directory, "/", head));
  if (!created.ok() && !absl::IsAlreadyExists(created)) return created;
  if (absl::Status status = disk->SyncFolder(directory); !status.ok()) return status;
  return ResolveBelow(directory, head);
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

  absl::StatusOr<SavedCheckpoint> Run(TensorSource source) {
    absl::StatusOr<SavedCheckpoint> saved;
    std::thread disk_thread([&] {
      saved = WriteCheckpoint();
      ahead_.End(saved.status());
    });
    absl::Status status = Read(source);
    options_.on_read();
    ahead_.Close(status);
    status.Update(AwaitDisk());
    disk_thread.join();
    if (!status.ok()) return status;
    return saved;
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

  absl::StatusOr<SavedCheckpoint> WriteCheckpoint() {
    const absl::StatusOr<std::string> head_folder = HeadFolder(options_.disk, directory_, subject_.head);
    if (!head_folder.ok()) return head_folder.status();
    RemoveLeftovers(options_.disk, *head_folder);
    absl::StatusOr<TemporaryFolder> folder = TemporaryFolder::Create(options_.disk, *head_folder, name_);
    if (!folder.ok()) return folder.status();
    Manifest manifest;
    SavedCheckpoint saved;
    const absl::StatusOr<int64_t> bytes = WriteFiles(*folder, &manifest);
    if (!bytes.ok()) return bytes.status();
    saved.bytes = *bytes;
    absl::StatusOr<std::string> name = Publish(*folder, *head_folder, manifest);
    if (!name.ok()) return name.status();
    saved.name = *std::move(name);
    if (absl::Status status = options_.disk->SyncFolder(*head_folder); !status.ok()) return status;
    return saved;
  }

  // Renames the folder and returns the checkpoint's name.
  absl::StatusOr<std::string> Publish(TemporaryFolder& folder, const std::string& head_folder,
                                      const Manifest& manifest) {
    std::vector<std::string> names = {name_};
    const std::string content = ContentDigest(manifest);
    if (automatic_) names.push_back(absl::StrCat(name_, "-", content));
    absl::Status status;
    for (const std::string& name : names) {
      status = folder.Become(absl::StrCat(head_folder, "/", name));
      if (status.ok()) return name;
      if (!absl::IsAlreadyExists(status)) return status;
      const auto there = ReadManifest(directory_, absl::StrCat(subject_.head, "/", name));
      if (automatic_ && there.ok() && ContentDigest(*there) == content) {
        return absl::AlreadyExistsError(
            absl::StrCat("checkpoint ", subject_.head, "/", name, " holds the same already"));
      }
    }
    return status;
  }

  // Returns the bytes of both files.
  absl::StatusOr<int64_t> WriteFiles(const TemporaryFolder& folder, Manifest* manifest) {
    absl::StatusOr<std::vector<ManifestTensor>> tensors = WriteTensors(folder.File(kTensorFile));
    if (!tensors.ok()) return tensors.status();
    const absl::StatusOr<int64_t> file_bytes = FileBytes(folder.File(kTensorFile));
    if (!file_bytes.ok()) return file_bytes.status();
    *manifest = {.subject = subject_,
                 .saved_at = absl::Now(),
                 .automatic = automatic_,
                 .file = kTensorFile,
                 .file_bytes = *file_bytes,
                 .tensors = *std::move(tensors)};
    const std::string text = EncodeManifest(*manifest);
    const absl::Status written = WriteFile(options_.disk, folder.File(kManifestFile), text);
    if (!written.ok()) return written;
    return *file_bytes + static_cast<int64_t>(text.size());
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

// What the tensors of a checkpoint take; its manifest and the header take a few KiB more.
int64_t LeastBytes(const kernels::HeadConfig& config) {
  int64_t bytes = 0;
  for (const kernels::TensorId id : CheckpointTensors(config))
    bytes += Bytes(kernels::ShapeOf(config, id.param));
  return bytes;
}

}  // namespace

absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const std::string& directory, absl::string_view name,
                                               const CheckpointSubject& subject, TensorSource source,
                                               const SaveOptions& options) {
  const bool automatic = name.empty();
  const std::string full_name = automatic ? AutomaticName(subject.step) : std::string(name);
  if (absl::Status status = ValidateName("head", subject.head); !status.ok()) return status;
  if (absl::Status status = ValidateName("name", full_name); !status.ok()) return status;
  if (absl::Status status = kernels::Validate(subject.config); !status.ok()) return status;
  const std::string head_folder = absl::StrCat(directory, "/", subject.head);
  if (!automatic) {
    const absl::Status free = CheckFree(absl::StrCat(head_folder, "/", full_name));
    if (!free.ok()) return free;
  }
  if (options.limit_bytes > 0) {
    RemoveLeftovers(options.disk, head_folder);  // they count as well
    const absl::Status room = CheckRoom(directory, LeastBytes(subject.config), options.limit_bytes);
    if (!room.ok()) return room;
  }
  return Save(directory, full_name, automatic, subject, options).Run(source);
}

}  // namespace lossd::head
