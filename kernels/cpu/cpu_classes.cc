// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_classes.h"

#include <memory>
#include <vector>

#include "kernels/cpu/class_exchange.h"
#include "kernels/cpu/cpu_parts.h"
#include "kernels/cpu/timed_exchange.h"
#include "kernels/errors/field_error.h"
#include "kernels/shard_rows.h"

namespace lossd::kernels {

absl::Status JoinCpuClasses(absl::Span<HeadKernels* const> heads) {
  return JoinTimedCpuClasses(heads, std::make_shared<MemberExchanges>(static_cast<int>(heads.size())));
}

absl::Status JoinTimedCpuClasses(absl::Span<HeadKernels* const> heads,
                                 const std::shared_ptr<MemberExchanges>& clocks) {
  absl::StatusOr<std::vector<CpuHead*>> parts = CpuPartsOf(heads);
  if (!parts.ok()) return parts.status();
  for (CpuHead* head : *parts) {
    if (head->config().split != Split::kVocabulary) {
      return errors::FieldError("split", "be vocabulary", Name(head->config().split));
    }
  }
  const int heads_of_all = static_cast<int>(parts->size());
  const int places = PlacesOf(parts->front()->config(), heads_of_all);
  for (int first = 0; first < heads_of_all; first += places) {
    const auto exchange =
        std::make_shared<TimedExchange>(std::make_unique<ThreadExchange>(places), clocks, first);
    for (int i = 0; i < places; ++i) (*parts)[static_cast<size_t>(first + i)]->Join(exchange);
  }
  return absl::OkStatus();
}

}  // namespace lossd::kernels
