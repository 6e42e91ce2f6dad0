// SPDX-License-Identifier: Apache-2.0
// The part that other processes take in a save: who of them takes part, which files each writes, and whether
// they lie there as those processes say.
//
// Thread-compatible, but for failed(), progress() and Cancel(), which are thread-safe once Divide has
// returned.
#ifndef LOSSD_SERVER_HEAD_SITE_WRITING_H_
#define LOSSD_SERVER_HEAD_SITE_WRITING_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/head/file_sites.h"
#include "server/head/temporary_folder.h"

namespace lossd::head {

class SiteWriting {
 public:
  // `config` and `disk` outlive it.
  SiteWriting(const kernels::HeadConfig& config, Disk* disk, std::vector<std::unique_ptr<SaveSite>> sites)
      : config_(config), disk_(disk), sites_(std::move(sites)) {}

  // Lets go of the processes that do not prove that they see `folder` of the head.
  absl::Status Prove(const std::string& head, const TemporaryFolder& folder);
  // All files of the checkpoint, in order. Each is of classes of one process; without others, those of
  // DivideClasses.
  std::vector<PlannedFile> Divide(const ShardRules& rules);
  // Those that this process writes, by their places among all.
  const std::vector<size_t>& own() const { return own_; }
  // How many threads a process has for its files.
  int threads() const { return threads_; }

  // Has the processes write.
  void Start();
  // Waits until all have read their tensors, or one has failed, or `stopped` is true.
  void AwaitRead(const std::function<bool()>& stopped) const;
  // Waits until all have ended, after an error soon. Puts what they say of their files into `lines`, by
  // places among all files.
  absl::Status Await(std::vector<ManifestShard>& lines);

  bool failed() const;
  // Of all processes, without total_bytes.
  SaveProgress progress() const;
  void Cancel() const;

 private:
  // The files [first, first + files) are those of one process; null: of this one.
  struct Group {
    SaveSite* site = nullptr;
    ClassRange classes;
    size_t first = 0;
    size_t files = 0;
  };

  absl::Status CheckProof(SaveSite& site, const TemporaryFolder& folder, const std::string& nonce);
  std::vector<Group> Groups() const;

  const kernels::HeadConfig& config_;
  Disk* const disk_;
  std::vector<std::unique_ptr<SaveSite>> sites_;
  std::vector<Group> groups_;
  std::vector<PlannedFile> files_;
  std::vector<size_t> own_;
  int threads_ = 1;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_SITE_WRITING_H_
