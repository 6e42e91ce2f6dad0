// SPDX-License-Identifier: Apache-2.0
// Deterministic mode: how the groups of a step were computed, so that a repeat of some of their rows is
// computed in the same way.
//
// A group may decide itself how its gradients are computed (kernels/decision.h), by all its rows. A repeat
// that brings only some of the rows could decide otherwise, and give other bits.
//
// Plain state without locks; the engine's lock guards it.
#ifndef LOSSD_SERVER_ENGINE_GROUP_DECISIONS_H_
#define LOSSD_SERVER_ENGINE_GROUP_DECISIONS_H_

#include <cstddef>
#include <map>

#include "kernels/backend.h"
#include "kernels/loss_options.h"
#include "server/engine/group_assembly.h"

namespace lossd::engine {

class GroupDecisions {
 public:
  // About 4 MiB. Repeats of groups beyond these decide by the rows that they bring.
  static constexpr size_t kMostGroups = size_t{1} << 16;

  // The whole group was computed as this chunk to be accumulated.
  void Note(GroupKey group, const kernels::Chunk& chunk);
  // Options for a part of the group: those asked for, with what the whole group has decided.
  kernels::LossOptions For(GroupKey group, const kernels::LossOptions& asked) const;
  // The step is over.
  void Clear() { decided_.clear(); }

 private:
  struct Decided {
    kernels::Gradients gradients = kernels::Gradients::kExact;
    float sample_threshold = 0.0f;
  };
  std::map<GroupKey, Decided> decided_;  // of groups that were not computed as asked for
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_GROUP_DECISIONS_H_
