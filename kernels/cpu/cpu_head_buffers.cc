// SPDX-License-Identifier: Apache-2.0
// The layout of the memory of a head on the CPU, and the number of chunk rows that fit into it (cpu_head.h).
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels {
namespace {

MemoryKind KindOf(const HeadConfig& config, Role role) {
  switch (role) {
    case Role::kValue:
      return config.residency == Residency::kHost ? MemoryKind::kHostValues : MemoryKind::kWeights;
    case Role::kGradient:
      return MemoryKind::kGradients;
    default:
      return MemoryKind::kOptimizer;
  }
}

// The elements of a tensor that the replica keeps.
int64_t ElementsOf(const HeadConfig& config, Replica replica, TensorId id) {
  return StoredRowsOf(config, id, replica).rows * ShapeOf(config, id.param).cols;
}

// The workspace of the replica with the most classes. All replicas use it, so that their chunks have the same
// rows.
int64_t WorkspaceBytes(const HeadConfig& config, int replicas, int64_t chunk_rows) {
  int most = 0;
  for (int i = 1; i < replicas; ++i) {
    if (ClassesOf(config, {i, replicas}).rows > ClassesOf(config, {most, replicas}).rows) most = i;
  }
  return PlanBuffers(config, {most, replicas}, chunk_rows)[MemoryKind::kWorkspace];
}

}  // namespace

HeadBuffers LayOut(const HeadConfig& config, Replica replica, int64_t chunk_rows, HeadArenas& arenas) {
  HeadBuffers buffers;
  for (Param param : kAllParams) {
    for (Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
      const TensorId id{param, role};
      if (!HasTensor(config, id)) continue;
      const int64_t elements = ElementsOf(config, replica, id);
      if (elements == 0) continue;
      Arena& arena = arenas[static_cast<size_t>(KindOf(config, role))];
      buffers.tensor(id) = arena.Take<float>(elements);
    }
  }
  Arena& workspace = arenas[static_cast<size_t>(MemoryKind::kWorkspace)];
  const int64_t hidden_elements = chunk_rows * config.hidden_size;
  buffers.hidden = workspace.Take<float>(hidden_elements);
  if (config.logits == Logits::kNone) {
    // A chunk either returns rows or takes gradients (cpu_embedding.cc), so one array serves both.
    buffers.grad_hidden = buffers.hidden;
    buffers.sources = workspace.Take<RowSource>(chunk_rows);
    buffers.results = workspace.Take<RowResult>(chunk_rows);
    if (IsSplitByVocabulary(config, replica)) buffers.bad_rows = workspace.Take<float>(2 * chunk_rows);
    return buffers;
  }
  if (config.norm != Norm::kNone) {
    buffers.unit = workspace.Take<float>(hidden_elements);
    buffers.inverse_deviation = workspace.Take<float>(chunk_rows);
  }
  buffers.grad_hidden = workspace.Take<float>(hidden_elements);
  buffers.logits = workspace.Take<float>(chunk_rows * ClassesOf(config, replica).rows);
  buffers.sources = workspace.Take<RowSource>(chunk_rows);
  buffers.results = workspace.Take<RowResult>(chunk_rows);
  if (IsSplitByVocabulary(config, replica)) {
    buffers.statistics = workspace.Take<RowStatistics>(chunk_rows);
    buffers.merged = workspace.Take<RowStatistics>(chunk_rows);
    buffers.gradients = workspace.Take<GradientSums>(chunk_rows);
    buffers.taught = workspace.Take<TaughtRow>(chunk_rows);
    buffers.merged_taught = workspace.Take<TaughtRow>(chunk_rows);
    buffers.ranked = workspace.Take<RankedClass>(ClassEntries(chunk_rows));
    buffers.class_logits = workspace.Take<float>(ClassEntries(chunk_rows));
    buffers.bad_rows = workspace.Take<float>(2 * chunk_rows);
    if (config.norm != Norm::kNone) buffers.norm_sums = workspace.Take<float>(2 * config.hidden_size);
  }
  return buffers;
}

MemoryBytes PlanBuffers(const HeadConfig& config, Replica replica, int64_t chunk_rows) {
  HeadArenas arenas;
  LayOut(config, replica, chunk_rows, arenas);
  MemoryBytes bytes;
  for (size_t i = 0; i < kMemoryKinds; ++i) bytes.by_kind[i] = arenas[i].used();
  return bytes;
}

absl::StatusOr<HeadArenas> AllocateArenas(const MemoryBytes& plan) {
  HeadArenas arenas;
  for (size_t i = 0; i < kMemoryKinds; ++i) {
    LOSSD_TRY(arenas[i], Arena::Allocate(plan.by_kind[i]));
  }
  return arenas;
}

absl::StatusOr<int64_t> ChunkRowsFor(const HeadConfig& config, int replicas, int64_t workspace_bytes) {
  const int64_t least = WorkspaceBytes(config, replicas, 1);
  if (least > workspace_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("one row of hidden_size ", config.hidden_size, " and vocab_size ", config.vocab_size,
                     " needs ", errors::ExactBytes(least), " of workspace, workspace_bytes is ",
                     errors::ExactBytes(workspace_bytes)));
  }
  // Adds steps that are halved each time, as long as the rows fit: a bisection, because more rows need more
  // memory.
  int64_t fits = 1;
  for (int64_t step = kMostChunkRows; step > 0; step /= 2) {
    const int64_t rows = fits + step;
    if (rows <= kMostChunkRows && WorkspaceBytes(config, replicas, rows) <= workspace_bytes) fits = rows;
  }
  return fits;
}

}  // namespace lossd::kernels
