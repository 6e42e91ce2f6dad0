// SPDX-License-Identifier: Apache-2.0
// Files for the tensor formats. An InputFile is read at any offset. An OutputFile is written from its start,
// through the page cache or with direct writes (CreateDirectFile). Errors name the file, the operation (for
// writes with the number of bytes) and the operating system's reason. Codes: NOT_FOUND, ALREADY_EXISTS,
// PERMISSION_DENIED, RESOURCE_EXHAUSTED (disk full, quota), otherwise INTERNAL.
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

// Makes an error with the text "<path>: <action>: <text of error_number>" and the matching code.
absl::Status FileError(absl::string_view path, absl::string_view action, int error_number);

// A regular file open for reading. Thread-safe.
class InputFile {
 public:
  // FAILED_PRECONDITION if the path is not a regular file. `name`: what errors call the file; empty: its
  // path.
  static absl::StatusOr<std::unique_ptr<InputFile>> Open(const std::string& path, std::string name = "");
  // The same for a file that is open already. Takes ownership of the descriptor, also on an error.
  static absl::StatusOr<std::unique_ptr<InputFile>> Adopt(int descriptor, std::string name);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& name() const { return name_; }  // the path, or the name given to Open
  int64_t size() const { return size_; }             // when the file was opened
  // Fills `out` with the bytes from `offset` on. DATA_LOSS if the file ends before.
  absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) const;

 private:
  InputFile(std::string name, int descriptor, int64_t size);

  const std::string name_;
  const int descriptor_;
  const int64_t size_;
};

// A file being written from its start. Thread-compatible. Destroying it closes it, whether or not it is
// complete.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual absl::Status Append(absl::Span<const uint8_t> bytes) = 0;
  // Syncs everything that was appended to the disk.
  virtual absl::Status Sync() = 0;
  // The last call.
  virtual absl::Status Close() = 0;
};

// A function that creates a file that must not exist. Tests replace it to simulate failing disks. In
// CreateOutputFile the system starts to write appended bytes to the disk early, so that Sync has little left
// to wait for.
using OutputFileFactory = std::function<absl::StatusOr<std::unique_ptr<OutputFile>>(const std::string& path)>;
absl::StatusOr<std::unique_ptr<OutputFile>> CreateOutputFile(const std::string& path);
// The same for an empty file that is open for writing. Takes ownership of the descriptor.
std::unique_ptr<OutputFile> AdoptOutputFile(std::string path, int descriptor);

// Syncs the names in a folder to the disk.
absl::Status SyncFolder(const std::string& path);

// Writes a file of known size, piece by piece. Thread-compatible. An error is final: every later call
// returns it.
class DataWriter {
 public:
  // Exactly `data_bytes` more bytes will be written to `file`.
  DataWriter(std::string path, std::unique_ptr<OutputFile> file, int64_t data_bytes);

  // OUT_OF_RANGE if there are more bytes than declared.
  absl::Status Append(absl::Span<const uint8_t> bytes);
  // Syncs and closes the file. FAILED_PRECONDITION if bytes are missing. Call once, last.
  absl::Status Finish();

 private:
  const std::string path_;
  std::unique_ptr<OutputFile> file_;
  const int64_t data_bytes_;
  int64_t written_ = 0;
  absl::Status status_;
};

// Below: large files that are written to the disk past the page cache (O_DIRECT). Such a file saves a copy,
// takes no system memory for bytes that are not read again soon, and leaves nothing to write back when it is
// synced.

// For a direct write the memory address, the offset in the file and the number of bytes have to be multiples
// of this. Appended bytes that fulfill this are written from where they are; other bytes are copied first.
inline constexpr int64_t kDirectAlignment = 4096;
// The size of the buffer for these copies, one for each file being written.
inline constexpr int64_t kDirectBufferBytes = int64_t{4} << 20;

struct FreeAligned {
  void operator()(uint8_t* memory) const { std::free(memory); }
};
using AlignedBuffer = std::unique_ptr<uint8_t[], FreeAligned>;

// Allocates at least `bytes` uninitialized bytes, aligned to kDirectAlignment. The system allocates the pages
// when they are first written, huge pages if it has them.
AlignedBuffer AllocateAligned(int64_t bytes);

// Creates a file that must not exist, with direct writes if the file system supports them, otherwise as
// CreateOutputFile. The last bytes appended may stay in the buffer until Sync or Close.
absl::StatusOr<std::unique_ptr<OutputFile>> CreateDirectFile(const std::string& path);

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_FILE_H_
