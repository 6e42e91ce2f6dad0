// SPDX-License-Identifier: Apache-2.0
// Something that happens at most once, for one who watches for it: whoever begins to watch afterwards hears
// it at once. Thread-safe; the watcher is called without a lock.
#ifndef LOSSD_SERVER_RANKS_FIRST_NEWS_H_
#define LOSSD_SERVER_RANKS_FIRST_NEWS_H_

#include <functional>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lossd::ranks {

template <typename T>
class FirstNews {
 public:
  using Watcher = std::function<void(const T&)>;

  // What comes after the first is left out.
  void Tell(const T& news) ABSL_LOCKS_EXCLUDED(mutex_) {
    Watcher watcher;
    {
      absl::MutexLock lock(&mutex_);
      if (news_.has_value()) return;
      news_ = news;
      watcher = std::exchange(watcher_, nullptr);
    }
    if (watcher) watcher(news);
  }

  void Watch(Watcher watcher) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      if (!news_.has_value()) {
        watcher_ = std::move(watcher);
        return;
      }
    }
    watcher(*news_);  // which changes no more
  }

  // Nobody watches any more.
  void Unwatch() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    watcher_ = nullptr;
  }

 private:
  absl::Mutex mutex_;
  std::optional<T> news_;
  Watcher watcher_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_FIRST_NEWS_H_
