// SPDX-License-Identifier: Apache-2.0
// Checks of arguments that all backends make before they compute or change anything. The file also defines
// which rows of a tensor a replica of a divided head stores and updates (ShardRows).
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

// INVALID_ARGUMENT if a head with this config and `chunk_rows` cannot compute this chunk: options out of
// range, class weights or weight gradients that the head does not have, too many rows, missing pointers, a
// grad_scale that is not finite, targets outside [0, V) other than kIgnoredTarget, too many wanted classes or
// classes outside [0, V). Reads every target and class.
absl::Status ValidateChunk(const HeadConfig& config, int64_t chunk_rows, const Chunk& chunk);

// NOT_FOUND if the head has no such tensor; INVALID_ARGUMENT if the rows are not all in the tensor or `bytes`
// is not rows * cols * SizeOf(dtype).
absl::Status ValidateTensorAccess(const HeadConfig& config, TensorId id, int64_t row_begin, int64_t rows,
                                  DType dtype, size_t bytes);

// The same check for a replica, which stores only the rows StoredRowsOf() of a tensor. Also NOT_FOUND if the
// replica stores no row of the tensor, and INVALID_ARGUMENT if it does not store all of the rows [row_begin,
// row_begin + rows).
absl::Status ValidateReplicaAccess(const HeadConfig& config, Replica replica, TensorId id, int64_t row_begin,
                                   int64_t rows, DType dtype, size_t bytes);

// FAILED_PRECONDITION if the head is not trainable, or reserved less optimizer state than `options` needs.
// `options` must be valid.
absl::Status CheckTrainedBy(const HeadConfig& config, const OptimizerOptions& options);

// The checks of HeadKernels::ApplyStep: INVALID_ARGUMENT if an option or `update` is out of range; else as
// CheckTrainedBy.
absl::Status ValidateStep(const HeadConfig& config, const OptimizerOptions& options, int64_t update);

// Rows [first, first + rows) of a parameter, which a replica stores, updates or computes (replica.h).
struct ShardRows {
  int64_t first = 0;
  int64_t rows = 0;

  int64_t end() const { return first + rows; }
  friend bool operator==(const ShardRows&, const ShardRows&) = default;
};

// The number of devices, out of `devices`, that divide the classes of one copy of the head. It is 1, so each
// device has all classes, if the head is not split by vocabulary or has more copies than devices.
inline int PlacesOf(const HeadConfig& config, int devices) {
  return config.split == Split::kVocabulary ? std::max(1, devices / ReplicasOf(config)) : 1;
}

// PlaceOf: the number of a device among the devices that divide the classes of its copy of the head. CopyOf:
// the number of that copy. Devices are ordered by copy, and within a copy by classes.
inline Replica PlaceOf(const HeadConfig& config, Replica replica) {
  const int places = PlacesOf(config, replica.count);
  return {replica.index % places, places};
}
inline Replica CopyOf(const HeadConfig& config, Replica replica) {
  const int places = PlacesOf(config, replica.count);
  return {replica.index / places, replica.count / places};
}

// Whether the classes are divided over several devices.
inline bool IsSplitByVocabulary(const HeadConfig& config, Replica replica) {
  return PlacesOf(config, replica.count) > 1;
}

// The classes that a replica has, and whose logits it computes.
inline ShardRows ClassesOf(const HeadConfig& config, Replica replica) {
  if (!IsSplitByVocabulary(config, replica)) return {0, config.vocab_size};
  const Shard shard = ClassShardOf(config.vocab_size, PlaceOf(config, replica), config.shares);
  return {shard.first_class, shard.classes};
}

// The number of classes of the replica that has the most.
inline int64_t MostClassesOf(const HeadConfig& config, int replicas) {
  int64_t most = 0;
  for (int i = 0; i < replicas; ++i) most = std::max(most, ClassesOf(config, {i, replicas}).rows);
  return most;
}

// The index of the first replica that has the most classes. Descriptions of a head describe this replica.
inline int WithMostClasses(const HeadConfig& config, int replicas) {
  int most = 0;
  for (int i = 1; i < replicas; ++i) {
    if (ClassesOf(config, {i, replicas}).rows > ClassesOf(config, {most, replicas}).rows) most = i;
  }
  return most;
}

// The parameters that a replica updates. Several copies of the head may have the same classes; each copy
// updates its shard of these classes. With one copy, the shard is all classes of the replica. The first copy
// also updates the norm.
inline Shard ShardOf(const HeadConfig& config, Replica replica) {
  const ShardRows classes = ClassesOf(config, replica);
  Shard shard = ShardOf(classes.rows, CopyOf(config, replica));
  shard.first_class += classes.first;
  return shard;
}

// The rows of a parameter that a replica updates. Class weights, which are not trained, are treated like the
// norm.
inline ShardRows ShardRowsOf(const HeadConfig& config, Param param, Replica replica) {
  const Shard shard = ShardOf(config, replica);
  if (param == Param::kWeight || param == Param::kBias) return {shard.first_class, shard.classes};
  return {0, shard.norm ? ShapeOf(config, param).rows : 0};
}

// The rows of a tensor that a replica stores. Of weight and bias it stores the rows of its classes, of other
// parameters all rows, and of moments only the rows that it updates.
inline ShardRows StoredRowsOf(const HeadConfig& config, TensorId id, Replica replica) {
  if (IsMoment(id.role)) return ShardRowsOf(config, id.param, replica);
  if (id.param == Param::kWeight || id.param == Param::kBias) return ClassesOf(config, replica);
  return {0, ShapeOf(config, id.param).rows};
}

// A device's part of a head: its classes, which are all classes unless the head is split by vocabulary.
struct HeadPart {
  const HeadConfig& config;
  ShardRows classes;
};

// The checks of HeadKernels::CheckTeacher on one device. INVALID_ARGUMENT as ValidateTeacher, and if the
// teacher is not a head of the same backend and device. UNIMPLEMENTED if the two parts do not have the same
// classes. The field is "distillation.teacher".
absl::Status ValidateTeacherPart(const HeadPart& student, const HeadPart& teacher, bool same_device);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_VALIDATION_H_
