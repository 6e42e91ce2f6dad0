// SPDX-License-Identifier: Apache-2.0
// All checkpoints of a directory: these functions list them, order them by age, prune old ones and remove a
// certain one. One server owns a directory; several may share it as long as their heads' names differ.
//
// Thread-safe, but for TakeSaveNumber. Errors as in checkpoint.h.
#ifndef LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_
#define LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_

#include <cstddef>
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

// The most checkpoints that the process remembers a CheckpointInfo of.
inline constexpr size_t kMostInfos = 16'384;

// What is known of a checkpoint from its manifest.
struct CheckpointInfo {
  std::string name;     // "<head>/<name>"
  absl::Status status;  // why it cannot be loaded, as far as its manifest tells; then the rest is unset
  CheckpointSubject subject;
  absl::Time saved_at = absl::UnixEpoch();  // the epoch if it is not known
  bool automatic = false;
  int64_t bytes = 0;
  uint64_t save_number = 0;  // Manifest::save_number
};

// What is known of the checkpoint `name` ("<head>/<name>") below a directory.
//
// A manifest is read and checked once. The process remembers what it said, for all its directories together,
// as long as the file is the same (device, inode, size, times of the last change). A file that was changed in
// the last seconds is read again. The memory is about a KiB for each of at most kMostInfos checkpoints; the
// one that was not asked for longest goes first. No lock is held while a file is read.
CheckpointInfo InfoOf(const std::string& directory, const std::string& name);

// How many manifests the process has read for InfoOf; for tests.
int64_t ManifestsReadForTesting();

// Makes the directory if need be and removes what interrupted saves and removals left in it. For the server's
// start; leaves alone what other processes are just writing.
absl::Status PrepareCheckpointDirectory(const std::string& directory, Disk* disk = Disk::Real());

// The checkpoints of a head, or of all (`head` empty), by head and then from the newest to the oldest as
// SortNewestFirst says. Only manifests are read, and those that were read before are not read again.
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

// ---- Save numbers ----
// The saves of a head are numbered, so that the order of its checkpoints depends on no clock and on no step.
// A number is in the checkpoint's manifest, and the last one also in the name of an empty file beside the
// checkpoints (.save-number-0000000000000012), so that it survives the removal of all of them.

// Takes the next number for a save of `head`: one more than the number beside the checkpoints and those in
// their manifests, and at least 1. The file beside them has it when this returns. Thread-safe for heads that
// differ; saves of one head take turns.
absl::StatusOr<uint64_t> TakeSaveNumber(Disk* disk, const std::string& directory, const std::string& head);

// From the newest checkpoint of a head to the oldest: by save number. One without a number, which an older
// server saved, comes after the last one with a number that was saved no later than it, by the times in their
// manifests; among such, the later time and then the larger step is newer. Those whose manifest cannot be
// read come last.
void SortNewestFirst(std::vector<CheckpointInfo>* infos);

// ---- Removing a checkpoint that others may be reading ----
// A removal takes the checkpoint's name away at once, so that no new reader finds it, and removes its files
// when no reader has them open. Two locks (FolderLock, disk.h) make that safe. A reader holds the folder that
// the checkpoint lies in while it opens the files by their names, and the checkpoint's own folder as long as
// it reads. A removal holds only the first one, while it takes the name away.
//
// Thread-safe, also against other processes.

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
  // RemoveLeftovers (disk.h) remove them later.
  std::string unremoved;
};

// Removes `checkpoint` ("<head>/<name>"). INVALID_ARGUMENT for a name that is none, or that is a symbolic
// link; NOT_FOUND if there is no such checkpoint; FAILED_PRECONDITION if the file system has no locks, or if
// the manifest cannot be read and other files than those of a checkpoint lie there. After an error, and after
// a crash, the checkpoint is there as it was, or it is gone.
absl::StatusOr<RemovedCheckpoint> RemoveCheckpoint(const std::string& directory, absl::string_view checkpoint,
                                                   Disk* disk = Disk::Real());

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_
