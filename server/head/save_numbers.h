// SPDX-License-Identifier: Apache-2.0
// The saves of a head are numbered, so that the order of its checkpoints depends on no clock and on no step.
// A number is in the checkpoint's manifest, and the last one also in the name of an empty file beside the
// checkpoints (.save-number-0000000000000012), so that it survives the removal of all of them.
//
// Thread-safe for heads that differ; saves of one head take turns.
#ifndef LOSSD_SERVER_HEAD_SAVE_NUMBERS_H_
#define LOSSD_SERVER_HEAD_SAVE_NUMBERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/head/checkpoint_infos.h"
#include "server/head/disk.h"

namespace lossd::head {

// Takes the next number for a save of `head`: one more than the number beside the checkpoints and those in
// their manifests, and at least 1. The file beside them has it when this returns.
absl::StatusOr<uint64_t> TakeSaveNumber(Disk* disk, const std::string& directory, const std::string& head);

// From the newest checkpoint of a head to the oldest: by save number. One without a number, which an older
// server saved, comes after the last one with a number that was saved no later than it, by the times in their
// manifests; among such, the later time and then the larger step is newer. Those whose manifest cannot be
// read come last.
void SortNewestFirst(std::vector<CheckpointInfo>* infos);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_SAVE_NUMBERS_H_
