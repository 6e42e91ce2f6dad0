// SPDX-License-Identifier: Apache-2.0
// One lock per name, made when it is first asked for and gone when no thread holds it.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ADMIN_NAMED_LOCKS_H_
#define LOSSD_SERVER_ADMIN_NAMED_LOCKS_H_

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace lossd::admin {

class NamedLocks {
 public:
  // Holds the lock of one name until destroyed or told to let go, on the thread that took it.
  class Guard {
   public:
    explicit Guard(std::shared_ptr<absl::Mutex> mutex) ABSL_NO_THREAD_SAFETY_ANALYSIS
        : mutex_(std::move(mutex)) {
      mutex_->Lock();
    }
    ~Guard() { Unlock(); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

    // Lets go early; later calls do nothing.
    void Unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      if (mutex_ != nullptr) mutex_->Unlock();
      mutex_ = nullptr;
    }

   private:
    std::shared_ptr<absl::Mutex> mutex_;  // null: not held any more
  };

  // Blocks until the lock of `name` is free.
  Guard Lock(absl::string_view name) { return Guard(Find(name)); }

 private:
  std::shared_ptr<absl::Mutex> Find(absl::string_view name) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    std::erase_if(mutexes_, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<absl::Mutex>& known = mutexes_[std::string(name)];
    std::shared_ptr<absl::Mutex> mutex = known.lock();
    if (mutex == nullptr) known = mutex = std::make_shared<absl::Mutex>();
    return mutex;
  }

  absl::Mutex mutex_;
  std::map<std::string, std::weak_ptr<absl::Mutex>> mutexes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_NAMED_LOCKS_H_
