// SPDX-License-Identifier: Apache-2.0
// CheckpointReader, and Save, which does the work of SaveCheckpoint (checkpoint.h).
#include "server/head/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/head/checkpoint_store.h"
#include "server/head/disk.h"
#include "server/head/head.h"

namespace lossd::head {
namespace {

template <typename T>
absl::Status CheckSame(absl::string_view field, const T& saved, const T& head) {
  if (saved == head) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the checkpoint has ", field, " ", saved, ", the head has ", head));
}

// A text that identifies a class list and is short enough for a message.
std::string DigestOf(const kernels::ClassList& list) {
  if (list.empty()) return "of all classes";
  const std::vector<int32_t>& classes = list.classes();
  const size_t bytes = classes.size() * sizeof(int32_t);
  Checksum checksum;
  checksum.Update({reinterpret_cast<const uint8_t*>(classes.data()), bytes});
  return absl::StrFormat("of %d out of %d classes (%s)", classes.size(), list.full_size(), checksum.Digest());
}

}  // namespace

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
  return CheckSame("class_list", DigestOf(saved.class_list), DigestOf(head.class_list));
}

std::string AutomaticName(uint64_t step) { return absl::StrFormat("step-%010d", step); }

// ---- CheckpointReader ----

namespace {

// Adds to the error `status` that the field "checkpoint" of a request caused it.
absl::Status OfCheckpoint(absl::Status status, absl::string_view checkpoint) {
  return errors::WithViolation(
      std::move(status), {"checkpoint", "must name a checkpoint of this server", std::string(checkpoint)});
}

// The number of threads that read: options.threads, but at most one for each slice of the buffer; one slice
// is left for the device.
int Threads(const LoadOptions& options, int64_t slice_bytes) {
  const int64_t room = options.buffer_bytes / slice_bytes - 1;
  return static_cast<int>(std::clamp<int64_t>(room, 1, std::max(options.threads, 1)));
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
  absl::StatusOr<ReadLocks> locks = LockForReading(*folder);
  if (absl::IsNotFound(locks.status())) {
    return OfCheckpoint(absl::NotFoundError(absl::StrCat(checkpoint, ": was removed just now")), checkpoint);
  }
  if (!locks.ok()) return locks.status();
  reader->lock_ = std::move(locks->files);
  LOSSD_TRY(Manifest manifest, ReadManifest(directory, checkpoint));
  reader->content_digest_ = ContentDigest(manifest);
  reader->subject_ = std::move(manifest.subject);
  reader->saved_at_ = manifest.saved_at;
  reader->shards_ = std::move(manifest.shards);
  for (const ManifestShard& shard : reader->shards_) {
    LOSSD_RETURN_IF_ERROR(reader->OpenShard(directory, shard));
  }
  return reader;
}

absl::Status CheckpointReader::DataLoss(const ManifestShard& shard, absl::string_view what) const {
  return absl::DataLossError(
      absl::StrCat("checkpoint ", name_, ": ", shard.file, " (", shard.classes.Text(), "): ", what));
}

absl::Status CheckpointReader::OpenShard(const std::string& directory, const ManifestShard& shard) {
  auto opened = OpenBelow(directory, absl::StrCat(name_, "/", shard.file));
  if (absl::IsNotFound(opened.status())) return DataLoss(shard, "the tensor file is missing");
  if (!opened.ok()) return OfCheckpoint(opened.status(), name_);
  const int64_t file_bytes = (*opened)->size();
  if (file_bytes != shard.file_bytes) {
    return DataLoss(shard, absl::StrCat("the tensor file has ", errors::ExactBytes(file_bytes), ", not ",
                                        errors::ExactBytes(shard.file_bytes)));
  }
  auto file = formats::SafetensorsReader::Open(*std::move(opened));
  if (absl::IsInvalidArgument(file.status())) return DataLoss(shard, file.status().message());
  if (!file.ok()) return file.status();
  const formats::SafetensorsReader& tensors = *files_.emplace_back(*std::move(file));
  const auto metadata = ShardMetadata(subject_.config, shard.classes);
  if (!metadata.empty() && tensors.metadata() != metadata) {
    return DataLoss(shard, "the tensor file says that it holds other classes");
  }
  const std::vector<TensorPart> parts = PartsOf(subject_.config, shard.classes);
  if (parts.size() != shard.tensors.size() || parts.size() != tensors.tensors().size()) {
    return DataLoss(shard,
                    absl::StrCat(tensors.tensors().size(), " tensors in the file, ", shard.tensors.size(),
                                 " in the manifest, and ", parts.size(), " in such a file"));
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto info = tensors.Find(TensorName(parts[i].id));
    if (!info.ok()) return DataLoss(shard, info.status().message());
    const ManifestTensor& line = shard.tensors[i];
    if ((*info)->dtype != formats::DType::kFloat32 ||
        (*info)->shape != FileShape(subject_.config, parts[i].id.param, parts[i].rows) ||
        line.name != (*info)->name || line.bytes != (*info)->bytes) {
      return DataLoss(shard,
                      absl::StrCat("tensor ", TensorName(parts[i].id), " is not what the manifest says"));
    }
    parts_.push_back({parts[i], &shard, &tensors, **info, line.checksum});
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::VerifyShards(const std::string& directory, const std::string& folder,
                                            const kernels::HeadConfig& config,
                                            std::vector<ManifestShard> shards, const LoadOptions& options,
                                            int64_t* not_finite) {
  CheckpointReader reader;
  reader.name_ = folder;
  reader.subject_.config = config;
  reader.shards_ = std::move(shards);
  for (const ManifestShard& shard : reader.shards_) {
    std::error_code error;
    const auto there =
        std::filesystem::symlink_status(absl::StrCat(directory, "/", folder, "/", shard.file), error);
    if (std::filesystem::is_symlink(there)) return reader.DataLoss(shard, "the tensor file is a link");
    LOSSD_RETURN_IF_ERROR(reader.OpenShard(directory, shard));
  }
  std::atomic<int64_t> count{0};
  const absl::Status status = reader.Verify(options, &count);
  *not_finite += count;
  return status;
}

absl::Status CheckpointReader::Load(TensorSink sink, const LoadOptions& options) const {
  if (options.verify_first) LOSSD_RETURN_IF_ERROR(Verify(options));
  return Deliver(sink, options);
}

absl::Status CheckpointReader::Verify(const LoadOptions& options, std::atomic<int64_t>* not_finite) const {
  const int64_t slice_bytes = MostSliceBytes(subject_.config, options.slice_bytes);
  const int threads = Threads(options, slice_bytes);
  ReadAhead buffers(slice_bytes, threads);
  return RunInThreads(threads, parts_.size(), [&](size_t part) {
    return ReadPart(parts_[part], options.slice_bytes, buffers, [&](ReadAhead::Block& block) {
      if (not_finite != nullptr) *not_finite += CountNotFinite(block.span());
      buffers.GiveBack(std::move(block));
      return absl::OkStatus();
    });
  });
}

absl::Status CheckpointReader::Deliver(TensorSink sink, const LoadOptions& options) const {
  const int64_t slice_bytes = MostSliceBytes(subject_.config, options.slice_bytes);
  const int threads = Threads(options, slice_bytes);
  std::vector<const StoredPart*> parts;
  for (const StoredPart& part : parts_) {
    if (options.wanted == nullptr || options.wanted(part.part)) parts.push_back(&part);
  }
  ReadAhead ahead(slice_bytes, threads + 1);
  std::thread reading([&] {
    ahead.Close(RunInThreads(threads, parts.size(), [&](size_t part) {
      return ReadPart(*parts[part], options.slice_bytes, ahead, [&](ReadAhead::Block& block) {
        ahead.Put(std::move(block));
        return absl::OkStatus();
      });
    }));
  });
  while (std::optional<ReadAhead::Block> block = ahead.Next()) {
    const TensorPart& part = block->part;
    ahead.Fail(sink(part.id, part.row_begin, part.rows, block->span()));  // does nothing if the status is OK
    ahead.GiveBack(*std::move(block));
  }
  reading.join();
  return ahead.closed_with();
}

absl::Status CheckpointReader::ReadPart(const StoredPart& stored, int64_t slice_bytes, ReadAhead& ahead,
                                        TakeBlock take) const {
  Checksum checksum;
  const int64_t cols = kernels::ShapeOf(subject_.config, stored.part.id.param).cols;
  for (SliceCursor slices(subject_.config, {stored.part}, slice_bytes); !slices.done();) {
    std::optional<ReadAhead::Block> block = ahead.Take(absl::InfiniteFuture());
    if (!block.has_value()) return ahead.result();
    block->part = slices.Next();
    block->bytes = static_cast<size_t>(Bytes({block->part.rows, cols}));
    const int64_t row = block->part.row_begin - stored.part.row_begin;
    absl::Status status = stored.file->ReadRows(stored.info, row, block->part.rows, block->span());
    if (!status.ok()) return status;
    checksum.Update(block->span());
    if (status = take(*block); !status.ok()) return status;
  }
  if (checksum.Digest() == stored.checksum) return absl::OkStatus();
  return DataLoss(*stored.shard,
                  absl::StrCat("the checksum of tensor ", stored.info.name, " does not match"));
}

// ---- Saving ----

namespace {

using formats::FileError;

// The folder of a head's checkpoints. Creates it if necessary and syncs its name to the disk.
absl::StatusOr<std::string> HeadFolder(Disk* disk, const std::string& directory, const std::string& head) {
  absl::Status created = disk->CreateFolder(absl::StrCat(directory, "/", head));
  if (!created.ok() && !absl::IsAlreadyExists(created)) return created;
  LOSSD_RETURN_IF_ERROR(disk->SyncFolder(directory));
  return ResolveBelow(directory, head);
}

// One save. The calling thread reads from the source, and threads of the save do all work on the disk. If
// other processes may write files, too, the calling thread first creates the folder that they have to see.
class Save {
 public:
  Save(const std::string& directory, const std::string& name, bool automatic,
       const CheckpointSubject& subject, const SaveOptions& options,
       std::vector<std::unique_ptr<SaveSite>> sites)
      : directory_(directory),
        name_(name),
        automatic_(automatic),
        subject_(subject),
        options_(options),
        with_sites_(!sites.empty()),
        sites_(subject.config, options.disk, std::move(sites)) {}

  absl::StatusOr<SavedCheckpoint> Run(TensorSource source) {
    if (with_sites_) {
      absl::Status status = MakeFolder(FolderLock::Kind::kShared);
      if (status.ok()) status = sites_.Prove(subject_.head, *folder_);
      if (!status.ok()) return status;
    }
    Plan();
    absl::StatusOr<SavedCheckpoint> saved;
    std::thread disk_thread([&] {
      saved = WriteCheckpoint();
      folder_.reset();  // removes the folder if it did not become a checkpoint
      own_->End(saved.status());
    });
    sites_.Start();
    absl::Status status = own_->Read(source);
    if (status.ok()) sites_.AwaitRead([this] { return Stopped(); });
    options_.on_read();
    if (!status.ok()) sites_.Cancel();
    own_->Close(status);
    status.Update(own_->AwaitEnd());
    disk_thread.join();
    // If a site was cancelled, its error is only a consequence of an error here.
    if (!site_error_.ok() && !absl::IsCancelled(site_error_)) return site_error_;
    if (!status.ok()) return status;
    return saved;
  }

 private:
  // ---- The calling thread ----

  void Plan() {
    files_ = sites_.Divide(options_.shards);
    own_places_ = sites_.own();
    std::vector<PlannedFile> own;
    for (const size_t place : own_places_) own.push_back(files_[place]);
    own_ = std::make_unique<ShardFiles>(
        subject_.config, std::move(own),
        WritingOptions{.slice_bytes = options_.slice_bytes,
                       .buffer_bytes = options_.buffer_bytes,
                       .threads = sites_.threads(),
                       .disk = options_.disk,
                       .on_progress = [this](const SaveProgress& progress) { Report(progress); },
                       .cancelled = [this] { return Stopped(); }});
  }

  // Whether the save has to end. If so, cancels the other processes.
  bool Stopped() {
    if (!options_.cancelled() && !sites_.failed()) return false;
    sites_.Cancel();
    return true;
  }

  void Report(SaveProgress progress) {
    const SaveProgress others = sites_.progress();
    progress.total_bytes = CheckpointBytes(subject_.config);
    progress.read_bytes += others.read_bytes;
    progress.written_bytes += others.written_bytes;
    options_.on_progress(progress);
  }

  // ---- The disk's threads ----

  absl::Status MakeFolder(FolderLock::Kind kind) {
    LOSSD_TRY(head_folder_, HeadFolder(options_.disk, directory_, subject_.head));
    RemoveLeftovers(options_.disk, head_folder_);
    LOSSD_TRY(TemporaryFolder folder, TemporaryFolder::Create(options_.disk, head_folder_, name_, kind));
    folder_.emplace(std::move(folder));
    return absl::OkStatus();
  }

  absl::StatusOr<SavedCheckpoint> WriteCheckpoint() {
    if (!folder_.has_value()) LOSSD_RETURN_IF_ERROR(MakeFolder(FolderLock::Kind::kExclusive));
    Manifest manifest;
    SavedCheckpoint saved;
    LOSSD_TRY(saved.bytes, WriteFiles(&manifest));
    saved.not_finite = not_finite_;
    for (const ManifestShard& shard : manifest.shards) saved.not_finite += shard.not_finite;
    LOSSD_TRY(saved.name, Publish(manifest));
    saved.saved_at = manifest.saved_at;
    LOSSD_RETURN_IF_ERROR(options_.disk->SyncFolder(head_folder_));
    return saved;
  }

  // Renames the temporary folder to the checkpoint's name, and returns that name.
  absl::StatusOr<std::string> Publish(const Manifest& manifest) {
    std::vector<std::string> names = {name_};
    const std::string content = ContentDigest(manifest);
    if (automatic_) names.push_back(absl::StrCat(name_, "-", content));
    absl::Status status;
    for (const std::string& name : names) {
      status = folder_->Become(absl::StrCat(head_folder_, "/", name));
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

  // Writes all files and the manifest; returns their bytes.
  absl::StatusOr<int64_t> WriteFiles(Manifest* manifest) {
    absl::StatusOr<std::vector<ManifestShard>> own = own_->Write(folder_->path());
    if (!own.ok()) sites_.Cancel();
    std::vector<ManifestShard> lines(files_.size());
    site_error_ = AwaitSites(lines, own.ok());
    if (!own.ok()) return own.status();
    if (!site_error_.ok()) return site_error_;
    for (size_t i = 0; i < own_places_.size(); ++i) lines[own_places_[i]] = std::move((*own)[i]);
    LOSSD_TRY(const uint64_t number, TakeSaveNumber(options_.disk, directory_, subject_.head));
    *manifest = {.subject = subject_,
                 .saved_at = clocks::WallNow(),
                 .automatic = automatic_,
                 .save_number = number,
                 .shards = std::move(lines)};
    const std::string text = EncodeManifest(*manifest);
    LOSSD_RETURN_IF_ERROR(WriteSmallFile(options_.disk, folder_->File(kManifestFile), text));
    return ShardBytes(*manifest) + static_cast<int64_t>(text.size());
  }

  // Waits for the other processes. Their files count only after this process has read and verified them.
  absl::Status AwaitSites(std::vector<ManifestShard>& lines, bool verify) {
    absl::Status status = sites_.Await(lines);
    if (!status.ok() || !verify) return status;
    std::vector<ManifestShard> theirs;
    for (const ManifestShard& line : lines) {
      if (!line.file.empty()) theirs.push_back(line);
    }
    if (theirs.empty()) return absl::OkStatus();
    const std::string folder = std::filesystem::path(folder_->path()).filename();
    return CheckpointReader::VerifyShards(
        directory_, absl::StrCat(subject_.head, "/", folder), subject_.config, std::move(theirs),
        {.buffer_bytes = options_.buffer_bytes, .threads = options_.shards.threads}, &not_finite_);
  }

  const std::string& directory_;
  const std::string& name_;
  const bool automatic_;
  const CheckpointSubject& subject_;
  const SaveOptions& options_;
  const bool with_sites_;
  SiteWriting sites_;
  std::vector<PlannedFile> files_;
  std::vector<size_t> own_places_;  // the places of this process's files among all files
  std::unique_ptr<ShardFiles> own_;
  std::string head_folder_;
  std::optional<TemporaryFolder> folder_;
  absl::Status site_error_;  // written by the disk's thread
  int64_t not_finite_ = 0;   // counts values in files of other processes; written by the disk's thread
};

absl::Status CheckFree(const std::string& path) {
  struct stat existing {};
  if (lstat(path.c_str(), &existing) == 0) return FileError(path, "save", EEXIST);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const std::string& directory, absl::string_view name,
                                               const CheckpointSubject& subject, TensorSource source,
                                               const SaveOptions& options,
                                               std::vector<std::unique_ptr<SaveSite>> sites) {
  const bool automatic = name.empty();
  const std::string full_name = automatic ? AutomaticName(subject.step) : std::string(name);
  LOSSD_RETURN_IF_ERROR(ValidateName("head", subject.head));
  LOSSD_RETURN_IF_ERROR(ValidateName("name", full_name));
  LOSSD_RETURN_IF_ERROR(kernels::Validate(subject.config));
  const std::string head_folder = absl::StrCat(directory, "/", subject.head);
  if (!automatic) LOSSD_RETURN_IF_ERROR(CheckFree(absl::StrCat(head_folder, "/", full_name)));
  if (options.limit_bytes > 0) {
    RemoveLeftovers(options.disk, head_folder);  // because leftovers count against the limit
    // The manifest and the headers take a few KiB more.
    LOSSD_RETURN_IF_ERROR(CheckRoom(directory, CheckpointBytes(subject.config), options.limit_bytes));
  }
  // Other processes can help only if there are several files.
  if (DivideClasses(subject.config, options.shards).size() == 1) sites.clear();
  return Save(directory, full_name, automatic, subject, options, std::move(sites)).Run(source);
}

}  // namespace lossd::head
