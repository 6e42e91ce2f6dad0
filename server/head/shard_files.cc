// SPDX-License-Identifier: Apache-2.0
// ReadAhead, ShardWriter and ShardFiles: writing the files of a checkpoint (shard_files.h).
#include "server/head/shard_files.h"

#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "proto/tensorfile/safetensors.h"
#include "server/head/disk.h"
#include "server/head/head.h"

namespace lossd::head {

// ---- ReadAhead ----

ReadAhead::ReadAhead(int64_t buffer_bytes, int64_t most_buffers, size_t lanes)
    : buffer_bytes_(buffer_bytes), most_buffers_(most_buffers), lanes_(lanes) {}

std::optional<ReadAhead::Block> ReadAhead::Take(absl::Time deadline) {
  Block block;
  {
    absl::MutexLock lock(&mutex_);
    if (!clocks::AwaitUntil(mutex_, absl::Condition(this, &ReadAhead::CanTake), deadline) || Over()) {
      return std::nullopt;
    }
    if (free_.empty()) {
      ++buffers_;
    } else {
      block.buffer = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (block.buffer == nullptr) block.buffer = formats::AllocateAligned(buffer_bytes_);
  return block;
}

void ReadAhead::Put(Block block, size_t lane) {
  absl::MutexLock lock(&mutex_);
  lanes_[lane].push_back(std::move(block));
}

size_t ReadAhead::ShortestLane(const std::vector<bool>& open) const {
  absl::MutexLock lock(&mutex_);
  size_t shortest = lanes_.size();
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (!open[lane]) continue;
    if (shortest == lanes_.size() || lanes_[lane].size() < lanes_[shortest].size()) shortest = lane;
  }
  return shortest;
}

void ReadAhead::Close(absl::Status why) {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  closed_with_.Update(std::move(why));
  if (closed_with_.ok()) return;
  for (Lane& lane : lanes_) lane.clear();
}

bool ReadAhead::WaitUntilEnded(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  return clocks::AwaitUntil(mutex_, absl::Condition(this, &ReadAhead::Ended), deadline);
}

absl::Status ReadAhead::result() const {
  absl::MutexLock lock(&mutex_);
  return result_;
}

std::optional<ReadAhead::Block> ReadAhead::Next(size_t lane) {
  absl::MutexLock lock(&mutex_);
  const auto can_go = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return closed_ || !result_.ok() || !lanes_[lane].empty();
  };
  mutex_.Await(absl::Condition(&can_go));
  if (lanes_[lane].empty() || !result_.ok()) return std::nullopt;
  Block block = std::move(lanes_[lane].front());
  lanes_[lane].pop_front();
  return block;
}

void ReadAhead::GiveBack(Block block) {
  absl::MutexLock lock(&mutex_);
  if (!closed_) free_.push_back(std::move(block.buffer));
}

absl::Status ReadAhead::closed_with() const {
  absl::MutexLock lock(&mutex_);
  return result_.ok() ? closed_with_ : result_;
}

void ReadAhead::Fail(absl::Status why) {
  absl::MutexLock lock(&mutex_);
  result_.Update(std::move(why));
}

void ReadAhead::End(absl::Status result) {
  absl::MutexLock lock(&mutex_);
  ended_ = true;
  result_.Update(std::move(result));
}

// ---- ShardWriter ----

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
  LOSSD_RETURN_IF_ERROR(writer_->Append(block.span()));
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
  LOSSD_RETURN_IF_ERROR(writer_->Finish());
  struct stat status {};
  if (stat(path_.c_str(), &status) != 0) return formats::FileError(path_, "stat", errno);
  line_.file_bytes = status.st_size;
  return std::move(line_);
}

// ---- ShardFiles ----

namespace {

constexpr absl::Duration kProgressInterval = absl::Milliseconds(200);

int64_t BufferCount(const kernels::HeadConfig& config, const WritingOptions& options) {
  return std::max<int64_t>(2, options.buffer_bytes / MostSliceBytes(config, options.slice_bytes));
}

int64_t BytesOf(const kernels::HeadConfig& config, const std::vector<PlannedFile>& files) {
  int64_t bytes = 0;
  for (const PlannedFile& file : files) {
    for (const TensorPart& part : PartsOf(config, file.classes)) {
      bytes += Bytes({part.rows, kernels::ShapeOf(config, part.id.param).cols});
    }
  }
  return bytes;
}

}  // namespace

ShardFiles::ShardFiles(const kernels::HeadConfig& config, std::vector<PlannedFile> files,
                       WritingOptions options)
    : config_(config),
      files_(std::move(files)),
      options_(std::move(options)),
      lanes_(std::min(files_.size(), static_cast<size_t>(std::max(options_.threads, 1)))),
      lines_(files_.size()),
      ahead_(MostSliceBytes(config, options_.slice_bytes), BufferCount(config, options_), lanes_) {
  progress_.total_bytes = BytesOf(config, files_);
}

// ---- ShardFiles: the thread that reads ----

// Each block goes to the lane with the fewest waiting blocks, so lanes that write faster get more.
absl::Status ShardFiles::Read(TensorSource source) {
  std::vector<SliceCursor> cursors;
  for (size_t lane = 0; lane < lanes_; ++lane) cursors.push_back(CursorOf(lane));
  std::vector<bool> open(lanes_, true);
  for (size_t left = lanes_; left > 0;) {
    LOSSD_TRY(ReadAhead::Block block, AwaitBlock());
    const size_t lane = ahead_.ShortestLane(open);
    block.part = cursors[lane].Next();
    block.bytes =
        static_cast<size_t>(Bytes({block.part.rows, kernels::ShapeOf(config_, block.part.id.param).cols}));
    LOSSD_RETURN_IF_ERROR(source(block.part.id, block.part.row_begin, block.part.rows, block.span()));
    progress_.read_bytes += static_cast<int64_t>(block.bytes);
    ahead_.Put(std::move(block), lane);
    ReportIfDue();
    if (!cursors[lane].done()) continue;
    open[lane] = false;
    --left;
  }
  return absl::OkStatus();
}

// The slices of all files of a lane.
SliceCursor ShardFiles::CursorOf(size_t lane) const {
  std::vector<TensorPart> parts;
  for (size_t file = lane; file < files_.size(); file += lanes_) {
    for (const TensorPart& part : PartsOf(config_, files_[file].classes)) parts.push_back(part);
  }
  return {config_, std::move(parts), options_.slice_bytes};
}

absl::StatusOr<ReadAhead::Block> ShardFiles::AwaitBlock() {
  while (!options_.cancelled()) {
    std::optional<ReadAhead::Block> block = ahead_.Take(clocks::SteadyNow() + kProgressInterval);
    if (block.has_value()) return *std::move(block);
    LOSSD_RETURN_IF_ERROR(ahead_.result());
    ReportIfDue();
  }
  return absl::CancelledError("the save was cancelled");
}

absl::Status ShardFiles::AwaitEnd() {
  while (!ahead_.WaitUntilEnded(clocks::SteadyNow() + kProgressInterval)) {
    if (options_.cancelled()) ahead_.Close(absl::CancelledError("the save was cancelled"));
    ReportIfDue();
  }
  return ahead_.result();
}

void ShardFiles::ReportIfDue() {
  if (clocks::SteadyNow() < next_report_) return;
  next_report_ = clocks::SteadyNow() + kProgressInterval;
  progress_.written_bytes = written_bytes_;
  options_.on_progress(progress_);
}

// ---- ShardFiles: the disk's threads ----

absl::StatusOr<std::vector<ManifestShard>> ShardFiles::Write(const std::string& folder) {
  absl::Status status = RunInThreads(static_cast<int>(lanes_), lanes_, [&](size_t lane) {
    absl::Status written = WriteLane(folder, lane);
    ahead_.Fail(written);  // does nothing if the status is OK
    return written;
  });
  if (!ahead_.result().ok()) status = ahead_.result();  // the first error
  if (!status.ok()) return status;
  return std::move(lines_);
}

// Writes the files of a lane one after the other.
absl::Status ShardFiles::WriteLane(const std::string& folder, size_t lane) {
  for (size_t file = lane; file < files_.size(); file += lanes_) {
    LOSSD_TRY(lines_[file], WriteFile(folder, lane, files_[file]));
  }
  return absl::OkStatus();
}

// Writes one file from the blocks of its lane.
absl::StatusOr<ManifestShard> ShardFiles::WriteFile(const std::string& folder, size_t lane,
                                                    const PlannedFile& file) {
  LOSSD_TRY(auto writer, ShardWriter::Create(options_.disk, folder, file.name, config_, file.classes));
  while (!writer->is_complete()) {
    std::optional<ReadAhead::Block> block = ahead_.Next(lane);
    if (!block.has_value()) {
      LOSSD_RETURN_IF_ERROR(ahead_.closed_with());
      break;  // Finish returns the error that says what is missing
    }
    LOSSD_RETURN_IF_ERROR(writer->Append(*block));
    written_bytes_ += static_cast<int64_t>(block->bytes);
    ahead_.GiveBack(*std::move(block));
  }
  return writer->Finish();
}

}  // namespace lossd::head
