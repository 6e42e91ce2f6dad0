#include "server/head/read_ahead.h"

#include <utility>

namespace lossd::head {

ReadAhead::ReadAhead(size_t buffer_bytes, int64_t most_buffers)
    : buffer_bytes_(buffer_bytes), most_buffers_(most_buffers) {}

std::optional<ReadAhead::Block> ReadAhead::Take(absl::Time deadline) {
  Block block;
  {
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithDeadline(absl::Condition(this, &ReadAhead::CanTake), deadline) || ended_) {
      return std::nullopt;
    }
    if (free_.empty()) {
      ++buffers_;
    } else {
      block.buffer = std::move(free_.back());
      free_.pop_back();
    }
  }
  // Without initial values: pages come into being as they are filled.
  if (block.buffer == nullptr) block.buffer.reset(new uint8_t[buffer_bytes_]);
  return block;
}

void ReadAhead::Put(Block block) {
  absl::MutexLock lock(&mutex_);
  filled_.push_back(std::move(block));
}

void ReadAhead::Close(absl::Status why) {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  closed_with_ = std::move(why);
  if (!closed_with_.ok()) filled_.clear();
}

bool ReadAhead::WaitUntilEnded(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithDeadline(absl::Condition(this, &ReadAhead::Ended), deadline);
}

absl::Status ReadAhead::result() const {
  absl::MutexLock lock(&mutex_);
  return result_;
}

std::optional<ReadAhead::Block> ReadAhead::Next() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &ReadAhead::CanGo));
  if (filled_.empty()) return std::nullopt;
  Block block = std::move(filled_.front());
  filled_.pop_front();
  return block;
}

void ReadAhead::GiveBack(Block block) {
  absl::MutexLock lock(&mutex_);
  if (!closed_) free_.push_back(std::move(block.buffer));
}

absl::Status ReadAhead::closed_with() const {
  absl::MutexLock lock(&mutex_);
  return closed_with_;
}

void ReadAhead::End(absl::Status result) {
  absl::MutexLock lock(&mutex_);
  ended_ = true;
  result_ = std::move(result);
}

}  // namespace lossd::head
