// SPDX-License-Identifier: Apache-2.0
#include "server/engine/step_ledgers.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace lossd::engine {
namespace {

void Append(std::vector<std::string> more, std::vector<std::string>& lines) {
  lines.insert(lines.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

}  // namespace

std::vector<std::string> StepLedgers::Missing(absl::Span<const uint64_t> ids) const {
  std::vector<std::string> lines;
  std::vector<uint64_t> of_microbatches;
  for (uint64_t id : ids) {
    if (!contributions.Contains(id)) {
      of_microbatches.push_back(id);
    } else if (!contributions.Complete(id)) {
      lines.push_back(contributions.DescribeMissing(id));
    }
  }
  Append(microbatches.Missing(of_microbatches), lines);
  return lines;
}

std::vector<std::string> StepLedgers::Incomplete(absl::Span<const uint64_t> ids) const {
  std::vector<std::string> lines = microbatches.Incomplete(ids);
  Append(contributions.Incomplete(ids), lines);
  return lines;
}

std::vector<uint64_t> StepLedgers::CompleteIds() const {
  const std::vector<uint64_t> of_microbatches = microbatches.CompleteIds();
  const std::vector<uint64_t> of_contributions = contributions.CompleteIds();
  std::vector<uint64_t> ids;
  std::merge(of_microbatches.begin(), of_microbatches.end(), of_contributions.begin(), of_contributions.end(),
             std::back_inserter(ids));
  return ids;
}

void StepLedgers::Clear() {
  microbatches.Clear();
  contributions.Clear();
}

}  // namespace lossd::engine
