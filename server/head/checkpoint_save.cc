// SPDX-License-Identifier: Apache-2.0
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
#include "server/head/disk_limit.h"
#include "server/head/parallel.h"
#include "server/head/paths.h"
#include "server/head/read_ahead.h"
#include "server/head/shard_writer.h"
#include "server/head/slices.h"
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

// One save. The calling thread reads from the source. Threads of its own do all that concerns the disk: one
// for each lane, which writes every lane-th file, and the first of them what comes before and after the
// files.
class Save {
 public:
  Save(const std::string& directory, const std::string& name, bool automatic,
       const CheckpointSubject& subject, const SaveOptions& options)
      : directory_(directory),
        name_(name),
        automatic_(automatic),
        subject_(subject),
        options_(options),
        classes_(DivideClasses(subject.config, options.shards)),
        lanes_(std::min(classes_.size(), static_cast<size_t>(std::max(options.shards.threads, 1)))),
        lines_(classes_.size()),
        ahead_(MostSliceBytes(subject.config, options.slice_bytes), BufferCount(), lanes_) {
    progress_.total_bytes = CheckpointBytes(subject.config);
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
  int64_t BufferCount() const {
    return std::max<int64_t>(2,
                             options_.buffer_bytes / MostSliceBytes(subject_.config, options_.slice_bytes));
  }

  // ---- The calling thread ----

  // Reads for all lanes in turn, most for those that write fastest.
  absl::Status Read(TensorSource source) {
    std::vector<SliceCursor> cursors;
    for (size_t lane = 0; lane < lanes_; ++lane) cursors.push_back(CursorOf(lane));
    std::vector<bool> open(lanes_, true);
    for (size_t left = lanes_; left > 0;) {
      absl::StatusOr<ReadAhead::Block> block = AwaitBlock();
      if (!block.ok()) return block.status();
      const size_t lane = ahead_.ShortestLane(open);
      block->part = cursors[lane].Next();
      block->bytes = static_cast<size_t>(
          Bytes({block->part.rows, kernels::ShapeOf(subject_.config, block->part.id.param).cols}));
      const absl::Status status =
          source(block->part.id, block->part.row_begin, block->part.rows, block->span());
      if (!status.ok()) return status;
      progress_.read_bytes += static_cast<int64_t>(block->bytes);
      ahead_.Put(*std::move(block), lane);
      ReportIfDue();
      if (!cursors[lane].done()) continue;
      open[lane] = false;
      --left;
    }
    return absl::OkStatus();
  }

  // All slices that a lane writes.
  SliceCursor CursorOf(size_t lane) const {
    std::vector<TensorPart> parts;
    for (size_t shard = lane; shard < classes_.size(); shard += lanes_) {
      for (const TensorPart& part : PartsOf(subject_.config, classes_[shard])) parts.push_back(part);
    }
    return {subject_.config, std::move(parts), options_.slice_bytes};
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

  // ---- The disk's threads ----

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

  // Returns the bytes of all files.
  absl::StatusOr<int64_t> WriteFiles(const TemporaryFolder& folder, Manifest* manifest) {
    absl::Status status = RunInThreads(static_cast<int>(lanes_), lanes_, [&](size_t lane) {
      absl::Status written = WriteLane(folder, lane);
      ahead_.Fail(written);  // if it is an error
      return written;
    });
    if (!ahead_.result().ok()) status = ahead_.result();  // the error that came first
    if (!status.ok()) return status;
    *manifest = {
        .subject = subject_, .saved_at = absl::Now(), .automatic = automatic_, .shards = std::move(lines_)};
    const std::string text = EncodeManifest(*manifest);
    const absl::Status written = WriteFile(options_.disk, folder.File(kManifestFile), text);
    if (!written.ok()) return written;
    return ShardBytes(*manifest) + static_cast<int64_t>(text.size());
  }

  // Writes the files of a lane, one after the other.
  absl::Status WriteLane(const TemporaryFolder& folder, size_t lane) {
    for (size_t shard = lane; shard < classes_.size(); shard += lanes_) {
      absl::StatusOr<ManifestShard> line = WriteShard(folder, lane, shard);
      if (!line.ok()) return line.status();
      lines_[shard] = *std::move(line);
    }
    return absl::OkStatus();
  }

  // Writes what the reading thread brings.
  absl::StatusOr<ManifestShard> WriteShard(const TemporaryFolder& folder, size_t lane, size_t shard) {
    auto writer = ShardWriter::Create(options_.disk, folder.path(), ShardFile(shard, classes_.size()),
                                      subject_.config, classes_[shard]);
    if (!writer.ok()) return writer.status();
    while (!(*writer)->is_complete()) {
      std::optional<ReadAhead::Block> block = ahead_.Next(lane);
      if (!block.has_value()) {
        if (absl::Status why = ahead_.closed_with(); !why.ok()) return why;
        break;  // Finish says what is missing
      }
      if (absl::Status status = (*writer)->Append(*block); !status.ok()) return status;
      written_bytes_ += static_cast<int64_t>(block->bytes);
      ahead_.GiveBack(*std::move(block));
    }
    return (*writer)->Finish();
  }

  const std::string& directory_;
  const std::string& name_;
  const bool automatic_;
  const CheckpointSubject& subject_;
  const SaveOptions& options_;
  const std::vector<ClassRange> classes_;  // of each file
  const size_t lanes_;
  std::vector<ManifestShard> lines_;  // of each file, from the thread that wrote it
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
    // The manifest and the headers take a few KiB more.
    const absl::Status room = CheckRoom(directory, CheckpointBytes(subject.config), options.limit_bytes);
    if (!room.ok()) return room;
  }
  return Save(directory, full_name, automatic, subject, options).Run(source);
}

}  // namespace lossd::head
