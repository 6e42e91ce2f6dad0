// SPDX-License-Identifier: Apache-2.0
// SaveCheckpoint saves a head as a checkpoint, and CheckpointReader reads it back. A checkpoint is a folder
// <directory>/<head>/<checkpoint name>/ with the head's tensors and a manifest of checksums.
// docs/checkpoint-format.md describes the files. checkpoint_store.h lists, removes and numbers checkpoints.
//
// A checkpoint is either complete or absent: it is written under a temporary name, synced to the disk and
// then renamed. Nothing is ever overwritten.
//
// Callbacks bring and take the tensors in slices, so that a caller can handle each slice on the device's
// thread while the disk works on other slices. All functions are thread-safe; a CheckpointReader is
// thread-compatible.
//
// Errors: INVALID_ARGUMENT (a bad name), ALREADY_EXISTS, NOT_FOUND, DATA_LOSS (a checkpoint does not hold
// what was saved; the message names the tensor or file), RESOURCE_EXHAUSTED (disk full), CANCELLED, otherwise
// INTERNAL. The messages have the text of the operating system's error.
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

// A caller's function that takes the fp32 values of rows [row_begin, row_begin + rows) of a tensor. The span
// has exactly their bytes. If the function returns an error, the operation ends with it.
using TensorSink = absl::FunctionRef<absl::Status(kernels::TensorId id, int64_t row_begin, int64_t rows,
                                                  absl::Span<const uint8_t> in)>;

struct SaveOptions {
  int64_t slice_bytes = int64_t{8} << 20;  // the most that a callback handles at once; at least one row
  // Memory for values that were read and are not written yet, shared by all threads and allocated when it is
  // needed. The source is never further ahead of the disk than this. At least two slices are taken, and at
  // most the size of the checkpoint. Each thread that writes may take formats::kDirectBufferBytes more.
  int64_t buffer_bytes = int64_t{1} << 30;
  ShardRules shards;  // how the checkpoint is divided into files, and how many are written at once
  // The most bytes that all files below the directory may take, including the new checkpoint; 0: no limit.
  int64_t limit_bytes = 0;
  Disk* disk = Disk::Real();
  // The three functions below are called on the thread that saves. `on_read`: called once, when the source
  // will not be called anymore. `on_progress`: called now and then, a few times a second while the disk is
  // slow. `cancelled`: returns true to end the save with CANCELLED.
  std::function<void()> on_read = [] {};
  std::function<void(const SaveProgress&)> on_progress = [](const SaveProgress&) {};
  std::function<bool()> cancelled = [] { return false; };
};

// Checks whether a checkpoint of a head with config `saved` can be loaded into a head with config `head`.
// FAILED_PRECONDITION names the first difference. The compute dtypes may differ.
absl::Status CheckLoadable(const kernels::HeadConfig& saved, const kernels::HeadConfig& head);

// The name that the server gives to a checkpoint: "step-" and the step with ten digits.
std::string AutomaticName(uint64_t step);

// The result of a save.
struct SavedCheckpoint {
  std::string name;  // without the head's name
  int64_t bytes = 0;
  int64_t not_finite = 0;                   // values that are infinite or NaN
  absl::Time saved_at = absl::UnixEpoch();  // to the second
};

// Saves to <directory>/<subject.head>/<name>. The directory must exist. After an error nothing is left but an
// empty <head> folder; only if the very last fsync fails, the checkpoint stays. Removes leftovers of earlier
// saves of the head. RESOURCE_EXHAUSTED, before anything is written, if the checkpoint would exceed
// limit_bytes.
//
// If `name` is empty, the server chooses the name, and the manifest says so. The name is AutomaticName. If
// another checkpoint has that name, because the head went back to an earlier step and was trained to this
// step again, a hyphen and a digest of the content are appended. ALREADY_EXISTS if a checkpoint with one of
// these names has the same content.
//
// This thread calls `source`, and other threads write to the disk. Reading runs ahead of the disk and waits
// for it only when the buffer is full. Rows are asked for in any order.
//
// `sites`: other processes that have some of the classes. If the checkpoint has several files, each process
// that proves to see the folder writes its own classes, and `source` is not asked for them.
absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const std::string& directory, absl::string_view name,
                                               const CheckpointSubject& subject, TensorSource source,
                                               const SaveOptions& options = {},
                                               std::vector<std::unique_ptr<SaveSite>> sites = {});

struct LoadOptions {
  // The most that the sink gets at once; at least one row. It is small, so that a slice is still in the
  // processor's cache when it goes to the device after it was hashed.
  int64_t slice_bytes = int64_t{2} << 20;
  int64_t buffer_bytes = int64_t{1} << 30;  // memory for what was read from the disk; at least two slices
  // Threads that read, at least 1; no more than the buffer has room for.
  int threads = 4;
  // Read everything and compare all checksums before the sink gets anything. If false, the caller must
  // discard what the sink got when Load fails.
  bool verify_first = true;
  // Says whether the sink wants any of these rows, the part of a tensor that one file has. If it wants some
  // of them, it gets all of the part. Null: the sink wants everything.
  std::function<bool(const TensorPart&)> wanted = nullptr;
};

// An open checkpoint. While it is open, the checkpoint is not pruned, and its files stay even if a removal
// takes its name away.
class CheckpointReader {
 public:
  // Opens `checkpoint` ("<head>/<name>"). Checks its manifest, and that the files have all rows of every
  // tensor with the right type and size.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(const std::string& directory,
                                                                absl::string_view checkpoint);

  const std::string& name() const { return name_; }  // "<head>/<name>"
  const CheckpointSubject& subject() const { return subject_; }
  absl::Time saved_at() const { return saved_at_; }                      // the Unix epoch if not known
  const std::string& content_digest() const { return content_digest_; }  // ContentDigest

  // Verifies files that are not a checkpoint yet: that `folder` below the directory has, bit for bit, what
  // `shards` say, for a head with this config. DATA_LOSS names the file that differs. Adds to `not_finite`
  // how many of the values are infinite or NaN.
  static absl::Status VerifyShards(const std::string& directory, const std::string& folder,
                                   const kernels::HeadConfig& config, std::vector<ManifestShard> shards,
                                   const LoadOptions& options, int64_t* not_finite);

  // Reads everything and compares all checksums (if verify_first), then reads again and hands all tensors to
  // `sink`. This thread calls the sink; rows come in any order. If Load fails before it called the sink,
  // nothing has changed. DATA_LOSS afterwards means that the files changed in between, or were not verified
  // first.
  absl::Status Load(TensorSink sink, const LoadOptions& options = {}) const;

 private:
  // The part of a tensor that a file holds.
  struct StoredPart {
    TensorPart part;
    const ManifestShard* shard = nullptr;
    const formats::SafetensorsReader* file = nullptr;
    formats::SafetensorsInfo info;
    std::string checksum;  // as in the manifest
  };
  // Takes a block of rows. An error ends the reading.
  using TakeBlock = absl::FunctionRef<absl::Status(ReadAhead::Block& block)>;

  CheckpointReader() = default;
  absl::Status OpenShard(const std::string& directory, const ManifestShard& shard);
  absl::Status Verify(const LoadOptions& options, std::atomic<int64_t>* not_finite = nullptr) const;
  absl::Status Deliver(TensorSink sink, const LoadOptions& options) const;
  // Reads a part in slices into blocks of `ahead`, hands the blocks to `take`, and compares the checksum at
  // the end.
  absl::Status ReadPart(const StoredPart& stored, int64_t slice_bytes, ReadAhead& ahead,
                        TakeBlock take) const;
  absl::Status DataLoss(const ManifestShard& shard, absl::string_view what) const;

  std::string name_;  // "<head>/<name>"
  FolderLock lock_;
  CheckpointSubject subject_;
  absl::Time saved_at_ = absl::UnixEpoch();
  std::string content_digest_;
  std::vector<ManifestShard> shards_;
  std::vector<std::unique_ptr<formats::SafetensorsReader>> files_;  // in the order of shards_
  std::vector<StoredPart> parts_;
};

// How far the training of a head has come. Plain data.
struct Progress {
  uint64_t step = 0;     // the open step: steps closed so far
  uint64_t updates = 0;  // steps that updated the weights; bias correction counts them
  friend bool operator==(const Progress&, const Progress&) = default;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_H_
