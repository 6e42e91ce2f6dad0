// SPDX-License-Identifier: Apache-2.0
// Files with and without direct writes (file.h).
#include "proto/tensorfile/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::formats {

// ---- Files ----

namespace {

constexpr int64_t kWritebackBytes = int64_t{8} << 20;  // bytes after which a write-back is started

class PosixOutputFile final : public OutputFile {
 public:
  PosixOutputFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  ~PosixOutputFile() override {
    if (descriptor_ >= 0) close(descriptor_);
  }

  absl::Status Append(absl::Span<const uint8_t> bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) {
        return FileError(path_, absl::StrCat("write ", errors::ExactBytes(bytes.size()), " at ", size_),
                         errno);
      }
      bytes.remove_prefix(static_cast<size_t>(written));
      size_ += written;
    }
    if (size_ - pushed_ >= kWritebackBytes) {
      // Only a hint: if it fails, Sync writes everything.
      (void)sync_file_range(descriptor_, pushed_, size_ - pushed_, SYNC_FILE_RANGE_WRITE);
      pushed_ = size_;
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    if (fsync(descriptor_) == 0) return absl::OkStatus();
    return FileError(path_, absl::StrCat("fsync ", errors::ExactBytes(size_)), errno);
  }

  absl::Status Close() override {
    if (close(std::exchange(descriptor_, -1)) == 0) return absl::OkStatus();
    return FileError(path_, "close", errno);
  }

 private:
  const std::string path_;
  int descriptor_;
  int64_t size_ = 0;
  int64_t pushed_ = 0;  // bytes whose write-back has been started
};

}  // namespace

absl::Status FileError(absl::string_view path, absl::string_view action, int error_number) {
  const absl::Status status = absl::ErrnoToStatus(error_number, absl::StrCat(path, ": ", action));
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kResourceExhausted:
      return status;
    default:
      return absl::InternalError(status.message());
  }
}

InputFile::InputFile(std::string name, int descriptor, int64_t size)
    : name_(std::move(name)), descriptor_(descriptor), size_(size) {}

InputFile::~InputFile() { close(descriptor_); }

absl::StatusOr<std::unique_ptr<InputFile>> InputFile::Open(const std::string& path, std::string name) {
  if (name.empty()) name = path;
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return FileError(name, "open", errno);
  return Adopt(descriptor, std::move(name));
}

absl::StatusOr<std::unique_ptr<InputFile>> InputFile::Adopt(int descriptor, std::string name) {
  struct stat status {};
  if (fstat(descriptor, &status) != 0) {
    const int error_number = errno;
    close(descriptor);
    return FileError(name, "stat", error_number);
  }
  if (!S_ISREG(status.st_mode)) {
    close(descriptor);
    return absl::FailedPreconditionError(absl::StrCat(name, ": not a regular file"));
  }
  return std::unique_ptr<InputFile>(new InputFile(std::move(name), descriptor, status.st_size));
}

absl::Status InputFile::ReadAt(int64_t offset, absl::Span<uint8_t> out) const {
  while (!out.empty()) {
    const ssize_t count = pread(descriptor_, out.data(), out.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(name_, "read", errno);
    if (count == 0) {
      return absl::DataLossError(
          absl::StrCat(name_, ": ends at byte ", offset, ", ", errors::ExactBytes(out.size()), " too early"));
    }
    offset += count;
    out.remove_prefix(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OutputFile>> CreateOutputFile(const std::string& path) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (descriptor < 0) return FileError(path, "create", errno);
  return AdoptOutputFile(path, descriptor);
}

std::unique_ptr<OutputFile> AdoptOutputFile(std::string path, int descriptor) {
  return std::make_unique<PosixOutputFile>(std::move(path), descriptor);
}

absl::Status SyncFolder(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return FileError(path, "open folder", errno);
  const int result = fsync(descriptor);
  const int error_number = errno;
  close(descriptor);
  return result == 0 ? absl::OkStatus() : FileError(path, "fsync folder", error_number);
}

DataWriter::DataWriter(std::string path, std::unique_ptr<OutputFile> file, int64_t data_bytes)
    : path_(std::move(path)), file_(std::move(file)), data_bytes_(data_bytes) {}

absl::Status DataWriter::Append(absl::Span<const uint8_t> bytes) {
  if (!status_.ok()) return status_;
  const auto count = static_cast<int64_t>(bytes.size());
  if (count > data_bytes_ - written_) {
    status_ = absl::OutOfRangeError(absl::StrCat(path_, ": ", errors::ExactBytes(count), " after ",
                                                 errors::ExactBytes(written_), " are more than the declared ",
                                                 errors::ExactBytes(data_bytes_)));
    return status_;
  }
  status_ = file_->Append(bytes);
  written_ += count;
  return status_;
}

absl::Status DataWriter::Finish() {
  if (!status_.ok()) return status_;
  if (written_ != data_bytes_) {
    return absl::FailedPreconditionError(absl::StrCat(path_, ": ", errors::ExactBytes(written_),
                                                      " written of the declared ",
                                                      errors::ExactBytes(data_bytes_)));
  }
  status_ = file_->Sync();
  if (status_.ok()) status_ = file_->Close();
  return status_;
}

// ---- Direct writes ----

namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

int64_t RoundDown(int64_t value, int64_t unit) { return value / unit * unit; }

bool SetDirect(int descriptor, bool direct) {
  const int flags = fcntl(descriptor, F_GETFL);
  return flags >= 0 && fcntl(descriptor, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

class DirectFile final : public OutputFile {
 public:
  DirectFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  ~DirectFile() override {
    if (descriptor_ >= 0) close(descriptor_);
  }

  absl::Status Append(absl::Span<const uint8_t> bytes) override {
    while (!bytes.empty()) {
      LOSSD_TRY(int64_t taken, CanWriteFrom(bytes) ? WriteFrom(bytes) : Keep(bytes));
      bytes.remove_prefix(static_cast<size_t>(taken));
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    LOSSD_RETURN_IF_ERROR(WriteRest());
    if (fsync(descriptor_) == 0) return absl::OkStatus();
    return FileError(path_, absl::StrCat("fsync ", errors::ExactBytes(written_)), errno);
  }

  absl::Status Close() override {
    absl::Status status = WriteRest();
    if (close(std::exchange(descriptor_, -1)) != 0) status.Update(FileError(path_, "close", errno));
    return status;
  }

 private:
  bool CanWriteFrom(absl::Span<const uint8_t> bytes) const {
    return kept_ == 0 && static_cast<int64_t>(bytes.size()) >= kDirectAlignment &&
           reinterpret_cast<uintptr_t>(bytes.data()) % kDirectAlignment == 0;
  }

  // Directly writes as many of the bytes as possible; returns how many.
  absl::StatusOr<int64_t> WriteFrom(absl::Span<const uint8_t> bytes) {
    const int64_t whole = RoundDown(static_cast<int64_t>(bytes.size()), kDirectAlignment);
    LOSSD_RETURN_IF_ERROR(Write(bytes.first(static_cast<size_t>(whole))));
    return whole;
  }

  // Copies as many of the bytes into the buffer as fit, and writes the buffer when it is full; returns how
  // many.
  absl::StatusOr<int64_t> Keep(absl::Span<const uint8_t> bytes) {
    if (buffer_ == nullptr) buffer_ = AllocateAligned(kDirectBufferBytes);
    const int64_t count = std::min(static_cast<int64_t>(bytes.size()), kDirectBufferBytes - kept_);
    std::memcpy(&buffer_[static_cast<size_t>(kept_)], bytes.data(), static_cast<size_t>(count));
    kept_ += count;
    if (kept_ < kDirectBufferBytes) return count;
    kept_ = 0;
    LOSSD_RETURN_IF_ERROR(Write({buffer_.get(), static_cast<size_t>(kDirectBufferBytes)}));
    return count;
  }

  // Writes the rest in the buffer. Its size may be no multiple of the alignment, so it is not written
  // directly.
  absl::Status WriteRest() {
    if (kept_ == 0) return absl::OkStatus();
    BecomeIndirect();
    return Write({buffer_.get(), static_cast<size_t>(std::exchange(kept_, 0))});
  }

  absl::Status Write(absl::Span<const uint8_t> bytes) {
    while (!bytes.empty()) {
      const ssize_t count = write(descriptor_, bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno == EINVAL && direct_) {  // the file system needs another alignment
        BecomeIndirect();
        continue;
      }
      if (count < 0) {
        return FileError(path_, absl::StrCat("write ", errors::ExactBytes(bytes.size()), " at ", written_),
                         errno);
      }
      if (count % kDirectAlignment != 0) BecomeIndirect();  // the disk is full; the next write fails
      bytes.remove_prefix(static_cast<size_t>(count));
      written_ += count;
    }
    return absl::OkStatus();
  }

  void BecomeIndirect() {
    if (std::exchange(direct_, false)) (void)SetDirect(descriptor_, false);
  }

  const std::string path_;
  int descriptor_;
  bool direct_ = true;
  int64_t written_ = 0;
  AlignedBuffer buffer_;
  int64_t kept_ = 0;  // bytes in the buffer
};

}  // namespace

AlignedBuffer AllocateAligned(int64_t bytes) {
  const int64_t alignment = bytes < kHugePageBytes ? kDirectAlignment : kHugePageBytes;
  const auto rounded = static_cast<size_t>((bytes + alignment - 1) / alignment * alignment);
  void* const memory = std::aligned_alloc(static_cast<size_t>(alignment), rounded);
  if (memory == nullptr) throw std::bad_alloc();
  if (alignment == kHugePageBytes) (void)madvise(memory, rounded, MADV_HUGEPAGE);  // only a hint
  return AlignedBuffer(static_cast<uint8_t*>(memory));
}

absl::StatusOr<std::unique_ptr<OutputFile>> CreateDirectFile(const std::string& path) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (descriptor < 0) return FileError(path, "create", errno);
  if (!SetDirect(descriptor, true)) return AdoptOutputFile(path, descriptor);
  return std::make_unique<DirectFile>(path, descriptor);
}

}  // namespace lossd::formats
