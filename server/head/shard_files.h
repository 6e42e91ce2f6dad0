// SPDX-License-Identifier: Apache-2.0
// How the files of a checkpoint are written, on the way from the head's tensors to a folder. ShardFiles
// writes a set of files: one thread reads from the head, ahead of other threads that serve the disk.
// ReadAhead has the buffers between them, also those of a load; ShardWriter writes one file; SliceCursor cuts
// tensors into slices.
#ifndef LOSSD_SERVER_HEAD_SHARD_FILES_H_
#define LOSSD_SERVER_HEAD_SHARD_FILES_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/head_config.h"
#include "proto/tensorfile/file.h"
#include "server/head/disk.h"
#include "server/head/manifest.h"

namespace lossd::head {

// The most bytes that a slice of any tensor of such a head has.
inline int64_t MostSliceBytes(const kernels::HeadConfig& config, int64_t slice_bytes) {
  int64_t most = 1;
  for (const kernels::TensorId id : CheckpointTensors(config)) {
    const kernels::TensorShape shape = kernels::ShapeOf(config, id.param);
    most = std::max(most, Bytes({SliceRows(shape, slice_bytes), shape.cols}));
  }
  return most;
}

// Goes through the slices of some parts, in their order. `config` outlives it. Thread-compatible.
class SliceCursor {
 public:
  SliceCursor(const kernels::HeadConfig& config, std::vector<TensorPart> parts, int64_t slice_bytes)
      : config_(&config), parts_(std::move(parts)), slice_bytes_(slice_bytes) {}

  bool done() const { return part_ == parts_.size(); }
  // Only while there is one.
  TensorPart Next() {
    const TensorPart& part = parts_[part_];
    const int64_t most = SliceRows(kernels::ShapeOf(*config_, part.id.param), slice_bytes_);
    const TensorPart slice = {part.id, part.row_begin + row_, std::min(most, part.rows - row_)};
    row_ += slice.rows;
    if (row_ == part.rows) {
      row_ = 0;
      ++part_;
    }
    return slice;
  }

 private:
  const kernels::HeadConfig* config_;
  std::vector<TensorPart> parts_;
  int64_t slice_bytes_;
  size_t part_ = 0;  // whose slice comes next,
  int64_t row_ = 0;  // and its first row, counted from the part's
};

// Bytes on their way from producers to consumers on other threads, through buffers of one size that are used
// again: from the device to the disk in a save, the other way round in a load. The producers may be ahead of
// the consumers by as many buffers as there may be.
//
// Blocks go in lanes. Each lane has one consumer, which gets its blocks in the order of Put; all lanes share
// the buffers.
//
// Thread-safe. Buffers are aligned for direct writes and allocated when they are first needed.
class ReadAhead {
 public:
  // A buffer, and of it the part that is in use.
  struct Block {
    formats::AlignedBuffer buffer;
    size_t bytes = 0;
    TensorPart part;  // what the bytes are; the producers' and the consumers' affair

    absl::Span<uint8_t> span() const { return {buffer.get(), bytes}; }
  };

  // All are at least 1.
  ReadAhead(int64_t buffer_bytes, int64_t most_buffers, size_t lanes = 1);

  // ---- Producers ----
  // A block without content; nullopt if none is free by `deadline` or a consumer has failed.
  std::optional<Block> Take(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void Put(Block block, size_t lane = 0) ABSL_LOCKS_EXCLUDED(mutex_);
  // The lane with the fewest waiting blocks, of those for which `open` is true, which is at least one.
  size_t ShortestLane(const std::vector<bool>& open) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Nothing more will come; not OK: and what is there is to be dropped. The first call counts, but an error
  // counts more than OK.
  void Close(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  // True once the consumers have ended, at the latest by `deadline`.
  bool WaitUntilEnded(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // What the consumers failed or ended with; OK while they have not.
  absl::Status result() const ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Consumers ----
  // The next block of the lane; nullopt after the last one, or when a consumer has failed. Blocks.
  std::optional<Block> Next(size_t lane = 0) ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(Block block) ABSL_LOCKS_EXCLUDED(mutex_);
  // What the producers closed with, or a consumer failed with.
  absl::Status closed_with() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Producers and the other consumers have no reason to go on. The first error counts.
  void Fail(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Last, once for all consumers.
  void End(absl::Status result) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Lane = std::deque<Block>;

  bool Over() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_ || !result_.ok(); }
  bool CanTake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return Over() || !free_.empty() || buffers_ < most_buffers_;
  }
  bool Ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_; }

  const int64_t buffer_bytes_;
  const int64_t most_buffers_;

  mutable absl::Mutex mutex_;
  std::vector<formats::AlignedBuffer> free_ ABSL_GUARDED_BY(mutex_);
  std::vector<Lane> lanes_ ABSL_GUARDED_BY(mutex_);
  int64_t buffers_ ABSL_GUARDED_BY(mutex_) = 0;  // allocated so far
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status closed_with_ ABSL_GUARDED_BY(mutex_);
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
};

// Writes one file of a checkpoint, block by block, and says what the manifest has to say of it.
// Thread-compatible.
class ShardWriter {
 public:
  // Makes the file `name` in `folder` for the rows of `classes`. `disk` and `config` outlive this.
  static absl::StatusOr<std::unique_ptr<ShardWriter>> Create(Disk* disk, const std::string& folder,
                                                             const std::string& name,
                                                             const kernels::HeadConfig& config,
                                                             const ClassRange& classes);

  // The next rows, in the order of PartsOf.
  absl::Status Append(const ReadAhead::Block& block);
  // Whether all rows were appended.
  bool is_complete() const { return part_ == parts_.size(); }
  // Brings the file to the disk. To be called once, last.
  absl::StatusOr<ManifestShard> Finish();

 private:
  ShardWriter(const kernels::HeadConfig& config, std::string path, ManifestShard line)
      : config_(config),
        path_(std::move(path)),
        line_(std::move(line)),
        parts_(PartsOf(config, line_.classes)) {}

  const kernels::HeadConfig& config_;
  const std::string path_;
  ManifestShard line_;
  const std::vector<TensorPart> parts_;
  std::unique_ptr<formats::DataWriter> writer_;
  size_t part_ = 0;    // that is being written
  int64_t bytes_ = 0;  // of it, so far
  Checksum checksum_;
};

// Yields the fp32 values of rows [row_begin, row_begin + rows) of a tensor. The span has exactly their bytes.
// An error ends the operation and is returned.
using TensorSource = absl::FunctionRef<absl::Status(kernels::TensorId id, int64_t row_begin, int64_t rows,
                                                    absl::Span<uint8_t> out)>;

struct SaveProgress {
  int64_t total_bytes = 0;    // of all tensors
  int64_t read_bytes = 0;     // from the source
  int64_t written_bytes = 0;  // to the files; the rest of read_bytes is in the read-ahead buffers
};

// A file that is to be.
struct PlannedFile {
  std::string name;
  ClassRange classes;
};

struct WritingOptions {
  int64_t slice_bytes = int64_t{8} << 20;   // the most that the source yields at once; at least one row
  int64_t buffer_bytes = int64_t{1} << 30;  // for what was read and is not written yet; at least two slices
  int threads = 4;                          // that write at once
  Disk* disk = Disk::Real();
  // On the thread that reads: now and then, a few times a second while the disk is slow; true ends it all
  // with CANCELLED.
  std::function<void(const SaveProgress&)> on_progress = [](const SaveProgress&) {};
  std::function<bool()> cancelled = [] { return false; };
};

// Some files of a checkpoint on their way from the head's tensors to a folder. One thread reads, ahead of the
// disk, which other threads serve: one for each lane, which writes every lane-th file.
class ShardFiles {
 public:
  // `config` outlives it. There is at least one file.
  ShardFiles(const kernels::HeadConfig& config, std::vector<PlannedFile> files, WritingOptions options);

  // ---- The thread that reads ----
  // Everything that the files hold; rows come in any order.
  absl::Status Read(TensorSource source);
  // Nothing more will be read; not OK: and what has been read is not wanted.
  void Close(const absl::Status& why) { ahead_.Close(why); }
  // Waits for End, and returns what it said.
  absl::Status AwaitEnd();

  // ---- The thread that writes, with others of its own ----
  // Brings the files in `folder` to the disk, and returns what the manifest says of them, in their order.
  absl::StatusOr<std::vector<ManifestShard>> Write(const std::string& folder);
  // Last, also without Write: all that concerns the disk is over.
  void End(const absl::Status& result) { ahead_.End(result); }

 private:
  SliceCursor CursorOf(size_t lane) const;
  absl::StatusOr<ReadAhead::Block> AwaitBlock();
  void ReportIfDue();
  absl::Status WriteLane(const std::string& folder, size_t lane);
  absl::StatusOr<ManifestShard> WriteFile(const std::string& folder, size_t lane, const PlannedFile& file);

  const kernels::HeadConfig& config_;
  const std::vector<PlannedFile> files_;
  const WritingOptions options_;
  const size_t lanes_;
  std::vector<ManifestShard> lines_;  // of each file, from the thread that wrote it
  ReadAhead ahead_;
  SaveProgress progress_;
  absl::Time next_report_ = absl::InfinitePast();
  std::atomic<int64_t> written_bytes_{0};
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_SHARD_FILES_H_
