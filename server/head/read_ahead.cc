// SPDX-License-Identifier: Apache-2.0
#include "server/head/read_ahead.h"

#include <utility>

#include "kernels/clocks/waits.h"

namespace lossd::head {

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

}  // namespace lossd::head
