// SPDX-License-Identifier: Apache-2.0
// All checkpoints of a directory: what is there, what may go. checkpoint_removal.h removes a certain one. One server owns a directory; several may share
// it as long as their heads' names differ.
//
// Thread-safe. Errors as in checkpoint.h.
#ifndef LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_
#define LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/head/disk.h"
#include "server/head/manifest.h"

namespace lossd::head {

// Makes the directory if need be and removes what interrupted saves and removals left in it. For the server's
// start; leaves alone what other processes are just writing.
absl::Status PrepareCheckpointDirectory(const std::string& directory, Disk* disk = Disk::Real());

struct CheckpointInfo {
  std::string name;     // "<head>/<name>"
  absl::Status status;  // why it cannot be loaded, as far as its manifest tells; then the rest is unset
  CheckpointSubject subject;
  absl::Time saved_at = absl::UnixEpoch();  // the epoch if it is not known
  bool automatic = false;
  int64_t bytes = 0;
};

// The checkpoints of a head, or of all (`head` empty), by head and then from the newest to the oldest; those
// whose manifest cannot be read come last. Only manifests are read. Empty if there is no such folder.
absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& directory,
                                                            absl::string_view head);

// After the automatic checkpoint `saved` ("<head>/<name>") was saved: removes the automatic checkpoints of
// its head but the `keep` (at least 1) newest, `saved` being one, and returns the names of those removed.
// Those named by a user, being read, or with a manifest that cannot be read stay. After a crash each is as it
// was or gone.
absl::StatusOr<std::vector<std::string>> PruneCheckpoints(const std::string& directory,
                                                          absl::string_view saved, int64_t keep,
                                                          Disk* disk = Disk::Real());

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_
