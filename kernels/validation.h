// SPDX-License-Identifier: Apache-2.0
// Checks of arguments that every backend makes alike, before anything is computed or changed. The file also
// has what the checks of a divided head need: which rows of a tensor a replica keeps and updates (ShardRows).
//
// Functions are stateless and thread-safe. Messages name the field and the value.
#ifndef LOSSD_KERNELS_VALIDATION_H_
#define LOSSD_KERNELS_VALIDATION_H_

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// INVALID_ARGUMENT if the head or its `chunk_rows` cannot take this chunk: options out of range, class
// weights or weight gradients that the head does not have, too many rows, missing pointers, a grad_scale that
// is not finite, targets outside [0, V) other than kIgnoredTarget, wanted classes outside [0, V) or too many
// of them. Reads every target and class.
absl::Status ValidateChunk(const HeadConfig& config, int64_t chunk_rows, const Chunk& chunk);

// NOT_FOUND if the head has no such tensor; INVALID_ARGUMENT if the row range leaves it or `bytes` is not
// rows * cols * SizeOf(dtype).
absl::Status ValidateTensorAccess(const HeadConfig& config, TensorId id, int64_t row_begin, int64_t rows,
                                  DType dtype, size_t bytes);

// The same check for a replica, which keeps the rows StoredRowsOf() of a tensor: NOT_FOUND if it keeps no row
// of the parameter, INVALID_ARGUMENT if another replica keeps some of the rows.
absl::Status ValidateReplicaAccess(const HeadConfig& config, Replica replica, TensorId id, int64_t row_begin,
                                   int64_t rows, DType dtype, size_t bytes);

// FAILED_PRECONDITION if the head is not trainable, or has reserved less optimizer state than `options`,
// which are in their ranges, need.
absl::Status CheckTrainedBy(const HeadConfig& config, const OptimizerOptions& options);

// For HeadKernels::ApplyStep: INVALID_ARGUMENT if an option or `update` is out of range, or as
// CheckTrainedBy.
absl::Status ValidateStep(const HeadConfig& config, const OptimizerOptions& options, int64_t update);

// Rows [first, first + rows) of a parameter: those that a replica keeps, updates or computes (replica.h).
struct ShardRows {
  int64_t first = 0;
  int64_t rows = 0;

  int64_t end() const { return first + rows; }
  friend bool operator==(const ShardRows&, const ShardRows&) = default;
};

// By vocabulary: how many of `devices` divide the classes of one copy of the head. Else, and on fewer devices
// than the head has replicas elsewhere, 1: each has all.
inline int PlacesOf(const HeadConfig& config, int devices) {
  return config.split == Split::kVocabulary ? std::max(1, devices / ReplicasOf(config)) : 1;
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

// A device's part of a head: all classes, or those that the device has of a head that is split.
struct HeadPart {
  const HeadConfig& config;
  ShardRows classes;
};

// What HeadKernels::CheckTeacher asks on one device: INVALID_ARGUMENT as ValidateTeacher, and if the teacher
// is no head of the same backend and device; UNIMPLEMENTED if the parts have other classes than each other.
// The field is "distillation.teacher".
absl::Status ValidateTeacherPart(const HeadPart& student, const HeadPart& teacher, bool same_device);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_VALIDATION_H_
