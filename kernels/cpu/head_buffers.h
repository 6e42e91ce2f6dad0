// SPDX-License-Identifier: Apache-2.0
// Everything a head on the CPU keeps in memory, laid out in one arena per memory kind.
#ifndef LOSSD_KERNELS_CPU_HEAD_BUFFERS_H_
#define LOSSD_KERNELS_CPU_HEAD_BUFFERS_H_

#include <array>
#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/cpu/arena.h"
#include "kernels/cpu/row_loss.h"
#include "kernels/head_config.h"
#include "kernels/memory.h"
#include "kernels/replica.h"

namespace lossd::kernels {

inline constexpr int64_t kMostChunkRows = 4096;

// Where a gathered row came from.
struct RowSource {
  int64_t slice;
  int64_t row;
};

// Pointers into the arenas; R = chunk rows. A tensor that the head does not have is null. Tensors begin with
// the first row that the replica keeps (StoredRowsOf). C are the classes that it computes.
struct HeadBuffers {
  static constexpr size_t kParams = 5;
  static constexpr size_t kRoles = 4;

  float*& tensor(TensorId id) { return tensors[static_cast<size_t>(id.param)][static_cast<size_t>(id.role)]; }
  float* tensor(TensorId id) const {
    return tensors[static_cast<size_t>(id.param)][static_cast<size_t>(id.role)];
  }
  float* value(Param param) const { return tensor({param, Role::kValue}); }
  float* gradient(Param param) const { return tensor({param, Role::kGradient}); }

  std::array<std::array<float*, kRoles>, kParams> tensors{};

  float* hidden = nullptr;             // [R, D], after the norm
  float* unit = nullptr;               // [R, D], after the norm but for gain and shift; only with a norm
  float* inverse_deviation = nullptr;  // [R]; only with a norm
  float* grad_hidden = nullptr;        // [R, D]
  float* logits = nullptr;             // [R, C], then their gradient
  RowSource* sources = nullptr;        // [R]
  RowResult* results = nullptr;        // [R]
  // Only of a head that is split by vocabulary:
  RowStatistics* statistics = nullptr;  // [R], of the replica's classes
  RowStatistics* merged = nullptr;      // [R], of all classes
  GradientSums* gradients = nullptr;    // [R], of the replica's classes
  float* bad_rows = nullptr;            // [2 R], of this part and of all: not 0 where dx is not finite
  float* norm_sums = nullptr;           // [2 D]; only with a norm
};

// Arenas of a head, indexed by MemoryKind.
using HeadArenas = std::array<Arena, kMemoryKinds>;

// Takes all arrays of a head with `chunk_rows` rows a chunk.
HeadBuffers LayOut(const HeadConfig& config, Replica replica, int64_t chunk_rows, HeadArenas& arenas);
// The bytes LayOut takes, by kind.
MemoryBytes PlanBuffers(const HeadConfig& config, Replica replica, int64_t chunk_rows);
// Zeroed arenas for such a plan.
absl::StatusOr<HeadArenas> AllocateArenas(const MemoryBytes& plan);

// The most rows a chunk may have so that the workspace stays within `workspace_bytes`, at most
// kMostChunkRows; the same for all replicas. RESOURCE_EXHAUSTED naming the bytes if one row does not fit.
absl::StatusOr<int64_t> ChunkRowsFor(const HeadConfig& config, int replicas, int64_t workspace_bytes);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_HEAD_BUFFERS_H_
