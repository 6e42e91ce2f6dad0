// SPDX-License-Identifier: Apache-2.0
// The checkpoints of a directory: infos and their cache, lists, save numbers, removal (checkpoint_store.h).
#include "server/head/checkpoint_store.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/head/disk.h"

namespace lossd::head {
namespace {

// A second change of a file within the resolution of its times does not change them. So times that are
// younger than this do not prove that the file is the same.
constexpr absl::Duration kSettled = absl::Seconds(2);

std::atomic<int64_t> manifests_read{0};

struct FileStamp {
  dev_t device = 0;
  ino_t inode = 0;
  off_t size = 0;
  absl::Time modified;
  absl::Time changed;

  friend bool operator==(const FileStamp&, const FileStamp&) = default;
};

// Nullopt if there is no regular file at the path.
std::optional<FileStamp> StampOf(const std::string& path) {
  struct stat found {};
  if (lstat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) return std::nullopt;
  return FileStamp{.device = found.st_dev,
                   .inode = found.st_ino,
                   .size = found.st_size,
                   .modified = absl::TimeFromTimespec(found.st_mtim),
                   .changed = absl::TimeFromTimespec(found.st_ctim)};
}

// Compares with the wall clock, because file times are wall-clock times. If the clock was set back, files
// count as not settled for a while.
bool IsSettled(const FileStamp& stamp) { return clocks::WallNow() - stamp.changed > kSettled; }

class InfoCache {
 public:
  static InfoCache& Get() {
    static InfoCache* const cache = new InfoCache();
    return *cache;
  }

  std::optional<CheckpointInfo> Find(const std::string& path, const FileStamp& stamp)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto found = by_path_.find(path);
    if (found == by_path_.end()) return std::nullopt;
    if (found->second->stamp != stamp) {
      entries_.erase(found->second);
      by_path_.erase(found);
      return std::nullopt;
    }
    entries_.splice(entries_.end(), entries_, found->second);
    return found->second->info;
  }

  void Keep(const std::string& path, const FileStamp& stamp, const CheckpointInfo& info)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (by_path_.contains(path)) return;
    entries_.push_back({path, stamp, info});
    by_path_[path] = std::prev(entries_.end());
    if (entries_.size() <= kMostInfos) return;
    by_path_.erase(entries_.front().path);
    entries_.pop_front();
  }

 private:
  struct Entry {
    std::string path;
    FileStamp stamp;
    CheckpointInfo info;
  };

  absl::Mutex mutex_;
  std::list<Entry> entries_ ABSL_GUARDED_BY(mutex_);  // the most recently used one is last
  std::map<std::string, std::list<Entry>::iterator> by_path_ ABSL_GUARDED_BY(mutex_);
};

CheckpointInfo ReadInfo(const std::string& directory, const std::string& name, int64_t manifest_bytes) {
  ++manifests_read;
  CheckpointInfo info{.name = name};
  absl::StatusOr<Manifest> manifest = ReadManifest(directory, name);
  info.status = manifest.status();
  if (!manifest.ok()) return info;
  info.bytes = ShardBytes(*manifest) + manifest_bytes;
  info.subject = std::move(manifest->subject);
  info.subject.config.class_list = info.subject.config.class_list.WithoutClasses();  // class lists are long
  info.saved_at = manifest->saved_at;
  info.automatic = manifest->automatic;
  info.save_number = manifest->save_number;
  return info;
}

// True if the status says something about the file itself, and not about a temporary failure of disk or
// system.
bool IsOfTheFile(const absl::Status& status) {
  return status.ok() || absl::IsDataLoss(status) || absl::IsFailedPrecondition(status);
}

}  // namespace

CheckpointInfo InfoOf(const std::string& directory, const std::string& name) {
  const std::string path = absl::StrCat(directory, "/", name, "/", kManifestFile);
  const std::optional<FileStamp> stamp = StampOf(path);
  if (!stamp.has_value()) return ReadInfo(directory, name, 0);
  if (std::optional<CheckpointInfo> known = InfoCache::Get().Find(path, *stamp)) return *std::move(known);
  CheckpointInfo info = ReadInfo(directory, name, stamp->size);
  if (IsOfTheFile(info.status) && IsSettled(*stamp) && StampOf(path) == stamp) {
    InfoCache::Get().Keep(path, *stamp, info);
  }
  return info;
}

int64_t ManifestsReadForTesting() { return manifests_read; }

// ---- Listing and pruning ----

namespace {

namespace fs = std::filesystem;

// The names of the folders in `path` that are valid names of heads or checkpoints, without links.
absl::StatusOr<std::vector<std::string>> NamedFolders(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code gone;  // if it is gone meanwhile, it is no folder
    const std::string name = entry->path().filename();
    if (fs::is_directory(entry->symlink_status(gone)) && ValidateName("", name).ok()) names.push_back(name);
  }
  if (error == std::errc::no_such_file_or_directory) return names;
  if (error) return formats::FileError(path, "list", error.value());
  return names;
}

// Whether the folder `name` in a head's folder is a checkpoint.
bool HasManifest(const std::string& head_folder, const std::string& name) {
  std::error_code error;
  return fs::exists(fs::symlink_status(absl::StrCat(head_folder, "/", name, "/", kManifestFile), error));
}

absl::Status AppendHead(const std::string& directory, const std::string& head,
                        std::vector<CheckpointInfo>* list) {
  const std::string head_folder = absl::StrCat(directory, "/", head);
  LOSSD_TRY(const std::vector<std::string> names, NamedFolders(head_folder));
  std::vector<CheckpointInfo> of_head;
  for (const std::string& name : names) {
    if (HasManifest(head_folder, name)) of_head.push_back(InfoOf(directory, absl::StrCat(head, "/", name)));
  }
  SortNewestFirst(&of_head);
  std::move(of_head.begin(), of_head.end(), std::back_inserter(*list));
  return absl::OkStatus();
}

// Sorts as SortNewestFirst does and keeps at most `most` infos. Damaged checkpoints, which are last, get at
// most half of the places, or all places that the readable ones leave free if that is more. Returns how many
// infos it removed.
size_t ShortenTo(size_t most, std::vector<CheckpointInfo>* infos) {
  SortNewestFirst(infos);
  if (infos->size() <= most) return 0;
  const size_t left_out = infos->size() - most;
  const auto damaged =
      std::find_if(infos->begin(), infos->end(), [](const auto& i) { return !i.status.ok(); });
  const auto readable = static_cast<size_t>(damaged - infos->begin());
  const size_t for_damaged = std::max(most / 2, most - std::min(most, readable));
  const size_t damaged_shown = std::min(infos->size() - readable, for_damaged);
  infos->erase(damaged + static_cast<std::ptrdiff_t>(damaged_shown), infos->end());
  infos->erase(infos->begin() + static_cast<std::ptrdiff_t>(most - damaged_shown),
               infos->begin() + static_cast<std::ptrdiff_t>(readable));
  return left_out;
}

}  // namespace

absl::Status PrepareCheckpointDirectory(const std::string& directory, Disk* disk) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return formats::FileError(directory, "create folder", error.value());
  LOSSD_TRY(const std::vector<std::string> heads, NamedFolders(directory));
  for (const std::string& head : heads) RemoveLeftovers(disk, absl::StrCat(directory, "/", head));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& directory,
                                                            absl::string_view head) {
  std::vector<std::string> heads = {std::string(head)};
  if (head.empty()) {
    LOSSD_TRY(heads, NamedFolders(directory));
    std::sort(heads.begin(), heads.end());
  } else if (absl::Status status = ValidateName("head", head); !status.ok()) {
    return status;
  }
  std::vector<CheckpointInfo> list;
  for (const std::string& name : heads) {
    LOSSD_RETURN_IF_ERROR(AppendHead(directory, name, &list));
  }
  return list;
}

absl::StatusOr<NewestCheckpoints> ListNewest(const std::string& directory, absl::string_view head,
                                             size_t most, size_t most_folders) {
  LOSSD_RETURN_IF_ERROR(ValidateName("head", head));
  const std::string head_folder = absl::StrCat(directory, "/", head);
  NewestCheckpoints newest;
  size_t looked_at = 0;
  std::error_code error;
  for (fs::directory_iterator entry(head_folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (++looked_at > most_folders) {
      newest.and_more = true;
      break;
    }
    std::error_code gone;
    const std::string name = entry->path().filename();
    if (!fs::is_directory(entry->symlink_status(gone)) || !ValidateName("", name).ok()) continue;
    if (!HasManifest(head_folder, name)) continue;
    newest.checkpoints.push_back(InfoOf(directory, absl::StrCat(head, "/", name)));
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return formats::FileError(head, "list", error.value());
  }
  newest.left_out = ShortenTo(most, &newest.checkpoints);
  return newest;
}

absl::StatusOr<std::vector<std::string>> PruneCheckpoints(const std::string& directory,
                                                          absl::string_view saved, int64_t keep, Disk* disk) {
  const std::string head(saved.substr(0, saved.find('/')));
  LOSSD_TRY(const std::vector<CheckpointInfo> list, ListCheckpoints(directory, head));
  const std::string head_folder = absl::StrCat(directory, "/", head);
  std::vector<std::string> removed;
  int64_t kept = 1;  // `saved`
  for (const CheckpointInfo& info : list) {
    if (!info.automatic || info.name == saved || ++kept <= keep) continue;
    const absl::string_view name = absl::StripPrefix(info.name, absl::StrCat(head, "/"));
    const absl::StatusOr<TemporaryFolder> goes = TemporaryFolder::Adopt(disk, head_folder, name);
    if (absl::IsFailedPrecondition(goes.status())) continue;  // being read
    if (!goes.ok()) return goes.status();
    removed.push_back(info.name);
  }
  return removed;
}

// ---- Save numbers ----

namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kNumberPrefix = ".save-number-";

std::string NumberFile(const std::string& head_folder, uint64_t number) {
  return absl::StrFormat("%s/%s%016d", head_folder, kNumberPrefix, number);
}

// The number in the name of a file; nullopt if the file does not keep a number.
std::optional<uint64_t> NumberOf(const std::string& file) {
  absl::string_view digits = file;
  uint64_t number = 0;
  if (!absl::ConsumePrefix(&digits, kNumberPrefix) || !absl::SimpleAtoi(digits, &number)) return std::nullopt;
  if (number > kMostCounted) return std::nullopt;
  return number;
}

// The numbers of the files beside the checkpoints: one file, or two after a crash.
absl::StatusOr<std::vector<uint64_t>> KeptNumbers(const std::string& head_folder) {
  std::vector<uint64_t> numbers;
  std::error_code error;
  for (fs::directory_iterator entry(head_folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (const auto number = NumberOf(entry->path().filename())) numbers.push_back(*number);
  }
  if (error) return formats::FileError(head_folder, "list", error.value());
  return numbers;
}

absl::Status KeepNumber(Disk* disk, const std::string& head_folder, uint64_t number,
                        const std::vector<uint64_t>& before) {
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> file =
      disk->CreateFile(NumberFile(head_folder, number));
  if (absl::IsAlreadyExists(file.status())) return absl::OkStatus();
  if (!file.ok()) return file.status();
  absl::Status status = (*file)->Sync();
  if (status.ok()) status = (*file)->Close();
  if (status.ok()) status = disk->SyncFolder(head_folder);
  if (!status.ok()) return status;
  for (const uint64_t old : before) disk->RemoveFile(NumberFile(head_folder, old)).IgnoreError();
  return absl::OkStatus();
}

// A checkpoint with the save number that decides its place: its own, or that of the checkpoint that it
// follows.
struct Placed {
  uint64_t number = 0;
  const CheckpointInfo* info = nullptr;
};

auto OrderOf(const Placed& placed) {
  const CheckpointInfo& info = *placed.info;
  const bool has_number = info.save_number != 0;
  return std::tuple(info.status.ok(), placed.number, !has_number, absl::ToUnixSeconds(info.saved_at),
                    info.subject.step);
}

bool ComesBefore(const Placed& a, const Placed& b) {
  const auto order_a = OrderOf(a);
  const auto order_b = OrderOf(b);
  return order_a != order_b ? order_a > order_b : a.info->name < b.info->name;
}

}  // namespace

absl::StatusOr<uint64_t> TakeSaveNumber(Disk* disk, const std::string& directory, const std::string& head) {
  const std::string head_folder = absl::StrCat(directory, "/", head);
  LOSSD_TRY(const std::vector<uint64_t> kept, KeptNumbers(head_folder));
  LOSSD_TRY(const std::vector<CheckpointInfo> there, ListCheckpoints(directory, head));
  uint64_t last = 0;
  for (const uint64_t number : kept) last = std::max(last, number);
  for (const CheckpointInfo& info : there) last = std::max(last, info.save_number);
  const uint64_t next = std::min(last + 1, kMostCounted);
  LOSSD_RETURN_IF_ERROR(KeepNumber(disk, head_folder, next, kept));
  return next;
}

void SortNewestFirst(std::vector<CheckpointInfo>* infos) {
  // Sorted by time; below, each gets the largest number so far.
  std::vector<std::pair<absl::Time, uint64_t>> numbered;
  for (const CheckpointInfo& info : *infos) {
    if (info.status.ok() && info.save_number != 0) numbered.emplace_back(info.saved_at, info.save_number);
  }
  std::sort(numbered.begin(), numbered.end());
  for (size_t i = 1; i < numbered.size(); ++i) {
    numbered[i].second = std::max(numbered[i].second, numbered[i - 1].second);
  }
  std::vector<Placed> placed;
  for (const CheckpointInfo& info : *infos) {
    uint64_t number = info.save_number;
    if (number == 0) {
      const auto later =
          std::upper_bound(numbered.begin(), numbered.end(), std::pair(info.saved_at, kMostCounted));
      if (later != numbered.begin()) number = std::prev(later)->second;
    }
    placed.push_back({number, &info});
  }
  std::sort(placed.begin(), placed.end(), ComesBefore);
  std::vector<CheckpointInfo> sorted;
  sorted.reserve(infos->size());
  for (const Placed& one : placed) sorted.push_back(*one.info);
  *infos = std::move(sorted);
}

// ---- Removing a checkpoint ----

namespace {

namespace fs = std::filesystem;

constexpr char kRemovedField[] = "checkpoint";

// The error of a removal, with the checkpoint as the request named it.
absl::Status NoRemoval(absl::StatusCode code, absl::string_view checkpoint, absl::string_view why) {
  return errors::WithViolation(
      absl::Status(code, absl::StrCat("checkpoint ", checkpoint, ": ", why)),
      {kRemovedField, "must name a checkpoint of this server", std::string(checkpoint)});
}

absl::Status CheckFolder(const std::string& path, absl::string_view checkpoint, absl::string_view what) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (status.type() == fs::file_type::symlink) {
    return NoRemoval(absl::StatusCode::kInvalidArgument, checkpoint,
                     absl::StrCat(what, " is a symbolic link; lossd removes only folders that it has made"));
  }
  if (status.type() == fs::file_type::directory) return absl::OkStatus();
  if (status.type() == fs::file_type::none) return formats::FileError(checkpoint, "look at", error.value());
  return NoRemoval(absl::StatusCode::kNotFound, checkpoint, "there is none of this name");
}

// Whether a file has the manifest's name or a name as ShardFile makes them.
bool IsFileOfCheckpoint(const std::string& name) {
  return name == kManifestFile || name == kTensorFile ||
         (absl::StartsWith(name, "tensors-") && absl::EndsWith(name, ".safetensors"));
}

// Checks that the folder is a checkpoint that may be removed; returns the bytes of its files.
absl::StatusOr<int64_t> CheckRemovable(const std::string& directory, const std::string& folder,
                                       absl::string_view checkpoint) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(absl::StrCat(folder, "/", kManifestFile), error))) {
    return NoRemoval(absl::StatusCode::kNotFound, checkpoint,
                     absl::StrCat("the folder of this name has no ", kManifestFile, ", so it is none"));
  }
  const bool is_whole = ReadManifest(directory, checkpoint).ok();
  int64_t bytes = 0;
  error.clear();
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (!is_whole && !IsFileOfCheckpoint(name)) {
      return NoRemoval(
          absl::StatusCode::kFailedPrecondition, checkpoint,
          absl::StrCat("its manifest cannot be read, and '", name,
                       "' lies there, which is no file of a checkpoint; remove the folder by hand"));
    }
    std::error_code gone;
    const auto size = fs::is_regular_file(entry->symlink_status(gone)) ? entry->file_size(gone) : 0;
    if (!gone) bytes += static_cast<int64_t>(size);
  }
  if (error) return formats::FileError(checkpoint, "list", error.value());
  return bytes;
}

}  // namespace

absl::StatusOr<ReadLocks> LockForReading(const std::string& folder) {
  ReadLocks locks;
  absl::StatusOr<FolderLock> name =
      FolderLock::Wait(folder.substr(0, folder.rfind('/')), FolderLock::Kind::kShared);
  if (absl::IsUnimplemented(name.status())) return locks;
  if (!name.ok()) return name.status();
  locks.name = *std::move(name);
  LOSSD_TRY(locks.files, FolderLock::Wait(folder, FolderLock::Kind::kShared));
  return locks;
}

absl::StatusOr<RemovedCheckpoint> RemoveCheckpoint(const std::string& directory, absl::string_view checkpoint,
                                                   Disk* disk) {
  const std::pair<absl::string_view, absl::string_view> names =
      absl::StrSplit(checkpoint, absl::MaxSplits('/', 1));
  absl::Status status = ValidateName("checkpoint's head", names.first);
  status.Update(ValidateName("checkpoint's name", names.second));
  if (!status.ok()) {
    return errors::WithViolation(std::move(status),
                                 {kRemovedField, "must be <head>/<name>", std::string(checkpoint)});
  }
  const std::string head_folder = absl::StrCat(directory, "/", names.first);
  const std::string folder = absl::StrCat(head_folder, "/", names.second);
  status = CheckFolder(head_folder, checkpoint, "its head's folder");
  if (!status.ok()) return status;
  absl::StatusOr<FolderLock> name = FolderLock::Wait(head_folder, FolderLock::Kind::kExclusive);
  if (absl::IsUnimplemented(name.status())) return absl::FailedPreconditionError(name.status().message());
  if (!name.ok()) return name.status();
  status = CheckFolder(folder, checkpoint, "it");
  if (!status.ok()) return status;
  LOSSD_TRY(const int64_t bytes, CheckRemovable(directory, folder, checkpoint));
  LOSSD_TRY(const std::string nameless, TakeNameAway(disk, head_folder, names.second));
  *name = FolderLock();
  const bool is_gone = RemoveIfUnused(disk, nameless);
  return RemovedCheckpoint{.bytes = bytes, .unremoved = is_gone ? "" : nameless};
}

}  // namespace lossd::head
