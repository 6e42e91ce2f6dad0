// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "kernels/errors/bytes.h"
#include "kernels/errors/field_error.h"
#include "server/head/checkpoint.h"
#include "server/head/checkpoint_layout.h"
#include "server/head/checkpoint_removal.h"
#include "server/head/checksum.h"
#include "server/head/head.h"
#include "server/head/parallel.h"
#include "server/head/paths.h"
#include "server/head/slices.h"

namespace lossd::head {
namespace {

// `status`, an error, as one of the checkpoint that a request names.
absl::Status OfCheckpoint(absl::Status status, absl::string_view checkpoint) {
  return errors::WithViolation(
      std::move(status), {"checkpoint", "must name a checkpoint of this server", std::string(checkpoint)});
}

// As many as there may be, and as the buffer has slices for; one slice is the device's.
int Threads(const LoadOptions& options, int64_t slice_bytes) {
  const int64_t room = options.buffer_bytes / slice_bytes - 1;
  return static_cast<int>(std::clamp<int64_t>(room, 1, std::max(options.threads, 1)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(const std::string& directory,
                                                                         absl::string_view checkpoint) {
  const std::pair<absl::string_view, absl::string_view> names =
      absl::StrSplit(checkpoint, absl::MaxSplits('/', 1));
  absl::Status named = ValidateName("checkpoint's head", names.first);
  named.Update(ValidateName("checkpoint's name", names.second));
  if (!named.ok()) return OfCheckpoint(std::move(named), checkpoint);
  const absl::StatusOr<std::string> folder = ResolveBelow(directory, checkpoint);
  if (!folder.ok()) return OfCheckpoint(folder.status(), checkpoint);
  std::unique_ptr<CheckpointReader> reader(new CheckpointReader());
  reader->name_ = std::string(checkpoint);
  absl::StatusOr<ReadLocks> locks = LockForReading(*folder);
  if (absl::IsNotFound(locks.status())) {
    return OfCheckpoint(absl::NotFoundError(absl::StrCat(checkpoint, ": was removed just now")), checkpoint);
  }
  if (!locks.ok()) return locks.status();
  reader->lock_ = std::move(locks->files);
  absl::StatusOr<Manifest> manifest = ReadManifest(directory, checkpoint);
  if (!manifest.ok()) return manifest.status();
  reader->content_digest_ = ContentDigest(*manifest);
  reader->subject_ = std::move(manifest->subject);
  reader->saved_at_ = manifest->saved_at;
  reader->shards_ = std::move(manifest->shards);
  for (const ManifestShard& shard : reader->shards_) {
    if (absl::Status opened = reader->OpenShard(directory, shard); !opened.ok()) return opened;
  }
  return reader;
}

absl::Status CheckpointReader::DataLoss(const ManifestShard& shard, absl::string_view what) const {
  return absl::DataLossError(
      absl::StrCat("checkpoint ", name_, ": ", shard.file, " (", shard.classes.Text(), "): ", what));
}

absl::Status CheckpointReader::OpenShard(const std::string& directory, const ManifestShard& shard) {
  auto opened = OpenBelow(directory, absl::StrCat(name_, "/", shard.file));
  if (absl::IsNotFound(opened.status())) return DataLoss(shard, "the tensor file is missing");
  if (!opened.ok()) return OfCheckpoint(opened.status(), name_);
  const int64_t file_bytes = (*opened)->size();
  if (file_bytes != shard.file_bytes) {
    return DataLoss(shard, absl::StrCat("the tensor file has ", errors::ExactBytes(file_bytes), ", not ",
                                        errors::ExactBytes(shard.file_bytes)));
  }
  auto file = formats::SafetensorsReader::Open(*std::move(opened));
  if (absl::IsInvalidArgument(file.status())) return DataLoss(shard, file.status().message());
  if (!file.ok()) return file.status();
  const formats::SafetensorsReader& tensors = *files_.emplace_back(*std::move(file));
  const auto metadata = ShardMetadata(subject_.config, shard.classes);
  if (!metadata.empty() && tensors.metadata() != metadata) {
    return DataLoss(shard, "the tensor file says that it holds other classes");
  }
  const std::vector<TensorPart> parts = PartsOf(subject_.config, shard.classes);
  if (parts.size() != shard.tensors.size() || parts.size() != tensors.tensors().size()) {
    return DataLoss(shard,
                    absl::StrCat(tensors.tensors().size(), " tensors in the file, ", shard.tensors.size(),
                                 " in the manifest, and ", parts.size(), " in such a file"));
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto info = tensors.Find(TensorName(parts[i].id));
    if (!info.ok()) return DataLoss(shard, info.status().message());
    const ManifestTensor& line = shard.tensors[i];
    if ((*info)->dtype != formats::DType::kFloat32 ||
        (*info)->shape != FileShape(subject_.config, parts[i].id.param, parts[i].rows) ||
        line.name != (*info)->name || line.bytes != (*info)->bytes) {
      return DataLoss(shard,
                      absl::StrCat("tensor ", TensorName(parts[i].id), " is not what the manifest says"));
    }
    parts_.push_back({parts[i], &shard, &tensors, **info, line.checksum});
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::VerifyShards(const std::string& directory, const std::string& folder,
                                            const kernels::HeadConfig& config,
                                            std::vector<ManifestShard> shards, const LoadOptions& options,
                                            int64_t* not_finite) {
  CheckpointReader reader;
  reader.name_ = folder;
  reader.subject_.config = config;
  reader.shards_ = std::move(shards);
  for (const ManifestShard& shard : reader.shards_) {
    std::error_code error;
    const auto there =
        std::filesystem::symlink_status(absl::StrCat(directory, "/", folder, "/", shard.file), error);
    if (std::filesystem::is_symlink(there)) return reader.DataLoss(shard, "the tensor file is a link");
    if (absl::Status opened = reader.OpenShard(directory, shard); !opened.ok()) return opened;
  }
  std::atomic<int64_t> count{0};
  const absl::Status status = reader.Verify(options, &count);
  *not_finite += count;
  return status;
}

absl::Status CheckpointReader::Load(TensorSink sink, const LoadOptions& options) const {
  if (options.verify_first) {
    if (absl::Status status = Verify(options); !status.ok()) return status;
  }
  return Deliver(sink, options);
}

absl::Status CheckpointReader::Verify(const LoadOptions& options, std::atomic<int64_t>* not_finite) const {
  const int64_t slice_bytes = MostSliceBytes(subject_.config, options.slice_bytes);
  const int threads = Threads(options, slice_bytes);
  ReadAhead buffers(slice_bytes, threads);
  return RunInThreads(threads, parts_.size(), [&](size_t part) {
    return ReadPart(parts_[part], options.slice_bytes, buffers, [&](ReadAhead::Block& block) {
      if (not_finite != nullptr) *not_finite += CountNotFinite(block.span());
      buffers.GiveBack(std::move(block));
      return absl::OkStatus();
    });
  });
}

absl::Status CheckpointReader::Deliver(TensorSink sink, const LoadOptions& options) const {
  const int64_t slice_bytes = MostSliceBytes(subject_.config, options.slice_bytes);
  const int threads = Threads(options, slice_bytes);
  std::vector<const StoredPart*> parts;
  for (const StoredPart& part : parts_) {
    if (options.wanted == nullptr || options.wanted(part.part)) parts.push_back(&part);
  }
  ReadAhead ahead(slice_bytes, threads + 1);
  std::thread reading([&] {
    ahead.Close(RunInThreads(threads, parts.size(), [&](size_t part) {
      return ReadPart(*parts[part], options.slice_bytes, ahead, [&](ReadAhead::Block& block) {
        ahead.Put(std::move(block));
        return absl::OkStatus();
      });
    }));
  });
  while (std::optional<ReadAhead::Block> block = ahead.Next()) {
    const TensorPart& part = block->part;
    ahead.Fail(sink(part.id, part.row_begin, part.rows, block->span()));  // if it is an error
    ahead.GiveBack(*std::move(block));
  }
  reading.join();
  return ahead.closed_with();
}

absl::Status CheckpointReader::ReadPart(const StoredPart& stored, int64_t slice_bytes, ReadAhead& ahead,
                                        TakeBlock take) const {
  Checksum checksum;
  const int64_t cols = kernels::ShapeOf(subject_.config, stored.part.id.param).cols;
  for (SliceCursor slices(subject_.config, {stored.part}, slice_bytes); !slices.done();) {
    std::optional<ReadAhead::Block> block = ahead.Take(absl::InfiniteFuture());
    if (!block.has_value()) return ahead.result();
    block->part = slices.Next();
    block->bytes = static_cast<size_t>(Bytes({block->part.rows, cols}));
    const int64_t row = block->part.row_begin - stored.part.row_begin;
    absl::Status status = stored.file->ReadRows(stored.info, row, block->part.rows, block->span());
    if (!status.ok()) return status;
    checksum.Update(block->span());
    if (status = take(*block); !status.ok()) return status;
  }
  if (checksum.Digest() == stored.checksum) return absl::OkStatus();
  return DataLoss(*stored.shard,
                  absl::StrCat("the checksum of tensor ", stored.info.name, " does not match"));
}

}  // namespace lossd::head
