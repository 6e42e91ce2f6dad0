// SPDX-License-Identifier: Apache-2.0
// What is known of a checkpoint from its manifest. A manifest is read and checked once: what it said is
// remembered, for the process's directories together, as long as the file is the same (device, inode, size,
// times of the last change). A file that was changed in the last seconds is read again.
//
// Memory: at most kMostInfos checkpoints, about a KiB each; the one that nobody asked for longest goes first.
// Thread-safe; no lock is held while a file is read.
#ifndef LOSSD_SERVER_HEAD_CHECKPOINT_INFOS_H_
#define LOSSD_SERVER_HEAD_CHECKPOINT_INFOS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/head/manifest.h"

namespace lossd::head {

inline constexpr size_t kMostInfos = 16'384;

struct CheckpointInfo {
  std::string name;     // "<head>/<name>"
  absl::Status status;  // why it cannot be loaded, as far as its manifest tells; then the rest is unset
  CheckpointSubject subject;
  absl::Time saved_at = absl::UnixEpoch();  // the epoch if it is not known
  bool automatic = false;
  int64_t bytes = 0;
  uint64_t save_number = 0;  // Manifest::save_number
};

// Of the checkpoint `name` ("<head>/<name>") below a directory.
CheckpointInfo InfoOf(const std::string& directory, const std::string& name);

// How many manifests the process has read for InfoOf; for tests.
int64_t ManifestsReadForTesting();

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_INFOS_H_
