// SPDX-License-Identifier: Apache-2.0
// The checkpoints of a directory: functions that list them, order them by age, prune old ones, remove one,
// and number saves. Usually one server owns a directory. Several servers may share it if the names of their
// heads differ.
//
// Thread-safe, except TakeSaveNumber. Errors as in checkpoint.h.
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

// The most CheckpointInfos that the process remembers.
inline constexpr size_t kMostInfos = 16'384;

// What a checkpoint's manifest says.
struct CheckpointInfo {
  std::string name;     // "<head>/<name>"
  absl::Status status;  // not OK: why the manifest cannot be used; all other fields are then unset
  CheckpointSubject subject;
  absl::Time saved_at = absl::UnixEpoch();  // the Unix epoch if not known
  bool automatic = false;
  int64_t bytes = 0;
  uint64_t save_number = 0;  // Manifest::save_number
};

// Returns the info of the checkpoint `name` ("<head>/<name>") below a directory.
//
// A manifest is read and checked once. The process then remembers its info, in one cache for all directories,
// as long as the file is the same (device, inode, size, times of the last change). A file that was changed in
// the last seconds is read again. The cache has about a KiB for each of at most kMostInfos checkpoints and
// evicts the least recently used. No lock is held while a file is read.
CheckpointInfo InfoOf(const std::string& directory, const std::string& name);

// How many manifests the process has read for InfoOf; for tests.
int64_t ManifestsReadForTesting();

// Creates the directory if necessary, and removes what interrupted saves and removals left in it. For the
// start of a server. Does not touch what other processes are writing.
absl::Status PrepareCheckpointDirectory(const std::string& directory, Disk* disk = Disk::Real());

// Lists the checkpoints of a head, or of all heads if `head` is empty. The list is ordered by head, and
// within a head as SortNewestFirst does. Uses InfoOf, so it reads only manifests that are not remembered.
// Empty if there is no such folder.
absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& directory,
                                                            absl::string_view head);

// The `most` newest checkpoints of a head, ordered as by SortNewestFirst. Checkpoints whose manifest cannot
// be read have no age and come last. If not all checkpoints have a place, those get at most half of the
// places, or the places that readable ones leave free if these are more.
struct NewestCheckpoints {
  std::vector<CheckpointInfo> checkpoints;
  size_t left_out = 0;    // how many checkpoints are not in the list
  bool and_more = false;  // there may be more: only `most_folders` folders were examined
};
// Examines at most `most_folders` folders.
absl::StatusOr<NewestCheckpoints> ListNewest(const std::string& directory, absl::string_view head,
                                             size_t most, size_t most_folders);

// Called after the automatic checkpoint `saved` ("<head>/<name>") was saved. Keeps the `keep` >= 1 newest
// automatic checkpoints of its head, `saved` among them, and removes the others; returns the names of the
// removed ones. A checkpoint stays if a user named it, if it is being read, or if its manifest cannot be
// read. After a crash each checkpoint is as it was or gone.
absl::StatusOr<std::vector<std::string>> PruneCheckpoints(const std::string& directory,
                                                          absl::string_view saved, int64_t keep,
                                                          Disk* disk = Disk::Real());

// ---- Save numbers ----
// The saves of a head are numbered, so that the order of its checkpoints does not depend on a clock or on
// steps. The manifest has the number of its save. The last number is also in the name of an empty file beside
// the checkpoints (.save-number-0000000000000012), so that it survives the removal of all checkpoints.

// Takes the next number for a save of `head`: at least 1, and larger than the number beside the checkpoints
// and all numbers in their manifests. When this returns, the file beside the checkpoints has the new number.
// Thread-safe for different heads; the caller makes saves of one head take turns.
absl::StatusOr<uint64_t> TakeSaveNumber(Disk* disk, const std::string& directory, const std::string& head);

// Sorts the checkpoints of a head from the newest to the oldest, by save number. A checkpoint without a
// number was saved by an older server. Its place follows from the times in the manifests: it counts as newer
// than all numbered checkpoints that were saved at the same time or before. Among checkpoints without a
// number, the later time and then the larger step is newer. Checkpoints whose manifest cannot be read come
// last.
void SortNewestFirst(std::vector<CheckpointInfo>* infos);

// ---- Removing a checkpoint that others may be reading ----
// A removal first renames the checkpoint's folder, so that no new reader finds it, and removes the files when
// no reader has them open. Two locks (FolderLock, disk.h) make that safe. A reader holds a lock on the head's
// folder while it opens the files by name, and a lock on the checkpoint's folder as long as it reads. A
// removal holds only the lock on the head's folder, while it renames.
//
// Thread-safe, and safe against other processes.

// The locks of a reader.
struct ReadLocks {
  FolderLock name;   // keeps the checkpoint's name; held until its files are open
  FolderLock files;  // keeps the files; held until they were read
};
// Locks a checkpoint for a reader. `folder`: the checkpoint's folder, without symbolic links. Waits for a
// removal that is taking the name away; NOT_FOUND if the checkpoint is then gone. If the file system has no
// locks, the result holds none: nothing is removed there.
absl::StatusOr<ReadLocks> LockForReading(const std::string& folder);

struct RemovedCheckpoint {
  int64_t bytes = 0;  // size of its files
  // The folder of the files if they could not be removed yet, because they are being read or the disk
  // refused. RemoveIfUnused and RemoveLeftovers (disk.h) remove it later. Empty: the files are gone.
  std::string unremoved;
};

// Removes `checkpoint` ("<head>/<name>"). INVALID_ARGUMENT for an invalid name or a symbolic link. NOT_FOUND
// if there is no such checkpoint. FAILED_PRECONDITION if the file system has no locks, or if the manifest
// cannot be read and the folder has files that are not a checkpoint's. After an error, and after a crash, the
// checkpoint is as it was or gone.
absl::StatusOr<RemovedCheckpoint> RemoveCheckpoint(const std::string& directory, absl::string_view checkpoint,
                                                   Disk* disk = Disk::Real());

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_STORE_H_
