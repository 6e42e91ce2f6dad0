// SPDX-License-Identifier: Apache-2.0
// How the tensors of a head lie in the files of a checkpoint (shards): each file has the rows of one range of
// classes, of every tensor that has a row for each class. The other tensors are in the first file.
// docs/checkpoint-format.md describes the files. Stateless and thread-safe.
#ifndef LOSSD_SERVER_HEAD_SHARDS_H_
#define LOSSD_SERVER_HEAD_SHARDS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/head_config.h"

namespace lossd::head {

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
// The same for some classes of a head, into at most so many ranges.
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

// Of `shard`, counted from 0, out of `shards`: "tensors-00001-of-00004.safetensors", or "tensors.safetensors"
// if there is no other.
std::string ShardFile(size_t shard, size_t shards);

// What a file says of its range beside its tensors; nothing if it has all classes.
std::map<std::string, std::string> ShardMetadata(const kernels::HeadConfig& config,
                                                 const ClassRange& classes);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_SHARDS_H_
