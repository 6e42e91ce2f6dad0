// SPDX-License-Identifier: Apache-2.0
// Removing a checkpoint that others may be reading.
//
// A removal takes the checkpoint's name away at once, so that nobody finds it any more, and removes its files
// when nobody reads them. Two locks (folder_lock.h) make that safe. A reader holds the folder that the
// checkpoint lies in while it opens the files by their names, and the checkpoint's own folder as long as it
// reads. A removal holds the first alone while it takes the name away.
//
// Thread-safe, also against other processes. Errors as in checkpoint.h.
#ifndef LOSSD_SERVER_HEAD_CHECKPOINT_REMOVAL_H_
#define LOSSD_SERVER_HEAD_CHECKPOINT_REMOVAL_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/head/disk.h"
#include "server/head/folder_lock.h"

namespace lossd::head {

// What a reader holds.
struct ReadLocks {
  FolderLock name;   // the checkpoint keeps its name; until its files are open
  FolderLock files;  // its files stay; until they were read
};
// `folder`: the checkpoint's, without symbolic links. Waits for a removal that is taking its name away;
// NOT_FOUND if it has gone then. They hold nothing where the file system has no locks, since nothing is
// removed there.
absl::StatusOr<ReadLocks> LockForReading(const std::string& folder);

struct RemovedCheckpoint {
  int64_t bytes = 0;  // of its files
  // The path of its files if they stay, because they are being read or the disk refused. RemoveIfUnused and
  // RemoveLeftovers (temporary_folder.h) remove them later.
  std::string unremoved;
};

// Removes `checkpoint` ("<head>/<name>"). INVALID_ARGUMENT for a name that is none, or that is a symbolic
// link; NOT_FOUND if there is no such checkpoint; FAILED_PRECONDITION if the file system has no locks, or if
// the manifest cannot be read and other files than those of a checkpoint lie there. After an error, and after
// a crash, the checkpoint is there as it was, or it is gone.
absl::StatusOr<RemovedCheckpoint> RemoveCheckpoint(const std::string& directory, absl::string_view checkpoint,
                                                   Disk* disk = Disk::Real());

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_REMOVAL_H_
