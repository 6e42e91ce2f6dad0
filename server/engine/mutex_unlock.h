// SPDX-License-Identifier: Apache-2.0
// The opposite of absl::MutexLock: releases a mutex that the scope holds and takes it again at the scope's
// end.
#ifndef LOSSD_SERVER_ENGINE_MUTEX_UNLOCK_H_
#define LOSSD_SERVER_ENGINE_MUTEX_UNLOCK_H_

#include "absl/base/attributes.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

// Abseil's annotation for unlocking leaves open in which mode the mutex was held; a scope has to know, to
// take it again.
#if ABSL_HAVE_ATTRIBUTE(release_capability)
#define LOSSD_RELEASES_EXCLUSIVE_LOCK(mutex) __attribute__((release_capability(mutex)))
#else
#define LOSSD_RELEASES_EXCLUSIVE_LOCK(mutex)
#endif

namespace lossd::engine {

class ABSL_SCOPED_LOCKABLE MutexUnlock {
 public:
  // `mutex` is held by this thread and outlives the scope.
  explicit MutexUnlock(absl::Mutex* mutex) LOSSD_RELEASES_EXCLUSIVE_LOCK(mutex) : mutex_(mutex) {
    mutex_->Unlock();
  }
  ~MutexUnlock() ABSL_UNLOCK_FUNCTION() { mutex_->Lock(); }
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  absl::Mutex* const mutex_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MUTEX_UNLOCK_H_
