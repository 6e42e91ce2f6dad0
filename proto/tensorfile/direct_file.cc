// SPDX-License-Identifier: Apache-2.0
#include "proto/tensorfile/direct_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/errors/bytes.h"

namespace lossd::formats {
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
      absl::StatusOr<int64_t> taken = CanWriteFrom(bytes) ? WriteFrom(bytes) : Keep(bytes);
      if (!taken.ok()) return taken.status();
      bytes.remove_prefix(static_cast<size_t>(*taken));
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    if (absl::Status status = WriteRest(); !status.ok()) return status;
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

  // Writes as much of the bytes as can go directly; how much that was.
  absl::StatusOr<int64_t> WriteFrom(absl::Span<const uint8_t> bytes) {
    const int64_t whole = RoundDown(static_cast<int64_t>(bytes.size()), kDirectAlignment);
    absl::Status status = Write(bytes.first(static_cast<size_t>(whole)));
    if (!status.ok()) return status;
    return whole;
  }

  // Takes as many of the bytes into the buffer as fit; how many that was.
  absl::StatusOr<int64_t> Keep(absl::Span<const uint8_t> bytes) {
    if (buffer_ == nullptr) buffer_ = AllocateAligned(kDirectBufferBytes);
    const int64_t count = std::min(static_cast<int64_t>(bytes.size()), kDirectBufferBytes - kept_);
    std::memcpy(&buffer_[static_cast<size_t>(kept_)], bytes.data(), static_cast<size_t>(count));
    kept_ += count;
    if (kept_ < kDirectBufferBytes) return count;
    kept_ = 0;
    absl::Status status = Write({buffer_.get(), static_cast<size_t>(kDirectBufferBytes)});
    if (!status.ok()) return status;
    return count;
  }

  // What the buffer has. It ends anywhere, and so does not go directly.
  absl::Status WriteRest() {
    if (kept_ == 0) return absl::OkStatus();
    BecomeIndirect();
    return Write({buffer_.get(), static_cast<size_t>(std::exchange(kept_, 0))});
  }

  absl::Status Write(absl::Span<const uint8_t> bytes) {
    while (!bytes.empty()) {
      const ssize_t count = write(descriptor_, bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno == EINVAL && direct_) {  // it wants another alignment
        BecomeIndirect();
        continue;
      }
      if (count < 0) {
        return FileError(path_, absl::StrCat("write ", errors::ExactBytes(bytes.size()), " at ", written_),
                         errno);
      }
      if (count % kDirectAlignment != 0) BecomeIndirect();  // a full disk took a part; the next write says so
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
  if (alignment == kHugePageBytes) (void)madvise(memory, rounded, MADV_HUGEPAGE);  // a hint
  return AlignedBuffer(static_cast<uint8_t*>(memory));
}

absl::StatusOr<std::unique_ptr<OutputFile>> CreateDirectFile(const std::string& path) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (descriptor < 0) return FileError(path, "create", errno);
  if (!SetDirect(descriptor, true)) return AdoptOutputFile(path, descriptor);
  return std::make_unique<DirectFile>(path, descriptor);
}

}  // namespace lossd::formats
