// SPDX-License-Identifier: Apache-2.0
// Which rows of a parameter a replica keeps and updates (replica.h). Stateless; thread-safe.
#ifndef LOSSD_KERNELS_SHARD_ROWS_H_
#define LOSSD_KERNELS_SHARD_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/head_config.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// Rows [first, first + rows) of a parameter.
struct ShardRows {
  int64_t first = 0;
  int64_t rows = 0;

  int64_t end() const { return first + rows; }
  friend bool operator==(const ShardRows&, const ShardRows&) = default;
};

// Whether the head lies on several devices, each with some of its classes.
inline bool IsSplitByVocabulary(const HeadConfig& config, Replica replica) {
  return config.split == Split::kVocabulary && replica.count > 1;
}

// What a replica computes with and updates: of a head that is split by vocabulary its classes, else its
// shard.
inline Shard ShardOf(const HeadConfig& config, Replica replica) {
  return IsSplitByVocabulary(config, replica) ? ClassShardOf(config.vocab_size, replica, config.shares)
                                              : ShardOf(config.vocab_size, replica);
}

// The classes whose logits a replica computes.
inline ShardRows ClassesOf(const HeadConfig& config, Replica replica) {
  if (!IsSplitByVocabulary(config, replica)) return {0, config.vocab_size};
  const Shard shard = ClassShardOf(config.vocab_size, replica, config.shares);
  return {shard.first_class, shard.classes};
}

// The classes of the replica that has the most.
inline int64_t MostClassesOf(const HeadConfig& config, int replicas) {
  int64_t most = 0;
  for (int i = 0; i < replicas; ++i) most = std::max(most, ClassesOf(config, {i, replicas}).rows);
  return most;
}

// The rows that a replica updates. Class weights are not trained; they count as the norm does.
inline ShardRows ShardRowsOf(const HeadConfig& config, Param param, Replica replica) {
  const Shard shard = ShardOf(config, replica);
  if (param == Param::kWeight || param == Param::kBias) return {shard.first_class, shard.classes};
  return {0, shard.norm ? ShapeOf(config, param).rows : 0};
}

// The rows of a tensor that a replica keeps: by rows all of them, but of moments those that it updates.
inline ShardRows StoredRowsOf(const HeadConfig& config, TensorId id, Replica replica) {
  if (IsMoment(id.role) || IsSplitByVocabulary(config, replica)) {
    return ShardRowsOf(config, id.param, replica);
  }
  return {0, ShapeOf(config, id.param).rows};
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SHARD_ROWS_H_
