// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/row_regions.h"

#include <algorithm>
#include <utility>

#include "kernels/clocks/waits.h"

namespace lossd::ranks {

RowRegions::RowRegions(int ranks, std::function<void()> on_news)
    : on_news_(std::move(on_news)), workers_(static_cast<size_t>(ranks)) {}

// ---- Memory ----

uint64_t RowRegions::Add(absl::Span<uint8_t> memory, wire::OwnedDescriptor descriptor) {
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  uint64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (regions_.size() >= kMost || memory.empty() || by_begin_.count(begin) > 0) return 0;
    id = next_++;
    regions_[id] = {.id = id,
                    .begin = begin,
                    .bytes = memory.size(),
                    .descriptor = std::make_shared<const wire::OwnedDescriptor>(std::move(descriptor))};
    by_begin_[begin] = id;
    v1::RowsFromLeader news;
    news.set_region(id);
    news.set_bytes(memory.size());
    for (Worker& worker : workers_) {
      if (worker.here) worker.news.push_back(news);
    }
  }
  on_news_();
  return id;
}

void RowRegions::Remove(uint64_t region) {
  Region removed;  // its descriptor is closed without the lock
  {
    absl::MutexLock lock(&mutex_);
    const auto found = regions_.find(region);
    if (found == regions_.end()) return;
    removed = std::move(found->second);
    regions_.erase(found);
    by_begin_.erase(removed.begin);
    v1::RowsFromLeader news;
    news.set_region(region);
    for (Worker& worker : workers_) {
      const auto same = [&](const v1::RowsFromLeader& other) { return other.region() == region; };
      const auto unheard = std::find_if(worker.news.begin(), worker.news.end(), same);
      if (unheard != worker.news.end()) {
        worker.news.erase(unheard);
      } else if (worker.regions.erase(region) > 0) {
        worker.news.push_back(news);
      }
    }
  }
  on_news_();
}

bool RowRegions::Answered(uint64_t region) const {
  return std::all_of(workers_.begin(), workers_.end(), [&](const Worker& worker) {
    const auto found = worker.regions.find(region);
    return !worker.here || (found != worker.regions.end() && found->second != State::kTold);
  });
}

void RowRegions::AwaitAnswers(uint64_t region, absl::Duration limit) const {
  absl::MutexLock lock(&mutex_);
  const auto answered = [&] {
    mutex_.AssertReaderHeld();
    return Answered(region);
  };
  clocks::AwaitFor(mutex_, absl::Condition(&answered), limit);
}

std::optional<v1::RowsPlace> RowRegions::Find(int rank, const void* begin, size_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  absl::MutexLock lock(&mutex_);
  const auto after = by_begin_.upper_bound(address);
  if (after == by_begin_.begin()) return std::nullopt;
  const Region& region = regions_.at(std::prev(after)->second);
  const size_t offset = address - region.begin;
  if (offset > region.bytes || bytes > region.bytes - offset) return std::nullopt;
  const Worker& worker = workers_[static_cast<size_t>(rank)];
  const auto known = worker.regions.find(region.id);
  if (!worker.here || known == worker.regions.end() || known->second != State::kMapped) return std::nullopt;
  v1::RowsPlace place;
  place.set_region(region.id);
  place.set_offset(offset);
  return place;
}

// ---- Workers ----

bool RowRegions::Enter(int rank) {
  absl::MutexLock lock(&mutex_);
  Worker& entering = worker(rank);
  if (std::exchange(entering.was_here, true)) return false;
  entering.here = true;
  for (const auto& [id, region] : regions_) {
    v1::RowsFromLeader news;
    news.set_region(id);
    news.set_bytes(region.bytes);
    entering.news.push_back(std::move(news));
  }
  return true;
}

void RowRegions::Leave(int rank) {
  absl::MutexLock lock(&mutex_);
  Worker& leaving = worker(rank);
  leaving.here = false;
  leaving.news.clear();
  leaving.regions.clear();
}

bool RowRegions::AnyHere() const {
  absl::MutexLock lock(&mutex_);
  return std::any_of(workers_.begin(), workers_.end(), [](const Worker& worker) { return worker.here; });
}

std::optional<RowRegions::News> RowRegions::NextNews(int rank) const {
  absl::MutexLock lock(&mutex_);
  const Worker& worker = workers_[static_cast<size_t>(rank)];
  if (worker.news.empty()) return std::nullopt;
  News news{.message = worker.news.front(), .descriptor = nullptr};
  if (news.message.bytes() > 0) news.descriptor = regions_.at(news.message.region()).descriptor;
  return news;
}

// The region may have been removed meanwhile: then the worker has to hear that too.
void RowRegions::Told(int rank, const News& news) {
  absl::MutexLock lock(&mutex_);
  Worker& told = worker(rank);
  const uint64_t region = news.message.region();
  if (!told.here) return;
  const bool is_first = !told.news.empty() && told.news.front().region() == region &&
                        told.news.front().bytes() == news.message.bytes();
  if (is_first) told.news.pop_front();
  if (news.message.bytes() == 0) return;
  if (is_first) {
    told.regions[region] = State::kTold;
    return;
  }
  v1::RowsFromLeader gone;
  gone.set_region(region);
  told.news.push_back(std::move(gone));
}

bool RowRegions::OnAnswer(int rank, uint64_t region, bool mapped) {
  absl::MutexLock lock(&mutex_);
  Worker& answering = worker(rank);
  const auto found = answering.regions.find(region);
  if (found != answering.regions.end()) {
    if (found->second != State::kTold) return false;
    found->second = mapped ? State::kMapped : State::kRefused;
    return true;
  }
  return region > 0 && region < next_ && regions_.count(region) == 0;  // it is gone by now
}

}  // namespace lossd::ranks
