// SPDX-License-Identifier: Apache-2.0
// Saving a head as a checkpoint (SaveCheckpoint) and reading it back (CheckpointReader). A checkpoint is a
// folder <directory>/<head>/<checkpoint name>/ with the head's tensors and a manifest of checksums;
// docs/checkpoint-format.md describes the files. checkpoint_store.h lists, removes and numbers checkpoints.
//
// A checkpoint is complete or not there: it is written under a temporary name, brought to the disk and
// renamed. Nothing is ever overwritten.
//
// Tensors come and go in slices through callbacks, so that a caller can run each slice on the device's
// thread while the disk works on others. All functions are thread-safe; a CheckpointReader is
// thread-compatible.
//
// Errors: INVALID_ARGUMENT (a bad name), ALREADY_EXISTS, NOT_FOUND, DATA_LOSS (a checkpoint that does not
// hold what was saved; the tensor or file is named), RESOURCE_EXHAUSTED (disk full), CANCELLED, otherwise
// INTERNAL; all with the operating system's words.
#ifndef LOSSD_SERVER_HEAD_CHECKPOINT_H_
#define LOSSD_SERVER_HEAD_CHECKPOINT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/head_config.h"
#include "proto/tensorfile/safetensors.h"
#include "server/head/disk.h"
#include "server/head/file_sites.h"
#include "server/head/manifest.h"
#include "server/head/shard_files.h"

namespace lossd::head {

// Takes the fp32 values of rows [row_begin, row_begin + rows) of a tensor. The span has exactly their bytes.
// An error ends the operation and is returned.
using TensorSink = absl::FunctionRef<absl::Status(kernels::TensorId id, int64_t row_begin, int64_t rows,
                                                  absl::Span<const uint8_t> in)>;

struct SaveOptions {
  int64_t slice_bytes = int64_t{8} << 20;  // the most a callback handles at once; at least one row
  // Memory for what was read and is not written yet, allocated as it is needed: the source is never further
  // ahead of the disk than this. At least two slices, at most what the checkpoint takes. The threads share
  // it. Beside it each of them may take formats::kDirectBufferBytes.
  int64_t buffer_bytes = int64_t{1} << 30;
  ShardRules shards;  // into how many files, and how many of them at once
  // What all files below the directory may take together, the new checkpoint included; 0: no limit.
  int64_t limit_bytes = 0;
  Disk* disk = Disk::Real();
  // All on the thread that saves. `on_read`: once, when the source will not be called any more.
  // `on_progress`: now and then, a few times a second while the disk is slow. `cancelled`: true ends the save
  // with CANCELLED.
  std::function<void()> on_read = [] {};
  std::function<void(const SaveProgress&)> on_progress = [](const SaveProgress&) {};
  std::function<bool()> cancelled = [] { return false; };
};

// FAILED_PRECONDITION naming the first difference if a checkpoint of a head like `saved` cannot be loaded
// into one like `head`. Their compute dtypes may differ.
absl::Status CheckLoadable(const kernels::HeadConfig& saved, const kernels::HeadConfig& head);

// "step-" and the step with ten digits.
std::string AutomaticName(uint64_t step);

struct SavedCheckpoint {
  std::string name;  // without the head's
  int64_t bytes = 0;
  int64_t not_finite = 0;                   // values that are infinite or NaN
  absl::Time saved_at = absl::UnixEpoch();  // to the second
};

// Saves to <directory>/<subject.head>/<name>. The directory must exist. On an error nothing is left behind
// but an empty <head> folder; only if the very last fsync fails the checkpoint stays. Leftovers of earlier
// saves of the head are removed. RESOURCE_EXHAUSTED before anything is written if limit_bytes would be
// passed.
//
// An empty `name`: the server chooses, and the manifest says so. The name is AutomaticName; if another
// checkpoint has it, because the head went back to an earlier step and was trained to this one again, a
// hyphen and a digest of the content follow. ALREADY_EXISTS if the checkpoint with that name holds the same.
//
// The source is called by this thread, ahead of the disk, which other threads serve: reading waits for the
// disk only once the buffer is full. Rows come in any order.
//
// `sites`: other processes that have some of the classes. If the checkpoint has several files, those that
// prove to see the folder write their classes by themselves; the source is not asked for these then.
absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const std::string& directory, absl::string_view name,
                                               const CheckpointSubject& subject, TensorSource source,
                                               const SaveOptions& options = {},
                                               std::vector<std::unique_ptr<SaveSite>> sites = {});

struct LoadOptions {
  // The most the sink gets at once; at least one row. So little that it is still in a processor's cache when
  // it was hashed and goes to the device.
  int64_t slice_bytes = int64_t{2} << 20;
  int64_t buffer_bytes = int64_t{1} << 30;  // for what was read from the disk; at least two slices
  int threads = 4;                          // that read, at least 1; no more than the buffer has room for
  // Everything is read and compared before the sink gets anything. Without it the sink's caller has to throw
  // away what the sink got when Load fails.
  bool verify_first = true;
  // Whether the sink wants any of these rows, which a file has of a tensor; null: it wants all. Rows of a
  // file that are wanted in part come as a whole.
  std::function<bool(const TensorPart&)> wanted = nullptr;
};

// An open checkpoint. While it is open, the checkpoint is not pruned, and its files stay if its name is taken
// away.
class CheckpointReader {
 public:
  // Opens `checkpoint` ("<head>/<name>") and checks its manifest and that all rows of every tensor are there
  // with the right type and size.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(const std::string& directory,
                                                                absl::string_view checkpoint);

  const std::string& name() const { return name_; }  // "<head>/<name>"
  const CheckpointSubject& subject() const { return subject_; }
  absl::Time saved_at() const { return saved_at_; }                      // the epoch if it is not known
  const std::string& content_digest() const { return content_digest_; }  // ContentDigest

  // Reads files that are not a checkpoint yet: whether `folder` below the directory has what `shards` say, of
  // a head like `config`, bit for bit. DATA_LOSS naming the file if not. Adds to `not_finite` how many of
  // their values are infinite or NaN.
  static absl::Status VerifyShards(const std::string& directory, const std::string& folder,
                                   const kernels::HeadConfig& config, std::vector<ManifestShard> shards,
                                   const LoadOptions& options, int64_t* not_finite);

  // First reads everything and compares all checksums, then hands all tensors to `sink`, which this thread
  // calls; rows come in any order. If this fails before the sink was called, nothing was changed; DATA_LOSS
  // after it was called means that the files changed in between, or were not verified first.
  absl::Status Load(TensorSink sink, const LoadOptions& options = {}) const;

 private:
  // What a file holds of a tensor.
  struct StoredPart {
    TensorPart part;
    const ManifestShard* shard = nullptr;
    const formats::SafetensorsReader* file = nullptr;
    formats::SafetensorsInfo info;
    std::string checksum;  // as in the manifest
  };
  // Takes a block of rows; an error ends the reading.
  using TakeBlock = absl::FunctionRef<absl::Status(ReadAhead::Block& block)>;

  CheckpointReader() = default;
  absl::Status OpenShard(const std::string& directory, const ManifestShard& shard);
  absl::Status Verify(const LoadOptions& options, std::atomic<int64_t>* not_finite = nullptr) const;
  absl::Status Deliver(TensorSink sink, const LoadOptions& options) const;
  // Reads a part in slices into blocks of `ahead`, hands them to `take` and compares the checksum.
  absl::Status ReadPart(const StoredPart& stored, int64_t slice_bytes, ReadAhead& ahead,
                        TakeBlock take) const;
  absl::Status DataLoss(const ManifestShard& shard, absl::string_view what) const;

  std::string name_;  // "<head>/<name>"
  FolderLock lock_;
  CheckpointSubject subject_;
  absl::Time saved_at_ = absl::UnixEpoch();
  std::string content_digest_;
  std::vector<ManifestShard> shards_;
  std::vector<std::unique_ptr<formats::SafetensorsReader>> files_;  // of the shards
  std::vector<StoredPart> parts_;
};

// How far the training of a head has come. Plain data.
struct Progress {
  uint64_t step = 0;     // the open step: steps closed so far
  uint64_t updates = 0;  // of them, those that updated the weights (bias correction counts these)
  friend bool operator==(const Progress&, const Progress&) = default;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_H_
