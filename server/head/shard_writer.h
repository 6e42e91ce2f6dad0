// SPDX-License-Identifier: Apache-2.0
// Writes one file of a checkpoint, block by block, and what the manifest says of it. Thread-compatible.
#ifndef LOSSD_SERVER_HEAD_SHARD_WRITER_H_
#define LOSSD_SERVER_HEAD_SHARD_WRITER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/head_config.h"
#include "proto/tensorfile/file.h"
#include "server/head/checksum.h"
#include "server/head/disk.h"
#include "server/head/manifest.h"
#include "server/head/read_ahead.h"
#include "server/head/shards.h"

namespace lossd::head {

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

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_SHARD_WRITER_H_
