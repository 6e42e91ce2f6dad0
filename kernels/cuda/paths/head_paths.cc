// SPDX-License-Identifier: Apache-2.0
// The tables of paths, and HeadPaths (head_paths.h).
#include "kernels/cuda/paths/head_paths.h"

#include <iterator>
#include <utility>

#include "absl/types/span.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/paths/filtered_path.h"
#include "kernels/cuda/paths/recomputed_path.h"
#include "kernels/cuda/paths/sampled_path.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda {
namespace {

// An entry of the tables: which plans a path takes, and how the path is created.
struct PathFactory {
  bool (*takes)(const ChunkPlan&);
  std::unique_ptr<ChunkPath> (*make)(const PathContext&);
};

template <typename Path>
constexpr PathFactory FactoryOf() {
  return {&Path::Takes, [](const PathContext& context) -> std::unique_ptr<ChunkPath> {
            return std::make_unique<Path>(context);
          }};
}

// In order of precedence: the first path that takes a plan computes the chunk.
constexpr PathFactory kStored[] = {FactoryOf<SampledStoredPath>(), FactoryOf<FilteredStoredPath>(),
                                   FactoryOf<FusedStoredPath>(), FactoryOf<StoredPath>()};
constexpr PathFactory kRecomputed[] = {FactoryOf<DistilledRecomputedPath>(),
                                       FactoryOf<SampledRecomputedPath>(),
                                       FactoryOf<FilteredRecomputedPath>(), FactoryOf<RecomputedPath>()};

absl::Span<const PathFactory> FactoriesOf(const HeadConfig& config) {
  switch (config.logits) {
    case Logits::kStored:
      return kStored;
    case Logits::kRecomputed:
      return kRecomputed;
    case Logits::kNone:
      return {};
  }
  return {};
}

}  // namespace

HeadPaths::HeadPaths(const PathContext& context) : context_(context) {
  for (const PathFactory& factory : FactoriesOf(context_.config)) {
    paths_.push_back({factory.takes, factory.make(context_)});
  }
}

// The last path takes all plans that no other path takes.
ChunkPath& HeadPaths::For(const ChunkPlan& plan) {
  for (const Entry& entry : paths_) {
    if (entry.takes(plan)) return *entry.path;
  }
  return *paths_.back().path;
}

absl::StatusOr<std::vector<Choice>> HeadPaths::Describe(const ChunkPlan& plan) {
  absl::StatusOr<std::vector<Choice>> choices = For(plan).Describe(plan);
  if (!choices.ok()) return choices;
  for (const Entry& entry : paths_) {
    std::vector<Choice> memory = entry.path->DescribeMemory(plan);
    choices->insert(choices->end(), std::make_move_iterator(memory.begin()),
                    std::make_move_iterator(memory.end()));
  }
  return choices;
}

absl::Status HeadPaths::Tune(const void* hidden) {
  for (const Entry& entry : paths_) LOSSD_RETURN_IF_ERROR(entry.path->Tune(hidden));
  return absl::OkStatus();
}

}  // namespace lossd::kernels::cuda
