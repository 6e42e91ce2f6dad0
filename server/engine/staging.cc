// SPDX-License-Identifier: Apache-2.0
// FairShare, RangeAllocator, RowMemory and StagingPool (staging.h).
#include "server/engine/staging.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "kernels/errors/field_error.h"

namespace lossd::engine {

// ---- FairShare ----

FairShare::Answer FairShare::Check(absl::string_view holder, int64_t amount) const {
  const int64_t left = capacity_ - used_ - amount;
  if (left < 0) return Answer::kFull;
  const int64_t has = held(holder);
  if (holder.empty() || has == 0 || share_ >= 1.0) return Answer::kYes;
  const auto most = static_cast<int64_t>(share_ * static_cast<double>(capacity_));
  return has + amount <= std::min(most, left) ? Answer::kYes : Answer::kOverShare;
}

FairShare::Answer FairShare::Take(absl::string_view holder, int64_t amount) {
  const Answer answer = Check(holder, amount);
  if (answer != Answer::kYes || amount == 0) return answer;
  used_ += amount;
  if (const auto it = held_.find(holder); it != held_.end()) {
    it->second += amount;
  } else {
    held_.emplace(std::string(holder), amount);
  }
  return answer;
}

void FairShare::Give(absl::string_view holder, int64_t amount) {
  if (amount == 0) return;
  used_ -= amount;
  const auto it = held_.find(holder);
  it->second -= amount;
  if (it->second == 0) held_.erase(it);
}

int64_t FairShare::held(absl::string_view holder) const {
  const auto it = held_.find(holder);
  return it == held_.end() ? 0 : it->second;
}

// ---- RangeAllocator ----

RangeAllocator::RangeAllocator(int64_t size, int64_t alignment, double share)
    : alignment_(alignment), size_(size / alignment * alignment), shares_(size_, share) {
  absl::MutexLock lock(&mutex_);
  if (size_ > 0) free_.emplace(0, size_);
}

// An empty block takes memory, too, so that every block has an offset of its own.
int64_t RangeAllocator::RoundedUp(int64_t bytes) const {
  return std::max(alignment_, (bytes + alignment_ - 1) / alignment_ * alignment_);
}

std::shared_ptr<const RangeAllocator::Block> RangeAllocator::Allocate(int64_t bytes,
                                                                      absl::string_view holder) {
  if (bytes > size_) return nullptr;
  const int64_t rounded = RoundedUp(bytes);
  absl::MutexLock lock(&mutex_);
  if (shares_.Check(holder, rounded) != FairShare::Answer::kYes) return nullptr;
  const auto it =
      std::find_if(free_.begin(), free_.end(), [=](const auto& range) { return range.second >= rounded; });
  if (it == free_.end()) return nullptr;
  const auto [offset, length] = *it;
  free_.erase(it);
  if (length > rounded) free_.emplace(offset + rounded, length - rounded);
  shares_.Take(holder, rounded);
  return std::shared_ptr<const Block>(new Block(this, offset, rounded, std::string(holder)));
}

int64_t RangeAllocator::used() const {
  absl::MutexLock lock(&mutex_);
  return shares_.used();
}

int64_t RangeAllocator::held(absl::string_view holder) const {
  absl::MutexLock lock(&mutex_);
  return shares_.held(holder);
}

void RangeAllocator::Free(const Block& block) {
  const int64_t offset = block.offset_;
  int64_t bytes = block.bytes_;
  absl::MutexLock lock(&mutex_);
  shares_.Give(block.holder_, bytes);
  // Joins the range with the free ranges right behind and before it.
  const auto next = free_.upper_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    free_.erase(next);
  }
  const auto after = free_.upper_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

// ---- RowMemory ----

using errors::ExactBytes;

namespace {
constexpr absl::string_view kLimit = "lossd/limit";  // type of a status payload that stays within the process
}  // namespace

absl::Status BecauseOf(absl::string_view flag, absl::Status error) {
  error.SetPayload(kLimit, absl::Cord(flag));
  return error;
}

std::string LimitOf(const absl::Status& status) {
  const absl::optional<absl::Cord> flag = status.GetPayload(kLimit);
  return flag.has_value() ? std::string(*flag) : std::string();
}

absl::Status RowMemory::Account::Take(int64_t bytes) {
  if (memory_ == nullptr) return absl::OkStatus();
  FairShare& shares = memory_->shares_;
  switch (shares.Take(holder_, bytes)) {
    case FairShare::Answer::kYes:
      return absl::OkStatus();
    case FairShare::Answer::kFull:
      return BecauseOf(
          "ledger_bytes",
          absl::ResourceExhaustedError(absl::StrCat(
              "the memory for targets, weights and ledgers of rows has ", ExactBytes(shares.used()), " of ",
              ExactBytes(shares.capacity()), " in use, and ", ExactBytes(bytes),
              " more are needed (apply the step or zero its gradients, or start the server with more "
              "--ledger_bytes)")));
    case FairShare::Answer::kOverShare:
      break;
  }
  return BecauseOf("peer_share",
                   absl::ResourceExhaustedError(absl::StrCat(
                       holder_, " has ", ExactBytes(shares.held(holder_)),
                       " of the memory for targets, weights and ledgers of rows; ", ExactBytes(bytes),
                       " more would be beyond its share, ", ExactBytes(shares.used()), " of ",
                       ExactBytes(shares.capacity()), " being in use (--ledger_bytes, --peer_share)")));
}

void RowMemory::Account::Give(int64_t bytes) {
  if (memory_ != nullptr) memory_->shares_.Give(holder_, bytes);
}

// ---- StagingBuffer and StagingPool ----

namespace {

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

StagingBuffer::StagingBuffer(StagingBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      give_back_(std::move(other.give_back_)) {}

StagingBuffer& StagingBuffer::operator=(StagingBuffer&& other) noexcept {
  if (this == &other) return *this;
  Release();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  give_back_ = std::move(other.give_back_);
  return *this;
}

void StagingBuffer::Release() {
  if (std::exchange(data_, nullptr) == nullptr) return;
  bytes_ = 0;
  GiveBack give_back = std::move(give_back_);
  give_back();
}

absl::StatusOr<std::unique_ptr<StagingPool>> StagingPool::Create(kernels::Backend* backend, int64_t bytes,
                                                                 int64_t max_buffer_bytes,
                                                                 double holder_share) {
  if (max_buffer_bytes <= 0 || max_buffer_bytes > bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("staging needs bytes for one buffer of at least one byte, got ",
                     errors::ExactBytes(bytes), " for buffers of ", errors::ExactBytes(max_buffer_bytes)));
  }
  constexpr int64_t kGrains = 64;  // grains in the largest buffer
  const int64_t grain = RoundUp((max_buffer_bytes + kGrains - 1) / kGrains, RangeAllocator::kAlignment);
  auto memory = backend->AllocateStaging(RoundUp(bytes, grain));
  if (!memory.ok()) return memory.status();
  return std::unique_ptr<StagingPool>(new StagingPool(*std::move(memory), grain, holder_share));
}

StagingPool::StagingPool(std::unique_ptr<kernels::StagingMemory> memory, int64_t grain, double holder_share)
    : memory_(std::move(memory)),
      grain_(grain),
      ranges_(static_cast<int64_t>(memory_->bytes().size()), grain),
      shares_(ranges_.size(), holder_share) {}

StagingPool::~StagingPool() = default;

StagingPool::Acquired StagingPool::Acquire(absl::string_view holder, int64_t bytes, Waiter waiter) {
  absl::MutexLock lock(&mutex_);
  mutex_.AssertHeld();
  const bool first = std::none_of(waiting_.begin(), waiting_.end(), [&](const Waiting& w) {
    mutex_.AssertHeld();
    return WithinShare(w.holder, w.bytes);
  });
  if (first && WithinShare(holder, bytes)) {
    if (StagingBuffer buffer = TryLend(holder, bytes)) return {.buffer = std::move(buffer)};
  }
  waiting_.push_back({++last_ticket_, std::string(holder), bytes, std::move(waiter)});
  return {.ticket = last_ticket_};
}

bool StagingPool::Forget(uint64_t ticket) {
  Waiter dropped;  // destroyed outside the lock
  std::vector<Served> served;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = std::find_if(waiting_.begin(), waiting_.end(),
                                 [ticket](const Waiting& w) { return w.ticket == ticket; });
    if (it == waiting_.end()) return false;
    dropped = std::move(it->waiter);
    waiting_.erase(it);
    served = ServeWaiting();  // there may be memory for the requests behind it
  }
  Call(std::move(served));
  return true;
}

int64_t StagingPool::used_bytes() const {
  absl::MutexLock lock(&mutex_);  // waits for GiveBack to leave: a caller that reads 0 may destroy the pool
  return ranges_.used();
}

int64_t StagingPool::peak_bytes() const {
  absl::MutexLock lock(&mutex_);
  return peak_bytes_;
}

int64_t StagingPool::over_share() const {
  absl::MutexLock lock(&mutex_);
  return std::count_if(waiting_.begin(), waiting_.end(), [this](const Waiting& w) {
    mutex_.AssertHeld();
    return !WithinShare(w.holder, w.bytes);
  });
}

// If the pool is full (kFull), a request may still be within its share: it then waits in its order.
bool StagingPool::WithinShare(absl::string_view holder, int64_t bytes) const {
  return shares_.Check(holder, RoundUp(std::max<int64_t>(bytes, 1), grain_)) != FairShare::Answer::kOverShare;
}

StagingBuffer StagingPool::TryLend(absl::string_view holder, int64_t bytes) {
  // Without a holder, because shares_ counts the holders of the pool.
  Block block = ranges_.Allocate(bytes);
  if (block == nullptr) return {};
  peak_bytes_ = std::max(peak_bytes_, ranges_.used());
  uint8_t* const data = memory_->bytes().data() + block->offset();
  const int64_t taken = block->bytes();
  shares_.Take(holder, taken);
  return StagingBuffer(data, taken, [this, holder = std::string(holder), block = std::move(block)]() mutable {
    GiveBack(holder, std::move(block));
  });
}

void StagingPool::GiveBack(const std::string& holder, Block block) {
  std::vector<Served> served;
  {
    absl::MutexLock lock(&mutex_);
    shares_.Give(holder, block->bytes());
    block.reset();
    served = ServeWaiting();
  }
  Call(std::move(served));
}

std::vector<StagingPool::Served> StagingPool::ServeWaiting() {
  std::vector<Served> served;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (!WithinShare(it->holder, it->bytes)) {
      ++it;
      continue;
    }
    StagingBuffer buffer = TryLend(it->holder, it->bytes);
    if (!buffer) break;  // later requests must not pass this one, or it might starve
    served.push_back({std::move(it->waiter), std::move(buffer)});
    it = waiting_.erase(it);
  }
  return served;
}

void StagingPool::Call(std::vector<Served> served) {
  for (Served& one : served) one.waiter(std::move(one.buffer));
}

}  // namespace lossd::engine
