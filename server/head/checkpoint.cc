#include "server/head/checkpoint.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/head/checksum.h"
#include "server/head/head.h"
#include "server/head/paths.h"

namespace lossd::head {
namespace {

using formats::FileError;

constexpr char kTensorFile[] = "tensors.safetensors";
constexpr char kManifestFile[] = "manifest.json";
constexpr char kTemporaryPrefix[] = ".tmp-";  // no name starts with a dot
constexpr int64_t kMaxManifestBytes = int64_t{1} << 20;

absl::Status DataLoss(absl::string_view checkpoint, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("checkpoint ", checkpoint, ": ", what));
}

absl::Span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Locks a folder until the descriptor is closed or the process ends; -1 with errno set if it is locked.
int LockFolder(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0 || flock(descriptor, LOCK_EX | LOCK_NB) == 0) return descriptor;
  const int error_number = errno;
  close(descriptor);
  errno = error_number;
  return -1;
}

// A folder that becomes a checkpoint or disappears. Locked while it is being written.
class TemporaryFolder {
 public:
  TemporaryFolder() = default;
  ~TemporaryFolder() {
    if (lock_ >= 0) close(lock_);
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  absl::Status Create(const std::string& parent, absl::string_view name) {
    std::random_device random;
    const std::string path =
        absl::StrCat(parent, "/", kTemporaryPrefix, name, "-", absl::Hex(random(), absl::kZeroPad8));
    if (mkdir(path.c_str(), 0755) != 0) return FileError(path, "create folder", errno);
    path_ = path;
    lock_ = LockFolder(path_);  // where locks are not to be had, leftovers stay until someone removes them
    return absl::OkStatus();
  }

  std::string File(absl::string_view name) const { return absl::StrCat(path_, "/", name); }

  // Renames it to `target`, which must not exist.
  absl::Status Become(const std::string& target) {
    if (absl::Status status = formats::SyncFolder(path_); !status.ok()) return status;
    int result = renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target.c_str(), RENAME_NOREPLACE);
    // File systems without RENAME_NOREPLACE: a plain rename replaces empty folders only.
    if (result != 0 && (errno == EINVAL || errno == ENOSYS)) result = rename(path_.c_str(), target.c_str());
    if (result != 0) return FileError(target, "rename to", errno == ENOTEMPTY ? EEXIST : errno);
    path_.clear();
    return absl::OkStatus();
  }

 private:
  std::string path_;  // empty: nothing to remove
  int lock_ = -1;
};

// The folder of a head's checkpoints, made if need be.
absl::StatusOr<std::string> HeadFolder(const std::string& directory, const std::string& head) {
  const std::string path = absl::StrCat(directory, "/", head);
  if (mkdir(path.c_str(), 0755) == 0) {
    if (absl::Status status = formats::SyncFolder(directory); !status.ok()) return status;
  } else if (errno != EEXIST) {
    return FileError(path, "create folder", errno);
  }
  return ResolveBelow(directory, head);
}

std::vector<int64_t> FileShape(const kernels::HeadConfig& config, kernels::Param param) {
  const kernels::TensorShape shape = kernels::ShapeOf(config, param);
  if (param == kernels::Param::kWeight) return {shape.rows, shape.cols};
  return {shape.rows};
}

// Calls `visit(row_begin, rows, bytes)` for consecutive rows of a tensor, `slice_bytes` at a time.
absl::Status ForEachSlice(const kernels::TensorShape& shape, int64_t slice_bytes,
                          absl::FunctionRef<absl::Status(int64_t, int64_t, absl::Span<uint8_t>)> visit) {
  const int64_t row_bytes = shape.cols * static_cast<int64_t>(sizeof(float));
  const int64_t most_rows = std::min(std::max<int64_t>(slice_bytes / row_bytes, 1), shape.rows);
  std::vector<uint8_t> buffer(static_cast<size_t>(most_rows * row_bytes));
  for (int64_t row = 0; row < shape.rows; row += most_rows) {
    const int64_t rows = std::min(most_rows, shape.rows - row);
    const absl::Status status =
        visit(row, rows, absl::MakeSpan(buffer).first(static_cast<size_t>(rows * row_bytes)));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Writes all tensors to `path` and returns their lines of the manifest.
absl::StatusOr<std::vector<ManifestTensor>> WriteTensors(const std::string& path,
                                                         const kernels::HeadConfig& config,
                                                         TensorSource source, const SaveOptions& options) {
  const std::vector<kernels::TensorId> ids = CheckpointTensors(config);
  std::vector<formats::SafetensorsSpec> specs;
  for (const kernels::TensorId id : ids) {
    specs.push_back({TensorName(id), formats::DType::kFloat32, FileShape(config, id.param)});
  }
  auto writer = formats::CreateSafetensors(path, specs, {}, options.create_file);
  if (!writer.ok()) return writer.status();
  std::vector<ManifestTensor> lines;
  for (const kernels::TensorId id : ids) {
    Checksum checksum;
    const auto write_rows = [&](int64_t row, int64_t rows, absl::Span<uint8_t> bytes) {
      if (absl::Status status = source(id, row, rows, bytes); !status.ok()) return status;
      checksum.Update(bytes);
      return (*writer)->Append(bytes);
    };
    const kernels::TensorShape shape = kernels::ShapeOf(config, id.param);
    const absl::Status status = ForEachSlice(shape, options.slice_bytes, write_rows);
    if (!status.ok()) return status;
    const int64_t bytes = shape.elements() * static_cast<int64_t>(sizeof(float));
    lines.push_back({TensorName(id), bytes, checksum.Digest()});
  }
  if (absl::Status status = (*writer)->Finish(); !status.ok()) return status;
  return lines;
}

absl::Status WriteFile(const std::string& path, const std::string& text, const SaveOptions& options) {
  auto file = options.create_file(path);
  if (!file.ok()) return file.status();
  if (absl::Status status = (*file)->Append(AsBytes(text)); !status.ok()) return status;
  return (*file)->SyncAndClose();
}

absl::StatusOr<int64_t> FileBytes(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return FileError(path, "stat", errno);
  return status.st_size;
}

// Writes the files of a checkpoint into `folder` and returns their bytes.
absl::StatusOr<int64_t> WriteFiles(const TemporaryFolder& folder, const CheckpointSubject& subject,
                                   TensorSource source, const SaveOptions& options) {
  auto tensors = WriteTensors(folder.File(kTensorFile), subject.config, source, options);
  if (!tensors.ok()) return tensors.status();
  const absl::StatusOr<int64_t> file_bytes = FileBytes(folder.File(kTensorFile));
  if (!file_bytes.ok()) return file_bytes.status();
  const std::string manifest = EncodeManifest({subject, kTensorFile, *file_bytes, *std::move(tensors)});
  const absl::Status written = WriteFile(folder.File(kManifestFile), manifest, options);
  if (!written.ok()) return written;
  return *file_bytes + static_cast<int64_t>(manifest.size());
}

absl::StatusOr<Manifest> ReadManifest(const std::string& path, absl::string_view checkpoint) {
  const auto file = formats::InputFile::Open(path);
  if (!file.ok()) return file.status();
  if ((*file)->size() > kMaxManifestBytes) return DataLoss(checkpoint, "the manifest is too long");
  std::string text(static_cast<size_t>((*file)->size()), '\0');
  const auto bytes = absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size());
  if (absl::Status status = (*file)->ReadAt(0, bytes); !status.ok()) return status;
  auto manifest = DecodeManifest(text);
  if (manifest.ok()) return manifest;
  return absl::Status(manifest.status().code(),
                      absl::StrCat("checkpoint ", checkpoint, ": ", manifest.status().message()));
}

// Removes a leftover folder unless some process is writing it.
void RemoveLeftover(const std::string& path) {
  const int lock = LockFolder(path);
  if (lock < 0) return;
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
  close(lock);
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

absl::Status PrepareCheckpointDirectory(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return FileError(directory, "create folder", error.value());
  for (fs::directory_iterator head(directory, error), end; !error && head != end; head.increment(error)) {
    if (!fs::is_directory(head->symlink_status())) continue;
    std::vector<std::string> leftovers;
    for (fs::directory_iterator entry(head->path(), error); !error && entry != end; entry.increment(error)) {
      if (absl::StartsWith(entry->path().filename().string(), kTemporaryPrefix))
        leftovers.push_back(entry->path());
    }
    for (const std::string& leftover : leftovers) RemoveLeftover(leftover);
  }
  return error ? FileError(directory, "list", error.value()) : absl::OkStatus();
}

absl::StatusOr<int64_t> SaveCheckpoint(const std::string& directory, absl::string_view name,
                                       const CheckpointSubject& subject, TensorSource source,
                                       const SaveOptions& options) {
  if (absl::Status status = ValidateName("head", subject.head); !status.ok()) return status;
  if (absl::Status status = ValidateName("name", name); !status.ok()) return status;
  if (absl::Status status = kernels::Validate(subject.config); !status.ok()) return status;
  const absl::StatusOr<std::string> head_folder = HeadFolder(directory, subject.head);
  if (!head_folder.ok()) return head_folder.status();
  const std::string target = absl::StrCat(*head_folder, "/", name);
  struct stat existing {};
  if (lstat(target.c_str(), &existing) == 0) return FileError(target, "save", EEXIST);
  TemporaryFolder folder;
  if (absl::Status status = folder.Create(*head_folder, name); !status.ok()) return status;
  absl::StatusOr<int64_t> bytes = WriteFiles(folder, subject, source, options);
  if (!bytes.ok()) return bytes;
  if (absl::Status status = folder.Become(target); !status.ok()) return status;
  if (absl::Status status = formats::SyncFolder(*head_folder); !status.ok()) return status;
  return bytes;
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(const std::string& directory,
                                                                         absl::string_view checkpoint) {
  const std::pair<absl::string_view, absl::string_view> names =
      absl::StrSplit(checkpoint, absl::MaxSplits('/', 1));
  if (absl::Status status = ValidateName("checkpoint's head", names.first); !status.ok()) return status;
  if (absl::Status status = ValidateName("checkpoint's name", names.second); !status.ok()) return status;
  const auto manifest_path = ResolveBelow(directory, absl::StrCat(checkpoint, "/", kManifestFile));
  if (!manifest_path.ok()) return manifest_path.status();
  absl::StatusOr<Manifest> manifest = ReadManifest(*manifest_path, checkpoint);
  if (!manifest.ok()) return manifest.status();
  const auto tensor_path = ResolveBelow(directory, absl::StrCat(checkpoint, "/", kTensorFile));
  if (absl::IsNotFound(tensor_path.status())) return DataLoss(checkpoint, "the tensor file is missing");
  if (!tensor_path.ok()) return tensor_path.status();

  std::unique_ptr<CheckpointReader> reader(new CheckpointReader());
  reader->name_ = std::string(checkpoint);
  reader->subject_ = std::move(manifest->subject);
  const absl::Status matched = reader->OpenTensors(*tensor_path, *manifest);
  if (!matched.ok()) return matched;
  return reader;
}

absl::Status CheckpointReader::OpenTensors(const std::string& path, const Manifest& manifest) {
  const absl::StatusOr<int64_t> file_bytes = FileBytes(path);
  if (!file_bytes.ok()) return file_bytes.status();
  if (*file_bytes != manifest.file_bytes) {
    return DataLoss(name_,
                    absl::StrCat("the tensor file has ", *file_bytes, " bytes, not ", manifest.file_bytes));
  }
  auto file = formats::SafetensorsReader::Open(path);
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
  const auto read_rows = [&](int64_t row, int64_t rows, absl::Span<uint8_t> bytes) {
    if (absl::Status status = file_->ReadRows(tensor.info, row, rows, bytes); !status.ok()) return status;
    checksum.Update(bytes);
    return sink(tensor.id, row, rows, bytes);
  };
  const kernels::TensorShape shape = kernels::ShapeOf(subject_.config, tensor.id.param);
  if (absl::Status status = ForEachSlice(shape, slice_bytes, read_rows); !status.ok()) return status;
  if (checksum.Digest() == tensor.checksum) return absl::OkStatus();
  return DataLoss(name_, absl::StrCat("the checksum of tensor ", tensor.info.name, " does not match"));
}

}  // namespace lossd::head
