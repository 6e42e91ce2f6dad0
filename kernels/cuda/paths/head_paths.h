// SPDX-License-Identifier: Apache-2.0
// HeadPaths: the paths of a head, which are its ways of computing chunks (chunk_path.h). The plan of a chunk
// (chunk_plan.h) decides which path computes the chunk.
//
// To add a path, derive a class from ChunkPath and add a line to one of the tables of head_paths.cc. The
// class also needs a constructor that takes a PathContext, and this member:
//
//     static bool Takes(const ChunkPlan&);  // whether the path computes chunks with this plan
//
// path_memory.cc claims the memory that the path needs.
#ifndef LOSSD_KERNELS_CUDA_PATHS_HEAD_PATHS_H_
#define LOSSD_KERNELS_CUDA_PATHS_HEAD_PATHS_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/paths/chunk_path.h"

namespace lossd::kernels::cuda {

// Called by the backend's driving thread.
class HeadPaths {
 public:
  // Makes the paths of a head with context.config. context.memory has all regions that ClaimsOf() claims.
  explicit HeadPaths(const PathContext& context);
  HeadPaths(const HeadPaths&) = delete;
  HeadPaths& operator=(const HeadPaths&) = delete;

  // The path that computes a chunk with this plan. For and Describe may be called only for a head with
  // logits.
  ChunkPath& For(const ChunkPlan& plan);
  // Describes how a full chunk with gradients and this plan is computed, and the memory that the head keeps
  // for its other paths.
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan);
  // Calls ChunkPath::Tune() of all paths.
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
