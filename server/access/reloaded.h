// SPDX-License-Identifier: Apache-2.0
// A value made from files, made again when the files have changed. Whoever asks for the value has the files
// looked at, at most once a second. A change that makes no valid value is logged, and the value stays as it
// was: a file that is being replaced, or a certificate whose key comes a moment later, refuses no client.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ACCESS_RELOADED_H_
#define LOSSD_SERVER_ACCESS_RELOADED_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/access/file_stamps.h"
#include "server/log/log.h"

namespace lossd::access {

inline constexpr absl::Duration kLookAtFilesEvery = absl::Seconds(1);

template <typename T>
class Reloaded {
 public:
  using Load = std::function<absl::StatusOr<std::shared_ptr<const T>>()>;

  // `what` names the value in the log: "tokens". `load` reads `paths`. Its error, if the first one fails.
  static absl::StatusOr<std::unique_ptr<Reloaded>> Create(std::string what, std::vector<std::string> paths,
                                                          Load load) {
    const FileStamps stamps = StampsOf(paths);
    absl::StatusOr<std::shared_ptr<const T>> value = load();
    if (!value.ok()) return value.status();
    return std::unique_ptr<Reloaded>(
        new Reloaded(std::move(what), std::move(paths), std::move(load), stamps, *std::move(value)));
  }

  std::shared_ptr<const T> Get() ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::Time now = clocks::SteadyNow();
    absl::MutexLock lock(&mutex_);
    if (now - looked_ >= kLookAtFilesEvery) {
      looked_ = now;
      Look();
    }
    return value_;
  }

 private:
  Reloaded(std::string what, std::vector<std::string> paths, Load load, FileStamps stamps,
           std::shared_ptr<const T> value)
      : what_(std::move(what)),
        paths_(std::move(paths)),
        load_(std::move(load)),
        stamps_(std::move(stamps)),
        looked_(clocks::SteadyNow()),
        value_(std::move(value)) {}

  void Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    FileStamps stamps = StampsOf(paths_);
    if (stamps == stamps_) return;
    absl::StatusOr<std::shared_ptr<const T>> value = load_();
    if (value.ok()) {
      value_ = *std::move(value);
      stamps_ = std::move(stamps);
      failed_.clear();
      log::Log(log::LogLevel::kInfo, "files read again", {{"what", what_}});
    } else if (failed_ != stamps) {  // tried again every time, told once
      log::Log(log::LogLevel::kError, "changed files are not valid; what was read before stays in use",
               {{"what", what_}, {"error", value.status().message()}});
      failed_ = std::move(stamps);
    }
  }

  const std::string what_;
  const std::vector<std::string> paths_;
  const Load load_;
  absl::Mutex mutex_;
  FileStamps stamps_ ABSL_GUARDED_BY(mutex_);  // of the value
  FileStamps failed_ ABSL_GUARDED_BY(mutex_);  // of the last failure that was logged
  absl::Time looked_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const T> value_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_RELOADED_H_
