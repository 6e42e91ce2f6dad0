// SPDX-License-Identifier: Apache-2.0
// One chunk of a group while its members compute it: a chunk of each part's own over copies of its slices,
// and what came of them put together.
//
// Threads. The members call OnResults and OnDone of their parts from threads of their own; everything else is
// for one thread at a time, the collecting members after all parts have called.
#ifndef LOSSD_KERNELS_GROUP_GROUP_CHUNK_H_
#define LOSSD_KERNELS_GROUP_GROUP_CHUNK_H_

#include <cstddef>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/group/division.h"

namespace lossd::kernels {

class GroupChunk {
 public:
  // `parts` hold each slice of `whole`: once, or every part all of them. What is said of a slice comes from
  // the first part that has it.
  GroupChunk(Chunk* whole, ChunkCallbacks callbacks, std::vector<ChunkPart> parts);
  // A chunk that is refused.
  GroupChunk(absl::Status refusal, ChunkCallbacks callbacks);
  GroupChunk(const GroupChunk&) = delete;
  GroupChunk& operator=(const GroupChunk&) = delete;

  size_t parts() const { return parts_.size(); }
  int member(size_t part) const { return divided_[part].member; }
  int64_t rows(size_t part) const { return divided_[part].rows; }
  Chunk* chunk(size_t part) { return &parts_[part].chunk; }

  // What a part's callbacks say. True for the last of the parts.
  bool OnResults(size_t part, const absl::Status& status);
  bool OnDone(size_t part, const absl::Status& status);

  // All parts have results: writes them into the whole chunk and calls its on_results; the first error in the
  // order of the parts is that of the chunk. Likewise on_done, where it is DATA_LOSS if some parts failed
  // before they had results and others accumulated.
  void CallResults();
  void CallDone();

 private:
  struct Part {
    Chunk chunk;
    std::vector<Slice> slices;
    absl::Status results;
    absl::Status done;
  };

  void CollectSlices();
  // How the chunk was computed is what is said of the part with the most rows that count.
  void CollectChoices();
  absl::Status DoneStatus() const;

  Chunk* const whole_;
  ChunkCallbacks callbacks_;
  const absl::Status refusal_;
  const std::vector<ChunkPart> divided_;
  std::vector<Part> parts_;  // one of `divided_` each
  absl::Mutex mutex_;
  size_t without_results_ ABSL_GUARDED_BY(mutex_);
  size_t unfinished_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_GROUP_CHUNK_H_
