// SPDX-License-Identifier: Apache-2.0
// The manifest of a checkpoint: what it is of, and what its tensors must read as. docs/checkpoint-format.md
// describes its JSON. Thread-safe.
#ifndef LOSSD_SERVER_HEAD_MANIFEST_H_
#define LOSSD_SERVER_HEAD_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/head_config.h"
#include "server/head/applied_step.h"
#include "server/head/shards.h"

namespace lossd::head {

// What a checkpoint is of.
struct CheckpointSubject {
  std::string head;
  kernels::HeadConfig config;
  uint64_t step = 0;         // optimizer steps closed
  uint64_t updates = 0;      // of them, those that updated the weights
  uint64_t incarnation = 0;  // of the server that saved it
  // Step `step` - 1, if the server knows how it was applied.
  std::optional<AppliedStep> last_step;
  // History::run and applied_unix_seconds of the head.
  std::string run;
  int64_t applied_unix_seconds = 0;

  friend bool operator==(const CheckpointSubject&, const CheckpointSubject&) = default;
};

struct ManifestTensor {
  std::string name;
  int64_t bytes = 0;
  std::string checksum;  // Checksum::Digest
};

// One file of tensors.
struct ManifestShard {
  std::string file;        // its name in the manifest's folder, ShardFile
  int64_t file_bytes = 0;  // all of it
  ClassRange classes;
  std::vector<ManifestTensor> tensors;  // the rows of these classes, in file order
  int64_t not_finite = 0;  // values that are infinite or NaN, as far as it was counted; not written
};

// The most that a counter in a manifest may say, so that it can be counted on for ever: steps, updates,
// saves, rows.
inline constexpr uint64_t kMostCounted = uint64_t{1} << 53;

struct Manifest {
  CheckpointSubject subject;
  absl::Time saved_at = absl::UnixEpoch();  // to the second; the epoch if it is not known
  bool automatic = false;                   // named by the server, which may remove it
  // Of this save among all of the head in the directory: larger than those of all before it, whatever the
  // clock said. 0: a server saved it that did not count.
  uint64_t save_number = 0;
  std::vector<ManifestShard> shards;  // together all classes, in order
};

// Of all files of tensors.
int64_t ShardBytes(const Manifest& manifest);

// Ends with a checksum of the rest. A manifest with one shard has the older of the two versions.
std::string EncodeManifest(const Manifest& manifest);

// DATA_LOSS if the text is not what EncodeManifest wrote (a counter above kMostCounted is named),
// FAILED_PRECONDITION for another version. The head's config and the optimizer's options are valid, and the
// shards have all of its classes, each once.
absl::StatusOr<Manifest> DecodeManifest(absl::string_view text);

// Decodes the manifest of `checkpoint` ("<head>/<name>") below a directory; errors name the checkpoint.
absl::StatusOr<Manifest> ReadManifest(const std::string& directory, absl::string_view checkpoint);

// Of what a checkpoint holds: tensors as they are divided, head, step and the answer to the last step, but
// not when and by which server it was saved. 16 hexadecimal digits.
std::string ContentDigest(const Manifest& manifest);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_MANIFEST_H_
