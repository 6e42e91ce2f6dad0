// SPDX-License-Identifier: Apache-2.0
// A disk that is asked before each write, so that tests can delay or fail it.
#ifndef LOSSD_TESTS_SERVER_HEAD_WATCHED_DISK_H_
#define LOSSD_TESTS_SERVER_HEAD_WATCHED_DISK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/head/disk.h"

namespace lossd::head {

class WatchedDisk : public Disk {
 public:
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateFile(const std::string& path) override {
    return Watched(path, Disk::CreateFile(path));
  }
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateLargeFile(const std::string& path) override {
    return Watched(path, Disk::CreateLargeFile(path));
  }

 protected:
  // An error is the operation's answer, and it does not happen.
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

#endif  // LOSSD_TESTS_SERVER_HEAD_WATCHED_DISK_H_
