// SPDX-License-Identifier: Apache-2.0
#include "server/head/checkpoint_infos.h"

#include <sys/stat.h>

#include <atomic>
#include <list>
#include <map>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/clocks/clock.h"
#include "server/head/checkpoint_layout.h"

namespace lossd::head {
namespace {

// A change within the resolution of a file's times leaves them as they are, so times this young prove
// nothing.
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

// nullopt: it is no regular file, or there is none.
std::optional<FileStamp> StampOf(const std::string& path) {
  struct stat found {};
  if (lstat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) return std::nullopt;
  return FileStamp{.device = found.st_dev,
                   .inode = found.st_ino,
                   .size = found.st_size,
                   .modified = absl::TimeFromTimespec(found.st_mtim),
                   .changed = absl::TimeFromTimespec(found.st_ctim)};
}

// Beside the wall clock, which files' times are of. If that was set back, nothing is settled for a while.
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
  std::list<Entry> entries_ ABSL_GUARDED_BY(mutex_);  // last used last
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
  info.saved_at = manifest->saved_at;
  info.automatic = manifest->automatic;
  info.save_number = manifest->save_number;
  return info;
}

// What the file itself says, unlike what the disk or the system said just now.
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

}  // namespace lossd::head
