// SPDX-License-Identifier: Apache-2.0
// The leader's end of the work of its workers on files of checkpoints (worker_files.h).
//
// Thread-safe. The objects that it makes outlive neither it nor the leader.
#ifndef LOSSD_SERVER_RANKS_RANK_FILES_H_
#define LOSSD_SERVER_RANKS_RANK_FILES_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/head/file_sites.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {

class RankFiles final : public head::FileSites {
 public:
  using Workers = std::map<int, std::shared_ptr<WorkerStream>>;

  // Of all workers; once, before the rest.
  void SetWorkers(const Workers& workers) ABSL_LOCKS_EXCLUDED(mutex_);

  std::vector<std::unique_ptr<head::SaveSite>> ForSave(absl::Span<const kernels::RemotePart> parts) override;
  std::vector<std::unique_ptr<head::LoadSite>> ForLoad(absl::Span<const kernels::RemotePart> parts) override;

  // Logs how a rank's part is saved, or loaded, when that is news. Not OK: why not by itself.
  void Note(int rank, const std::string& what, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::shared_ptr<WorkerStream> Find(int rank) const ABSL_LOCKS_EXCLUDED(mutex_);

  mutable absl::Mutex mutex_;
  Workers workers_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, std::string>, std::string> noted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_RANK_FILES_H_
