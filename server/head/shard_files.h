// SPDX-License-Identifier: Apache-2.0
// ShardFiles writes files of a checkpoint from a head's tensors: one thread reads from the head, and other
// threads write to the disk. ReadAhead has the buffers between them; loads use it, too. ShardWriter writes
// one file. SliceCursor cuts tensors into slices.
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

// The most bytes of a slice of any tensor of a head with this config.
inline int64_t MostSliceBytes(const kernels::HeadConfig& config, int64_t slice_bytes) {
  int64_t most = 1;
  for (const kernels::TensorId id : CheckpointTensors(config)) {
    const kernels::TensorShape shape = kernels::ShapeOf(config, id.param);
    most = std::max(most, Bytes({SliceRows(shape, slice_bytes), shape.cols}));
  }
  return most;
}

// Iterates over the slices of some parts, in their order. `config` outlives it. Thread-compatible.
class SliceCursor {
 public:
  SliceCursor(const kernels::HeadConfig& config, std::vector<TensorPart> parts, int64_t slice_bytes)
      : config_(&config), parts_(std::move(parts)), slice_bytes_(slice_bytes) {}

  bool done() const { return part_ == parts_.size(); }
  // The next slice. Call only while not done().
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
  size_t part_ = 0;  // index of the part whose slice comes next
  int64_t row_ = 0;  // first row of that slice, counted from the start of the part
};

// ReadAhead passes blocks of bytes from producers to consumers on other threads, through buffers of one size
// that are reused. In a save blocks go from the device to the disk, in a load from the disk to the device.
// The producers may be ahead of the consumers by `most_buffers` buffers.
//
// Blocks are put into lanes. Each lane has one consumer, which gets its blocks in the order of Put. All lanes
// share the buffers.
//
// Thread-safe. Buffers are aligned for direct writes and allocated when they are first needed.
class ReadAhead {
 public:
  // A buffer and how many of its bytes are in use.
  struct Block {
    formats::AlignedBuffer buffer;
    size_t bytes = 0;
    TensorPart part;  // what the bytes are; ReadAhead does not look at it

    absl::Span<uint8_t> span() const { return {buffer.get(), bytes}; }
  };

  // All arguments are at least 1.
  ReadAhead(int64_t buffer_bytes, int64_t most_buffers, size_t lanes = 1);

  // ---- Producers ----
  // An empty block. nullopt if no buffer is free by `deadline`, or if the consumers have failed or ended.
  std::optional<Block> Take(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void Put(Block block, size_t lane = 0) ABSL_LOCKS_EXCLUDED(mutex_);
  // Of the lanes for which `open` is true (at least one), the lane with the fewest waiting blocks.
  size_t ShortestLane(const std::vector<bool>& open) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Says that no more blocks will come. If `why` is an error, waiting blocks are dropped. The first error
  // counts.
  void Close(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the consumers have ended; false at the deadline.
  bool WaitUntilEnded(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // The status with which the consumers failed or ended; OK before that.
  absl::Status result() const ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Consumers ----
  // Blocks. The next block of the lane; nullopt after the last block, or when a consumer has failed.
  std::optional<Block> Next(size_t lane = 0) ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(Block block) ABSL_LOCKS_EXCLUDED(mutex_);
  // The error with which a consumer failed, else the status of Close.
  absl::Status closed_with() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Tells producers and other consumers to stop, if `why` is an error. The first error counts.
  void Fail(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  // The last call, once for all consumers.
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
  int64_t buffers_ ABSL_GUARDED_BY(mutex_) = 0;  // number allocated so far
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status closed_with_ ABSL_GUARDED_BY(mutex_);
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
};

// Writes one file of a checkpoint, block by block, and makes the manifest's entry of the file.
// Thread-compatible.
class ShardWriter {
 public:
  // Creates the file `name` in `folder` for the rows of `classes`. `disk` and `config` outlive the writer.
  static absl::StatusOr<std::unique_ptr<ShardWriter>> Create(Disk* disk, const std::string& folder,
                                                             const std::string& name,
                                                             const kernels::HeadConfig& config,
                                                             const ClassRange& classes);

  // Appends the next rows, in the order of PartsOf.
  absl::Status Append(const ReadAhead::Block& block);
  // Whether all rows were appended.
  bool is_complete() const { return part_ == parts_.size(); }
  // Syncs the file to the disk and returns its entry. Call once, last.
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
  size_t part_ = 0;    // index of the part that is being written
  int64_t bytes_ = 0;  // bytes of that part so far
  Checksum checksum_;
};

// A caller's function that writes the fp32 values of rows [row_begin, row_begin + rows) of a tensor to `out`,
// which has exactly their bytes. If the function returns an error, the operation ends with it.
using TensorSource = absl::FunctionRef<absl::Status(kernels::TensorId id, int64_t row_begin, int64_t rows,
                                                    absl::Span<uint8_t> out)>;

// How far a save has come.
struct SaveProgress {
  int64_t total_bytes = 0;    // of all tensors
  int64_t read_bytes = 0;     // read from the source
  int64_t written_bytes = 0;  // written to files; the rest of read_bytes is in buffers
};

// A file that will be written.
struct PlannedFile {
  std::string name;
  ClassRange classes;
};

struct WritingOptions {
  int64_t slice_bytes = int64_t{8} << 20;   // most bytes for one call of the source; at least one row
  int64_t buffer_bytes = int64_t{1} << 30;  // for values read and not yet written; at least two slices
  int threads = 4;                          // threads that write at once
  Disk* disk = Disk::Real();
  // Both functions are called on the thread that reads, now and then, a few times a second while the disk is
  // slow. `cancelled` returns true to end reading and writing with CANCELLED.
  std::function<void(const SaveProgress&)> on_progress = [](const SaveProgress&) {};
  std::function<bool()> cancelled = [] { return false; };
};

// ShardFiles writes some files of a checkpoint from the head's tensors to a folder. One thread reads ahead of
// the disk. Other threads write, one for each lane: with n lanes, lane i writes files i, i + n, i + 2n, ...
class ShardFiles {
 public:
  // `config` outlives it. `files` has at least one file.
  ShardFiles(const kernels::HeadConfig& config, std::vector<PlannedFile> files, WritingOptions options);

  // ---- The thread that reads ----
  // Reads all rows of the files from `source`, in any order.
  absl::Status Read(TensorSource source);
  // Says that no more will be read. If `why` is an error, what was read is dropped.
  void Close(const absl::Status& why) { ahead_.Close(why); }
  // Waits for End and returns its result.
  absl::Status AwaitEnd();

  // ---- The thread that writes, with others of its own ----
  // Writes the files in `folder`, syncs them, and returns the manifest's entries in the order of the files.
  absl::StatusOr<std::vector<ManifestShard>> Write(const std::string& folder);
  // The last call, also if Write was not called: all work on the disk is over.
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
  std::vector<ManifestShard> lines_;  // entry of each file, set by the thread that wrote it
  ReadAhead ahead_;
  SaveProgress progress_;
  absl::Time next_report_ = absl::InfinitePast();
  std::atomic<int64_t> written_bytes_{0};
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_SHARD_FILES_H_
