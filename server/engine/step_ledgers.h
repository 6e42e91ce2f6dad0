// SPDX-License-Identifier: Apache-2.0
// What has been accumulated in the open step of one head: the rows of microbatches, and those of gradient
// contributions. A microbatch and a contribution never have the same id in one step.
//
// Plain state without threads or lock; the engine's lock guards it.
#ifndef LOSSD_SERVER_ENGINE_STEP_LEDGERS_H_
#define LOSSD_SERVER_ENGINE_STEP_LEDGERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/contribution_ledger.h"
#include "server/engine/ledger.h"
#include "server/engine/row_memory.h"

namespace lossd::engine {

struct StepLedgers {
  // The limits hold for each of the two, and `memory` pays for both.
  StepLedgers(int64_t max_rows, int64_t max_microbatches, const RowMemory::Account& memory)
      : microbatches(max_rows, max_microbatches, memory), contributions(max_rows, max_microbatches, memory) {}

  // A line for each of the ids that is not complete.
  std::vector<std::string> Missing(absl::Span<const uint64_t> ids) const;
  // A line for each microbatch or contribution outside `ids` that was begun and is not complete.
  std::vector<std::string> Incomplete(absl::Span<const uint64_t> ids) const;
  // Of microbatches and contributions, ascending.
  std::vector<uint64_t> CompleteIds() const;
  // Empties both, which give their memory back.
  void Clear();

  Ledger microbatches;
  ContributionLedger contributions;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STEP_LEDGERS_H_
