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

  friend bool operator==(const CheckpointSubject&, const CheckpointSubject&) = default;
};

struct ManifestTensor {
  std::string name;
  int64_t bytes = 0;
  std::string checksum;  // Checksum::Digest
};

struct Manifest {
  CheckpointSubject subject;
  absl::Time saved_at = absl::UnixEpoch();  // to the second; the epoch if it is not known
  bool automatic = false;                   // named by the server, which may remove it
  std::string file;                         // of the tensors, in the manifest's folder
  int64_t file_bytes = 0;
  std::vector<ManifestTensor> tensors;
};

// Ends with a checksum of the rest.
std::string EncodeManifest(const Manifest& manifest);

// Reads this format version and the older ones. DATA_LOSS if the text is not what EncodeManifest wrote,
// FAILED_PRECONDITION for a later version. The head's config and the optimizer's options are valid.
absl::StatusOr<Manifest> DecodeManifest(absl::string_view text);

// Decodes the manifest of `checkpoint` ("<head>/<name>") below a directory; errors name the checkpoint.
absl::StatusOr<Manifest> ReadManifest(const std::string& directory, absl::string_view checkpoint);

// Of what a checkpoint holds: tensors, head, step and the answer to the last step, but not when and by which
// server it was saved. 16 hexadecimal digits.
std::string ContentDigest(const Manifest& manifest);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_MANIFEST_H_
