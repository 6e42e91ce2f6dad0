// SPDX-License-Identifier: Apache-2.0
// The manifest of a checkpoint, and how the tensors of a head lie in its files. Manifest says what the
// checkpoint is of and what its tensors must read as; EncodeManifest and DecodeManifest are its JSON.
// DivideClasses and PartsOf divide the tensors among files. docs/checkpoint-format.md describes the files and
// the JSON.
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

// How an optimizer step was applied and what it answered: what a repeated ApplyStep is checked against and
// answered with, also after a restart from a checkpoint. Plain data.
struct AppliedStep {
  uint64_t incarnation = 0;  // of the server that applied it
  uint64_t generation = 0;   // of the gradients that it was applied with; 0: not known
  kernels::OptimizerOptions optimizer;
  double grad_norm = 0.0;  // may be infinite or NaN
  int64_t microbatches = 0;
  int64_t rows = 0;
  int64_t contributions = 0;
  bool skipped = false;          // closed without an update
  bool begin_optimizer = false;  // the optimizer's state was zeroed before it

  friend bool operator==(const AppliedStep&, const AppliedStep&) = default;
};

// ---- Shards ----
// The files of tensors are shards: each has the rows of one range of classes, of every tensor that has a row
// for each class. The other tensors are in the first file.

// Classes [begin, end).
struct ClassRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  std::string Text() const;  // "classes [0, 4)"
  friend bool operator==(const ClassRange&, const ClassRange&) = default;
};

inline constexpr size_t kMostShards = 256;
// Smaller shards are not made for the sake of more threads.
inline constexpr int64_t kLeastShardBytes = int64_t{16} << 20;

struct ShardRules {
  int64_t most_bytes = int64_t{1} << 30;  // of a file, as far as kMostShards files and one class allow
  int threads = 4;                        // that write at once; at least 1
};

// All classes of a head, in order, in ranges that differ by at most one class. With a head that is large
// enough each thread has the same number of files.
std::vector<ClassRange> DivideClasses(const kernels::HeadConfig& config, const ShardRules& rules);
// Divides only some classes of a head, into at most `most` ranges.
std::vector<ClassRange> DivideClasses(const kernels::HeadConfig& config, const ClassRange& classes,
                                      const ShardRules& rules, size_t most);

// The tensors a checkpoint of such a head holds, in file order: values and moments, no gradients.
std::vector<kernels::TensorId> CheckpointTensors(const kernels::HeadConfig& config);
// What they take.
int64_t CheckpointBytes(const kernels::HeadConfig& config);

// Rows [row_begin, row_begin + rows) of a tensor.
struct TensorPart {
  kernels::TensorId id;
  int64_t row_begin = 0;
  int64_t rows = 0;
  friend bool operator==(const TensorPart&, const TensorPart&) = default;
};

// What the file of a range holds, in file order.
std::vector<TensorPart> PartsOf(const kernels::HeadConfig& config, const ClassRange& classes);

// The name of the file of `shard`, counted from 0, out of `shards`: "tensors-00001-of-00004.safetensors", or
// "tensors.safetensors" if there is no other.
std::string ShardFile(size_t shard, size_t shards);

// What a file says of its range beside its tensors; nothing if it has all classes.
std::map<std::string, std::string> ShardMetadata(const kernels::HeadConfig& config,
                                                 const ClassRange& classes);

// ---- The manifest ----

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
  // The number of this save: larger than those of all earlier saves of the head in the directory, whatever
  // the clock said. 0: a server saved it that did not count.
  uint64_t save_number = 0;
  std::vector<ManifestShard> shards;  // together all classes, in order
};

// The bytes of all files of tensors.
int64_t ShardBytes(const Manifest& manifest);

// Ends with a checksum of the rest. A manifest with one shard has the older of the two versions.
std::string EncodeManifest(const Manifest& manifest);

// DATA_LOSS if the text is not what EncodeManifest wrote (a counter above kMostCounted is named),
// FAILED_PRECONDITION for another version. The head's config and the optimizer's options are valid, and the
// shards have all of its classes, each once.
absl::StatusOr<Manifest> DecodeManifest(absl::string_view text);

// Decodes the manifest of `checkpoint` ("<head>/<name>") below a directory; errors name the checkpoint.
absl::StatusOr<Manifest> ReadManifest(const std::string& directory, absl::string_view checkpoint);

// A digest of what a checkpoint holds: tensors as they are divided, head, step and the answer to the last
// step, but not when and by which server it was saved. 16 hexadecimal digits.
std::string ContentDigest(const Manifest& manifest);

// ---- Parts of EncodeManifest and DecodeManifest ----
// They are what a manifest says beside the head's config and its tensors: counters, the last step, who
// trained. The decode functions throw Json::exception for a missing key or a value of another type, and
// return false for a value out of range.

using Json = nlohmann::ordered_json;

inline constexpr size_t kMostShown = 40;  // characters of a value in an error message
inline constexpr absl::Time kLatestSave = absl::FromUnixSeconds(253'402'300'799);  // the end of the year 9999

std::string EncodeIncarnation(uint64_t incarnation);

// Steps, updates, save_number, and the counts of the last step, which it makes if there is one. DATA_LOSS
// that names the field and its value if one is not a whole number from 0 to kMostCounted.
absl::Status DecodeCounts(const Json& json, Manifest* manifest);

Json EncodeLastStep(const std::optional<AppliedStep>& step);
// After DecodeCounts.
bool DecodeLastStep(const Json& json, std::optional<AppliedStep>* step);

Json EncodeHistory(const CheckpointSubject& subject);
// Manifests of older servers have none.
bool DecodeHistory(const Json& json, CheckpointSubject* subject);

// ---- What saving and reading a checkpoint have in common ----

inline constexpr char kTensorFile[] = "tensors.safetensors";  // of a checkpoint that has only one
inline constexpr char kManifestFile[] = "manifest.json";

// The shape of some rows of a tensor in a file.
inline std::vector<int64_t> FileShape(const kernels::HeadConfig& config, kernels::Param param, int64_t rows) {
  if (param == kernels::Param::kWeight) return {rows, kernels::ShapeOf(config, param).cols};
  return {rows};
}

// How many rows of a tensor are handled at once: as many as `slice_bytes` take, at least one. So many that
// the next ones lie right for a direct write, if that is possible.
inline int64_t SliceRows(const kernels::TensorShape& shape, int64_t slice_bytes) {
  const int64_t row_bytes = shape.cols * static_cast<int64_t>(sizeof(float));
  const int64_t rows = std::max<int64_t>(slice_bytes / row_bytes, 1);
  const int64_t aligned_rows =
      formats::kDirectAlignment / std::gcd(formats::kDirectAlignment, row_bytes);  // the fewest
  const int64_t most = rows < aligned_rows ? rows : rows / aligned_rows * aligned_rows;
  return std::min(most, shape.rows);
}

inline int64_t Bytes(const kernels::TensorShape& shape) {
  return shape.elements() * static_cast<int64_t>(sizeof(float));
}

// How many of these fp32 values are infinite or NaN.
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

// The checksum of checkpoints: XXH3, 64 bits, without a seed. It finds corruption, not tampering.
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
