// SPDX-License-Identifier: Apache-2.0
// FaultyDisk: a disk on which one operation goes wrong: the operation fails, or the process or the machine
// dies with it. It uses real folders but does not flush them to a real disk. It records instead what would be
// lost if the power failed.
#ifndef LOSSD_TESTS_SERVER_HEAD_FAULTY_DISK_H_
#define LOSSD_TESTS_SERVER_HEAD_FAULTY_DISK_H_

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/head/disk.h"

namespace lossd::head {

enum class Fault {
  kError,      // the operation fails with an error number; a write may have written a part
  kKill,       // the process dies: the operation may or may not have happened; later operations do not happen
  kPowerLoss,  // the machine dies: in addition, everything that was not flushed to the disk may be lost
};

// Thread-safe.
class FaultyDisk final : public Disk {
 public:
  // The operation with number `at`, counted from 1, goes wrong; 0: none.
  FaultyDisk(Fault fault, int64_t at, int error_number, uint32_t seed)
      : fault_(fault), at_(at), error_number_(error_number), random_(seed) {}

  // Whether operation `at` was reached.
  bool struck() const {
    absl::MutexLock lock(&mutex_);
    return at_ > 0 && operations_ >= at_;
  }
  // The kind of the operation that went wrong, e.g. "fsync".
  std::string victim() const {
    absl::MutexLock lock(&mutex_);
    return victim_;
  }

  absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateLargeFile(const std::string& path) override {
    return CreateFile(path);
  }
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateFile(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    std::unique_ptr<formats::OutputFile> file;
    absl::Status status = Perform("create", path, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      auto created = Disk::CreateFile(path);
      if (!created.ok()) return created.status();
      file = std::make_unique<File>(this, path, *std::move(created));
      unsynced_data_.insert(path);
      unsynced_names_.push_back({path, ""});
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return file;
  }
  absl::Status CreateFolder(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    return Perform("create folder", path, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      absl::Status status = Disk::CreateFolder(path);
      if (status.ok()) unsynced_names_.push_back({path, ""});
      return status;
    });
  }
  absl::Status SyncFolder(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    return Perform("fsync folder", path, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      std::erase_if(unsynced_names_, [&](const Name& name) { return Parent(name.path) == path; });
      return absl::OkStatus();
    });
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    absl::MutexLock lock(&mutex_);
    return Perform("rename", from, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      absl::Status status = Disk::Rename(from, to);
      if (!status.ok()) return status;
      Follow(from, to);
      unsynced_names_.push_back({to, from});
      return status;
    });
  }
  absl::Status RemoveFile(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    return Perform("remove", path, [&] { return Disk::RemoveFile(path); });
  }
  absl::Status RemoveFolder(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    return Perform("remove folder", path, [&] { return Disk::RemoveFolder(path); });
  }

 private:
  // A name that was created. `from` is its previous name, empty for a new file or folder.
  struct Name {
    std::string path;
    std::string from;
  };

  class File final : public formats::OutputFile {
   public:
    File(FaultyDisk* disk, std::string path, std::unique_ptr<formats::OutputFile> file)
        : disk_(disk), path_(std::move(path)), file_(std::move(file)) {}
    absl::Status Append(absl::Span<const uint8_t> bytes) override {
      absl::MutexLock lock(&disk_->mutex_);
      return disk_->Perform(
          "write", path_, [&] { return file_->Append(bytes); },
          [&](size_t part) { (void)file_->Append(bytes.first(part % bytes.size())); });
    }
    absl::Status Sync() override {
      absl::MutexLock lock(&disk_->mutex_);
      return disk_->Perform("fsync", path_, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
        disk_->unsynced_data_.erase(path_);
        return absl::OkStatus();
      });
    }
    absl::Status Close() override {
      absl::MutexLock lock(&disk_->mutex_);
      return disk_->Perform("close", path_, [&] { return file_->Close(); });
    }

   private:
    FaultyDisk* const disk_;
    const std::string path_;
    const std::unique_ptr<formats::OutputFile> file_;
  };

  static std::string Parent(const std::string& path) { return std::filesystem::path(path).parent_path(); }

  // Runs `operation`, or makes it go wrong; `half` does a part of it.
  absl::Status Perform(
      absl::string_view what, const std::string& path, const std::function<absl::Status()>& operation,
      const std::function<void(size_t)>& half = [](size_t) {}) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (dead_) return absl::InternalError("the process is dead");
    if (++operations_ != at_) return operation();
    victim_ = std::string(what);
    if (fault_ == Fault::kError) {
      half(random_());
      return formats::FileError(path, what, error_number_);
    }
    switch (random_() % 3) {
      case 0:
        (void)operation();
        break;
      case 1:
        half(random_());
        break;
    }
    dead_ = true;
    if (fault_ == Fault::kPowerLoss) LosePower();
    return absl::InternalError("the process is dead");
  }

  // Updates the recorded paths when a folder is renamed, because its files move with it.
  void Follow(const std::string& from, const std::string& to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto moved = [&](const std::string& path) {
      return path == from || absl::StartsWith(path, from + "/") ? to + path.substr(from.size()) : path;
    };
    std::set<std::string> data;
    for (const std::string& path : unsynced_data_) data.insert(moved(path));
    unsynced_data_ = std::move(data);
    for (Name& name : unsynced_names_) name.path = moved(name.path);
  }

  // Undoes some of the operations that were not flushed, from the latest to the earliest.
  void LosePower() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    namespace fs = std::filesystem;
    std::error_code gone;
    for (const std::string& path : unsynced_data_) {
      if (random_() % 2 == 0 && fs::exists(path, gone)) {
        fs::resize_file(path, random_() % (fs::file_size(path, gone) + 1), gone);
      }
    }
    while (!unsynced_names_.empty()) {
      const Name name = unsynced_names_.back();
      unsynced_names_.pop_back();
      if (random_() % 2 == 0) continue;
      if (name.from.empty()) {
        fs::remove_all(name.path, gone);
      } else {
        fs::rename(name.path, name.from, gone);
        Follow(name.path, name.from);
      }
    }
  }

  const Fault fault_;
  const int64_t at_;
  const int error_number_;
  mutable absl::Mutex mutex_;
  std::mt19937 random_ ABSL_GUARDED_BY(mutex_);
  int64_t operations_ ABSL_GUARDED_BY(mutex_) = 0;
  bool dead_ ABSL_GUARDED_BY(mutex_) = false;
  std::string victim_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> unsynced_data_ ABSL_GUARDED_BY(mutex_);  // files whose content may be lost
  std::vector<Name> unsynced_names_ ABSL_GUARDED_BY(mutex_);     // in the order of their creation
};

// A disk that asks a virtual function before each write, so that tests can delay the write or make it fail.
class WatchedDisk : public Disk {
 public:
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateFile(const std::string& path) override {
    return Watched(path, Disk::CreateFile(path));
  }
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateLargeFile(const std::string& path) override {
    return Watched(path, Disk::CreateLargeFile(path));
  }

 protected:
  // If these return an error, the operation returns it and does not happen.
  virtual absl::Status BeforeWrite(const std::string& path, absl::Span<const uint8_t> bytes) = 0;
  virtual absl::Status BeforeSync(const std::string& /*path*/) { return absl::OkStatus(); }

 private:
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> Watched(
      const std::string& path, absl::StatusOr<std::unique_ptr<formats::OutputFile>> file) {
    if (!file.ok()) return file.status();
    return std::make_unique<File>(this, path, *std::move(file));
  }

  class File final : public formats::OutputFile {
   public:
    File(WatchedDisk* disk, std::string path, std::unique_ptr<formats::OutputFile> file)
        : disk_(disk), path_(std::move(path)), file_(std::move(file)) {}
    absl::Status Append(absl::Span<const uint8_t> bytes) override {
      absl::Status status = disk_->BeforeWrite(path_, bytes);
      return status.ok() ? file_->Append(bytes) : status;
    }
    absl::Status Sync() override {
      absl::Status status = disk_->BeforeSync(path_);
      return status.ok() ? file_->Sync() : status;
    }
    absl::Status Close() override { return file_->Close(); }

   private:
    WatchedDisk* const disk_;
    const std::string path_;
    const std::unique_ptr<formats::OutputFile> file_;
  };
};

}  // namespace lossd::head

#endif  // LOSSD_TESTS_SERVER_HEAD_FAULTY_DISK_H_
