// SPDX-License-Identifier: Apache-2.0
// Files as the tensor formats use them: an InputFile is read at any place; an OutputFile is written from its
// start, through the page cache or past it (CreateDirectFile). Errors name the file, what was being done (for
// writes with their bytes) and the operating system's reason: NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED,
// RESOURCE_EXHAUSTED (disk full, quota), otherwise INTERNAL.
#ifndef LOSSD_PROTO_TENSORFILE_FILE_H_
#define LOSSD_PROTO_TENSORFILE_FILE_H_

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::formats {

// "<path>: <action>: <text of error_number>" with the code that fits.
absl::Status FileError(absl::string_view path, absl::string_view action, int error_number);

// A regular file open for reading. Thread-safe.
class InputFile {
 public:
  // FAILED_PRECONDITION if the path is no regular file. `name` is what errors call the file, if that is to be
  // something else than its path.
  static absl::StatusOr<std::unique_ptr<InputFile>> Open(const std::string& path, std::string name = "");
  // The same for a file that is open already. Takes the descriptor over, also on an error.
  static absl::StatusOr<std::unique_ptr<InputFile>> Adopt(int descriptor, std::string name);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& name() const { return name_; }  // the path, or what Open was told
  int64_t size() const { return size_; }             // when opened
  // Fills `out` with the bytes from `offset` on. DATA_LOSS if the file ends before.
  absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) const;

 private:
  InputFile(std::string name, int descriptor, int64_t size);

  const std::string name_;
  const int descriptor_;
  const int64_t size_;
};

// A file being written from its start. Thread-compatible. Destroying it closes it, whatever was written.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual absl::Status Append(absl::Span<const uint8_t> bytes) = 0;
  // Brings everything to the disk.
  virtual absl::Status Sync() = 0;
  // Last.
  virtual absl::Status Close() = 0;
};

// Makes a file that did not exist. What is appended starts on its way to the disk at once, so that Sync has
// little left to wait for. Replaceable, so that tests can have disks fail.
using OutputFileFactory = std::function<absl::StatusOr<std::unique_ptr<OutputFile>>(const std::string& path)>;
absl::StatusOr<std::unique_ptr<OutputFile>> CreateOutputFile(const std::string& path);
// The same for an empty file that is open for writing. Takes the descriptor over.
std::unique_ptr<OutputFile> AdoptOutputFile(std::string path, int descriptor);

// Brings the names in a folder to the disk.
absl::Status SyncFolder(const std::string& path);

// Writes a file of known size, piece by piece. Thread-compatible. An error is final: every later call
// returns it.
class DataWriter {
 public:
  // `file` continues with exactly `data_bytes` bytes.
  DataWriter(std::string path, std::unique_ptr<OutputFile> file, int64_t data_bytes);

  // OUT_OF_RANGE if more than the declared bytes come.
  absl::Status Append(absl::Span<const uint8_t> bytes);
  // FAILED_PRECONDITION if bytes are missing, else brings the file to the disk. To be called once, last.
  absl::Status Finish();

 private:
  const std::string path_;
  std::unique_ptr<OutputFile> file_;
  const int64_t data_bytes_;
  int64_t written_ = 0;
  absl::Status status_;
};

// The rest of this file is about large files that go to the disk without passing through the page cache
// (O_DIRECT). Such a file costs one copy less and no memory of the system's for bytes that are not read again
// soon, and leaves nothing to write back when the file is synced.

// Memory, places in the file and numbers of bytes have to be multiples of this. Bytes that lie so, and come
// at such a place of the file, are written from where they are; others are copied first.
inline constexpr int64_t kDirectAlignment = 4096;
// What a file that is being written takes for these copies.
inline constexpr int64_t kDirectBufferBytes = int64_t{4} << 20;

struct FreeAligned {
  void operator()(uint8_t* memory) const { std::free(memory); }
};
using AlignedBuffer = std::unique_ptr<uint8_t[], FreeAligned>;

// At least `bytes` bytes without initial values, aligned to kDirectAlignment. Pages come into being as they
// are filled, large ones where the system has them.
AlignedBuffer AllocateAligned(int64_t bytes);

// Makes a file that did not exist, with direct writes if the file system has them, and otherwise as
// CreateOutputFile does. What was appended last may be in memory until Sync or Close.
absl::StatusOr<std::unique_ptr<OutputFile>> CreateDirectFile(const std::string& path);

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_FILE_H_
