// SPDX-License-Identifier: Apache-2.0
// A text that becomes known while others ask for it.
//
// Thread-safe.
#ifndef LOSSD_SERVER_APP_LATE_TEXT_H_
#define LOSSD_SERVER_APP_LATE_TEXT_H_

#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lossd::app {

class LateText {
 public:
  void Set(std::string text) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    text_ = std::move(text);
  }
  // Empty until it is known.
  std::string Get() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::ReaderMutexLock lock(&mutex_);
    return text_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_LATE_TEXT_H_
