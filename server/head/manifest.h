// The manifest of a checkpoint: what it is of, and what its tensors must read as. docs/checkpoint-format.md
// describes its JSON. Thread-safe.
#ifndef LOSSD_SERVER_HEAD_MANIFEST_H_
#define LOSSD_SERVER_HEAD_MANIFEST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/head_config.h"

namespace lossd::head {

// What a checkpoint is of.
struct CheckpointSubject {
  std::string head;
  kernels::HeadConfig config;
  uint64_t step = 0;         // optimizer steps closed
  uint64_t updates = 0;      // of them, those that updated the weights
  uint64_t incarnation = 0;  // of the server that saved it

  friend bool operator==(const CheckpointSubject&, const CheckpointSubject&) = default;
};

struct ManifestTensor {
  std::string name;
  int64_t bytes = 0;
  std::string checksum;  // Checksum::Digest
};

struct Manifest {
  CheckpointSubject subject;
  std::string file;  // of the tensors, in the manifest's folder
  int64_t file_bytes = 0;
  std::vector<ManifestTensor> tensors;
};

// Ends with a checksum of the rest.
std::string EncodeManifest(const Manifest& manifest);

// DATA_LOSS if the text is not what EncodeManifest wrote, FAILED_PRECONDITION if it has another format
// version. The head's config is valid.
absl::StatusOr<Manifest> DecodeManifest(absl::string_view text);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_MANIFEST_H_
