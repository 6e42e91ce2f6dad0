// SPDX-License-Identifier: Apache-2.0
// The manifest of a checkpoint, and the division of a head's tensors among its files. Manifest describes the
// saved head and has the checksums of its tensors; EncodeManifest and DecodeManifest convert it to and from
// JSON. DivideClasses and PartsOf divide the tensors among files. docs/checkpoint-format.md describes the
// files and the JSON.
//
// Functions are stateless and thread-safe; Checksum is thread-compatible.
#ifndef LOSSD_SERVER_HEAD_MANIFEST_H_
#define LOSSD_SERVER_HEAD_MANIFEST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/head_config.h"
#include "proto/tensorfile/file.h"

namespace lossd::head {

// How an optimizer step was applied, and its result. A repeated ApplyStep is checked against it and answered
// from it, even after a restart from a checkpoint. Plain data.
struct AppliedStep {
  uint64_t incarnation = 0;  // of the server process that applied the step
  uint64_t generation = 0;   // of the gradients that the step applied; 0: not known
  kernels::OptimizerOptions optimizer;
  double grad_norm = 0.0;  // may be infinite or NaN
  int64_t microbatches = 0;
  int64_t rows = 0;
  int64_t contributions = 0;
  bool skipped = false;          // closed without an update
  bool begin_optimizer = false;  // the optimizer's state was zeroed before the step

  friend bool operator==(const AppliedStep&, const AppliedStep&) = default;
};

// ---- Shards ----
// The files of tensors are shards. A shard has the rows of one range of classes, for every tensor that has a
// row for each class. All other tensors are in the first shard.

// The classes [begin, end).
struct ClassRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  std::string Text() const;  // e.g. "classes [0, 4)"
  friend bool operator==(const ClassRange&, const ClassRange&) = default;
};

inline constexpr size_t kMostShards = 256;
// A head is not divided into smaller shards than this only to use more threads.
inline constexpr int64_t kLeastShardBytes = int64_t{16} << 20;

// How a head is divided into shards.
struct ShardRules {
  int64_t most_bytes = int64_t{1} << 30;  // of a file, unless kMostShards or a single class makes it larger
  int threads = 4;                        // threads that write at once; at least 1
};

// Divides all classes of a head, in order, into ranges whose sizes differ by at most one class. If the head
// is large enough, each thread gets the same number of files.
std::vector<ClassRange> DivideClasses(const kernels::HeadConfig& config, const ShardRules& rules);
// Divides only some classes of a head, into at most `most` ranges.
std::vector<ClassRange> DivideClasses(const kernels::HeadConfig& config, const ClassRange& classes,
                                      const ShardRules& rules, size_t most);

// The tensors that a checkpoint of a head with this config holds, in file order: values and moments, no
// gradients.
std::vector<kernels::TensorId> CheckpointTensors(const kernels::HeadConfig& config);
// The bytes of these tensors.
int64_t CheckpointBytes(const kernels::HeadConfig& config);

// Rows [row_begin, row_begin + rows) of a tensor.
struct TensorPart {
  kernels::TensorId id;
  int64_t row_begin = 0;
  int64_t rows = 0;
  friend bool operator==(const TensorPart&, const TensorPart&) = default;
};

// The parts of tensors in the shard of `classes`, in file order.
std::vector<TensorPart> PartsOf(const kernels::HeadConfig& config, const ClassRange& classes);

// The file name of `shard`, counted from 0, out of `shards`: "tensors-00001-of-00004.safetensors", or
// "tensors.safetensors" if there is only one.
std::string ShardFile(size_t shard, size_t shards);

// The safetensors metadata of a shard, which names its classes; empty if the shard has all classes.
std::map<std::string, std::string> ShardMetadata(const kernels::HeadConfig& config,
                                                 const ClassRange& classes);

// ---- The manifest ----

// What is saved in a checkpoint: a head at one step boundary.
struct CheckpointSubject {
  std::string head;
  kernels::HeadConfig config;
  uint64_t step = 0;         // optimizer steps closed
  uint64_t updates = 0;      // steps that updated the weights
  uint64_t incarnation = 0;  // of the server process that saved it
  // How step `step` - 1 was applied, if the server knows it.
  std::optional<AppliedStep> last_step;
  // History::run and applied_unix_seconds of the head.
  std::string run;
  int64_t applied_unix_seconds = 0;

  friend bool operator==(const CheckpointSubject&, const CheckpointSubject&) = default;
};

// The manifest's entry for the rows of one tensor in a shard.
struct ManifestTensor {
  std::string name;
  int64_t bytes = 0;
  std::string checksum;  // Checksum::Digest
};

// The manifest's entry for one shard.
struct ManifestShard {
  std::string file;        // file name as ShardFile, in the manifest's folder
  int64_t file_bytes = 0;  // size of the whole file
  ClassRange classes;
  std::vector<ManifestTensor> tensors;  // the rows of these classes, in file order
  int64_t not_finite = 0;               // infinite or NaN values counted in a save; not in the JSON
};

// The largest value of a counter in a manifest (steps, updates, saves, rows), so that counting on never
// overflows.
inline constexpr uint64_t kMostCounted = uint64_t{1} << 53;

struct Manifest {
  CheckpointSubject subject;
  absl::Time saved_at = absl::UnixEpoch();  // to the second; the Unix epoch if not known
  bool automatic = false;                   // named by the server, which may prune it
  // The number of this save: larger than the numbers of all earlier saves of the head in the directory,
  // whatever the clock says. 0: saved by an older server, which did not number saves.
  uint64_t save_number = 0;
  std::vector<ManifestShard> shards;  // in order; together they have all classes
};

// The bytes of all shards.
int64_t ShardBytes(const Manifest& manifest);

// The text ends with a checksum of all that stands before it. A manifest with one shard has the older of the
// two format versions.
std::string EncodeManifest(const Manifest& manifest);

// Decodes and validates a manifest. DATA_LOSS if EncodeManifest did not write the text; a counter above
// kMostCounted is named. FAILED_PRECONDITION for another version. In the result the head's config and the
// optimizer's options are valid, and the shards have each class once.
absl::StatusOr<Manifest> DecodeManifest(absl::string_view text);

// Reads and decodes the manifest of `checkpoint` ("<head>/<name>") below a directory. Errors name the
// checkpoint.
absl::StatusOr<Manifest> ReadManifest(const std::string& directory, absl::string_view checkpoint);

// A digest of a checkpoint's content, 16 hexadecimal digits: the tensors as they are divided into shards,
// head, step and last step. It does not depend on when, and by which server, the checkpoint was saved.
std::string ContentDigest(const Manifest& manifest);

// ---- Parts of EncodeManifest and DecodeManifest ----
// These functions convert the parts of a manifest besides the head's config and tensors: counters, the last
// step, the history. The decode functions throw Json::exception for a missing key or a value of another type,
// and return false for a value out of range.

using Json = nlohmann::ordered_json;

inline constexpr size_t kMostShown = 40;  // most characters of a value in an error message
inline constexpr absl::Time kLatestSave = absl::FromUnixSeconds(253'402'300'799);  // the end of the year 9999

std::string EncodeIncarnation(uint64_t incarnation);

// Decodes step, updates, save_number and, if there is a last step, creates subject.last_step with its counts.
// DATA_LOSS names the field and its value if one is not an integer from 0 to kMostCounted.
absl::Status DecodeCounts(const Json& json, Manifest* manifest);

Json EncodeLastStep(const std::optional<AppliedStep>& step);
// Called after DecodeCounts.
bool DecodeLastStep(const Json& json, std::optional<AppliedStep>* step);

Json EncodeHistory(const CheckpointSubject& subject);
// Manifests of older servers have no history.
bool DecodeHistory(const Json& json, CheckpointSubject* subject);

// ---- Shared by saving and reading a checkpoint ----

inline constexpr char kTensorFile[] = "tensors.safetensors";  // the file of a checkpoint that has one shard
inline constexpr char kManifestFile[] = "manifest.json";

// The shape that `rows` rows of a tensor have in a file.
inline std::vector<int64_t> FileShape(const kernels::HeadConfig& config, kernels::Param param, int64_t rows) {
  if (param == kernels::Param::kWeight) return {rows, kernels::ShapeOf(config, param).cols};
  return {rows};
}

// How many rows of a tensor are handled at once: as many as fit into `slice_bytes`, at least one. If
// possible, a number of rows whose bytes are a multiple of kDirectAlignment, so that the next rows are
// aligned for a direct write.
inline int64_t SliceRows(const kernels::TensorShape& shape, int64_t slice_bytes) {
  const int64_t row_bytes = shape.cols * static_cast<int64_t>(sizeof(float));
  const int64_t rows = std::max<int64_t>(slice_bytes / row_bytes, 1);
  // Fewest rows whose bytes are a multiple of the alignment.
  const int64_t aligned_rows = formats::kDirectAlignment / std::gcd(formats::kDirectAlignment, row_bytes);
  const int64_t most = rows < aligned_rows ? rows : rows / aligned_rows * aligned_rows;
  return std::min(most, shape.rows);
}

inline int64_t Bytes(const kernels::TensorShape& shape) {
  return shape.elements() * static_cast<int64_t>(sizeof(float));
}

// Counts the fp32 values that are infinite or NaN.
inline int64_t CountNotFinite(absl::Span<const uint8_t> values) {
  constexpr uint32_t kExponent = 0x7f800000;
  int64_t count = 0;
  for (size_t at = 0; at + sizeof(uint32_t) <= values.size(); at += sizeof(uint32_t)) {
    uint32_t bits = 0;
    std::memcpy(&bits, values.data() + at, sizeof(bits));
    count += (bits & kExponent) == kExponent ? 1 : 0;
  }
  return count;
}

}  // namespace lossd::head

struct XXH3_state_s;

namespace lossd::head {

// The checksum of checkpoints: 64-bit XXH3 without a seed. It detects corruption, not tampering.
// Thread-compatible.
class Checksum {
 public:
  Checksum();

  void Update(absl::Span<const uint8_t> bytes);
  // The checksum of all bytes so far, as 16 lower-case hexadecimal digits.
  std::string Digest() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_MANIFEST_H_
