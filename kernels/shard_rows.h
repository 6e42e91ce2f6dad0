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

// By vocabulary: how many of `devices` divide the classes of one copy of the head. Else 1: each has all.
inline int PlacesOf(const HeadConfig& config, int devices) {
  return config.split == Split::kVocabulary ? devices / ReplicasOf(config) : 1;
}

// Which of the devices that divide the classes of its copy of the head a device is, and which copy that is.
// Devices are in the order of the copies, and of the classes in each.
inline Replica PlaceOf(const HeadConfig& config, Replica replica) {
  const int places = PlacesOf(config, replica.count);
  return {replica.index % places, places};
}
inline Replica CopyOf(const HeadConfig& config, Replica replica) {
  const int places = PlacesOf(config, replica.count);
  return {replica.index / places, replica.count / places};
}

// Whether several devices have some of the classes each.
inline bool IsSplitByVocabulary(const HeadConfig& config, Replica replica) {
  return PlacesOf(config, replica.count) > 1;
}

// The classes whose logits a replica computes.
inline ShardRows ClassesOf(const HeadConfig& config, Replica replica) {
  if (!IsSplitByVocabulary(config, replica)) return {0, config.vocab_size};
  const Shard shard = ClassShardOf(config.vocab_size, PlaceOf(config, replica), config.shares);
  return {shard.first_class, shard.classes};
}

// The classes of the replica that has the most.
inline int64_t MostClassesOf(const HeadConfig& config, int replicas) {
  int64_t most = 0;
  for (int i = 0; i < replicas; ++i) most = std::max(most, ClassesOf(config, {i, replicas}).rows);
  return most;
}

// The first of the replicas that have the most. It stands for all where a head is described.
inline int WithMostClasses(const HeadConfig& config, int replicas) {
  int most = 0;
  for (int i = 1; i < replicas; ++i) {
    if (ClassesOf(config, {i, replicas}).rows > ClassesOf(config, {most, replicas}).rows) most = i;
  }
  return most;
}

// What a replica updates: of the classes that it computes its shard among the copies of the head, which is
// all of them where there is one copy; and the norm in the first copy.
inline Shard ShardOf(const HeadConfig& config, Replica replica) {
  const ShardRows classes = ClassesOf(config, replica);
  Shard shard = ShardOf(classes.rows, CopyOf(config, replica));
  shard.first_class += classes.first;
  return shard;
}

// The rows that a replica updates. Class weights are not trained; they count as the norm does.
inline ShardRows ShardRowsOf(const HeadConfig& config, Param param, Replica replica) {
  const Shard shard = ShardOf(config, replica);
  if (param == Param::kWeight || param == Param::kBias) return {shard.first_class, shard.classes};
  return {0, shard.norm ? ShapeOf(config, param).rows : 0};
}

// The rows of a tensor that a replica keeps: those of its classes, of what is for all classes all; but of
// moments those that it updates.
inline ShardRows StoredRowsOf(const HeadConfig& config, TensorId id, Replica replica) {
  if (IsMoment(id.role)) return ShardRowsOf(config, id.param, replica);
  if (id.param == Param::kWeight || id.param == Param::kBias) return ClassesOf(config, replica);
  return {0, ShapeOf(config, id.param).rows};
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SHARD_ROWS_H_
