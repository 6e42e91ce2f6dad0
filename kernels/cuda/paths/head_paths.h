// SPDX-License-Identifier: Apache-2.0
// The paths of a head, which are its ways of computing chunks, and the choice of the path that computes a
// chunk by the chunk's plan (chunk_plan.h).
//
// A new path is a class derived from ChunkPath, and a line in one of the tables of head_paths.cc. Beside
// ChunkPath's members the class has a constructor that takes a PathContext, and
//
//     static bool Takes(const ChunkPlan&);  // whether it computes such a chunk
//
// The memory that it needs is claimed in path_memory.cc.
#ifndef LOSSD_KERNELS_CUDA_PATHS_HEAD_PATHS_H_
#define LOSSD_KERNELS_CUDA_PATHS_HEAD_PATHS_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/paths/chunk_path.h"

namespace lossd::kernels::cuda {

// Driven by the backend's thread.
class HeadPaths {
 public:
  // Of a head with this config; the memory is as ClaimsOf() says.
  explicit HeadPaths(const PathContext& context);
  HeadPaths(const HeadPaths&) = delete;
  HeadPaths& operator=(const HeadPaths&) = delete;

  // Of a head with logits, as is Describe().
  ChunkPath& For(const ChunkPlan& plan);
  // How a full chunk with gradients is computed whose plan this is, and what the head keeps for others.
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan);
  // ChunkPath::Tune() of all paths.
  absl::Status Tune(const void* hidden);

 private:
  struct Entry {
    bool (*takes)(const ChunkPlan&);
    std::unique_ptr<ChunkPath> path;
  };
  const PathContext context_;
  std::vector<Entry> paths_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_HEAD_PATHS_H_
