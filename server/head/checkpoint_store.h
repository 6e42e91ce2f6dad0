// SPDX-License-Identifier: Apache-2.0
// All checkpoints of a directory: what is there, what may go. checkpoint_removal.h removes a certain one. One
// server owns a directory; several may share it as long as their heads' names differ.
//
// Thread-safe. Errors as in checkpoint.h.
#ifndef LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_
#define LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/head/checkpoint_infos.h"
#include "server/head/disk.h"

namespace lossd::head {

// Makes the directory if need be and removes what interrupted saves and removals left in it. For the server's
// start; leaves alone what other processes are just writing.
absl::Status PrepareCheckpointDirectory(const std::string& directory, Disk* disk = Disk::Real());

// The checkpoints of a head, or of all (`head` empty), by head and then from the newest to the oldest as
// SortNewestFirst (save_numbers.h) says. Only manifests are read, and those that were read before not again.
// Empty if there is no such folder.
absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& directory,
                                                            absl::string_view head);

// The `most` newest checkpoints of a head, sorted as ListCheckpoints does. Those whose manifest cannot be
// read have no age; they are not hidden by newer ones, but take no more than half of the places from them.
struct NewestCheckpoints {
  std::vector<CheckpointInfo> checkpoints;
  size_t left_out = 0;    // that are there besides
  bool and_more = false;  // there are even more: only `most_folders` folders were looked at
};
// Looks at no more than `most_folders` folders.
absl::StatusOr<NewestCheckpoints> ListNewest(const std::string& directory, absl::string_view head,
                                             size_t most, size_t most_folders);

// After the automatic checkpoint `saved` ("<head>/<name>") was saved: removes the automatic checkpoints of
// its head but the `keep` (at least 1) newest, `saved` being one, and returns the names of those removed.
// Those named by a user, being read, or with a manifest that cannot be read stay. After a crash each is as it
// was or gone.
absl::StatusOr<std::vector<std::string>> PruneCheckpoints(const std::string& directory,
                                                          absl::string_view saved, int64_t keep,
                                                          Disk* disk = Disk::Real());

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_
