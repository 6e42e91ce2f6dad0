// SPDX-License-Identifier: Apache-2.0
#include "server/admin/restore.h"

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/errors/payload.h"
#include "server/head/checkpoint_store.h"
#include "server/log/log.h"

namespace lossd::admin {

absl::Status RestoreLatest(HeadOperations& operations) {
  const std::string& directory = operations.checkpoints().options().directory;
  if (absl::Status status = operations.checkpoints().PrepareDirectory(); !status.ok()) return status;
  const absl::StatusOr<std::vector<head::CheckpointInfo>> found = head::ListCheckpoints(directory, "");
  if (!found.ok()) return found.status();
  std::set<std::string> restored;
  for (const head::CheckpointInfo& checkpoint : *found) {  // from the newest to the oldest of a head
    if (!checkpoint.status.ok()) {
      log::Log(log::LogLevel::kWarning, "checkpoint passed over",
               {{"checkpoint", checkpoint.name}, {"reason", checkpoint.status.message()}});
      continue;
    }
    if (!restored.insert(checkpoint.subject.head).second) continue;
    v1::LoadCheckpointRequest request;
    request.set_checkpoint(checkpoint.name);
    const absl::Status status = operations.LoadCheckpoint(request).status();
    if (!status.ok()) {
      return errors::WithMessage(
          status, absl::StrCat("cannot restore ", checkpoint.name,
                               " (move it away to restore the one before): ", status.message()));
    }
  }
  log::Log(log::LogLevel::kInfo, "heads restored", {{"directory", directory}, {"heads", restored.size()}});
  return absl::OkStatus();
}

}  // namespace lossd::admin
