#include "server/engine/staging_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::engine {

StagingBuffer::StagingBuffer(StagingBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), give_back_(std::move(other.give_back_)) {}

StagingBuffer& StagingBuffer::operator=(StagingBuffer&& other) noexcept {
  if (this == &other) return *this;
  Release();
  data_ = std::exchange(other.data_, nullptr);
  give_back_ = std::move(other.give_back_);
  return *this;
}

void StagingBuffer::Release() {
  if (std::exchange(data_, nullptr) == nullptr) return;
  GiveBack give_back = std::move(give_back_);
  give_back();
}

absl::StatusOr<std::unique_ptr<StagingPool>> StagingPool::Create(kernels::Backend* backend,
                                                                 int64_t buffer_bytes, int64_t buffers) {
  if (buffer_bytes <= 0 || buffers <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("staging needs at least one buffer of one byte, got ", buffers, " of ", buffer_bytes));
  }
  constexpr int64_t kAlignment = 64;
  buffer_bytes = (buffer_bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto memory = backend->AllocateStaging(buffer_bytes * buffers);
  if (!memory.ok()) return memory.status();
  return std::unique_ptr<StagingPool>(new StagingPool(*std::move(memory), buffer_bytes, buffers));
}

StagingPool::StagingPool(std::unique_ptr<kernels::StagingMemory> memory, int64_t buffer_bytes,
                         int64_t buffers)
    : memory_(std::move(memory)), buffer_bytes_(buffer_bytes), buffers_(buffers) {
  absl::MutexLock lock(&mutex_);
  for (int64_t i = buffers - 1; i >= 0; --i) free_.push_back(memory_->bytes().data() + i * buffer_bytes);
}

StagingPool::~StagingPool() = default;

uint64_t StagingPool::Acquire(Waiter waiter) {
  StagingBuffer buffer;
  {
    absl::MutexLock lock(&mutex_);
    if (free_.empty() || !waiting_.empty()) {
      waiting_.push_back({++last_ticket_, std::move(waiter)});
      return last_ticket_;
    }
    buffer = Lend(free_.back());
    free_.pop_back();
  }
  waiter(std::move(buffer));
  return 0;
}

bool StagingPool::Forget(uint64_t ticket) {
  Waiter dropped;  // destroyed outside the lock
  absl::MutexLock lock(&mutex_);
  const auto it = std::find_if(waiting_.begin(), waiting_.end(),
                               [ticket](const Waiting& w) { return w.ticket == ticket; });
  if (it == waiting_.end()) return false;
  dropped = std::move(it->waiter);
  waiting_.erase(it);
  return true;
}

int64_t StagingPool::free_buffers() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(free_.size());
}

StagingBuffer StagingPool::Lend(uint8_t* data) {
  return StagingBuffer(data, [this, data] { GiveBack(data); });
}

void StagingPool::GiveBack(uint8_t* data) {
  Waiter next;
  {
    absl::MutexLock lock(&mutex_);
    if (waiting_.empty()) {
      free_.push_back(data);
      return;
    }
    next = std::move(waiting_.front().waiter);
    waiting_.pop_front();
  }
  next(Lend(data));
}

}  // namespace lossd::engine
