// SPDX-License-Identifier: Apache-2.0
#include "server/engine/group_decisions.h"

#include "kernels/decision.h"

namespace lossd::engine {

void GroupDecisions::Note(GroupKey group, const kernels::Chunk& chunk) {
  const kernels::LossOptions& asked = chunk.options;
  decided_.erase(group);  // it may have been computed before, with other rows that were not finite
  if (kernels::AsDecided(asked, chunk.gradients, chunk.sample_threshold) == asked) return;
  if (decided_.size() < kMostGroups) decided_[group] = {chunk.gradients, chunk.sample_threshold};
}

kernels::LossOptions GroupDecisions::For(GroupKey group, const kernels::LossOptions& asked) const {
  const auto it = decided_.find(group);
  if (it == decided_.end()) return asked;
  return kernels::AsDecided(asked, it->second.gradients, it->second.sample_threshold);
}

}  // namespace lossd::engine
