// SPDX-License-Identifier: Apache-2.0
#include "server/head/shard_writer.h"

#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/tensorfile/direct_file.h"
#include "proto/tensorfile/safetensors.h"
#include "server/head/checkpoint_layout.h"
#include "server/head/head.h"

namespace lossd::head {

absl::StatusOr<std::unique_ptr<ShardWriter>> ShardWriter::Create(Disk* disk, const std::string& folder,
                                                                 const std::string& name,
                                                                 const kernels::HeadConfig& config,
                                                                 const ClassRange& classes) {
  std::unique_ptr<ShardWriter> shard(
      new ShardWriter(config, absl::StrCat(folder, "/", name), {.file = name, .classes = classes}));
  std::vector<formats::SafetensorsSpec> specs;
  for (const TensorPart& part : shard->parts_) {
    specs.push_back(
        {TensorName(part.id), formats::DType::kFloat32, FileShape(config, part.id.param, part.rows)});
  }
  auto writer = formats::CreateSafetensors(
      shard->path_, specs, ShardMetadata(config, classes),
      [&](const std::string& path) { return disk->CreateLargeFile(path); }, formats::kDirectAlignment);
  if (!writer.ok()) return writer.status();
  shard->writer_ = *std::move(writer);
  return shard;
}

absl::Status ShardWriter::Append(const ReadAhead::Block& block) {
  if (is_complete() || block.part.id != parts_[part_].id) {
    return absl::InternalError(
        absl::StrCat(path_, ": rows of ", TensorName(block.part.id), " came too late"));
  }
  checksum_.Update(block.span());
  line_.not_finite += CountNotFinite(block.span());
  if (absl::Status status = writer_->Append(block.span()); !status.ok()) return status;
  const TensorPart& part = parts_[part_];
  bytes_ += static_cast<int64_t>(block.bytes);
  const int64_t all_bytes = Bytes({part.rows, kernels::ShapeOf(config_, part.id.param).cols});
  if (bytes_ < all_bytes) return absl::OkStatus();
  line_.tensors.push_back({TensorName(part.id), all_bytes, checksum_.Digest()});
  checksum_ = Checksum();
  bytes_ = 0;
  ++part_;
  return absl::OkStatus();
}

absl::StatusOr<ManifestShard> ShardWriter::Finish() {
  if (absl::Status status = writer_->Finish(); !status.ok()) return status;
  struct stat status {};
  if (stat(path_.c_str(), &status) != 0) return formats::FileError(path_, "stat", errno);
  line_.file_bytes = status.st_size;
  return std::move(line_);
}

}  // namespace lossd::head
