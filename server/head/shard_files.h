// SPDX-License-Identifier: Apache-2.0
// Some files of a checkpoint on their way from the head's tensors to a folder. One thread reads, ahead of the
// disk, which other threads serve: one for each lane, which writes every lane-th file.
#ifndef LOSSD_SERVER_HEAD_SHARD_FILES_H_
#define LOSSD_SERVER_HEAD_SHARD_FILES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/head_config.h"
#include "server/head/disk.h"
#include "server/head/manifest.h"
#include "server/head/read_ahead.h"
#include "server/head/shards.h"
#include "server/head/slices.h"

namespace lossd::head {

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
