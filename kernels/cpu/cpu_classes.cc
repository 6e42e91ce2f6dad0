// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_classes.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/class_exchange.h"
#include "kernels/cpu/cpu_parts.h"
#include "kernels/cpu/timed_exchange.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {

namespace {

using WrapExchange = absl::FunctionRef<std::shared_ptr<ClassExchange>(std::unique_ptr<ThreadExchange>)>;

absl::Status Join(absl::Span<HeadKernels* const> heads, WrapExchange wrap) {
  absl::StatusOr<std::vector<CpuHead*>> parts = CpuPartsOf(heads);
  if (!parts.ok()) return parts.status();
  for (CpuHead* head : *parts) {
    if (head->config().split != Split::kVocabulary) {
      return errors::FieldError("split", "be vocabulary", Name(head->config().split));
    }
  }
  const std::shared_ptr<ClassExchange> exchange =
      wrap(std::make_unique<ThreadExchange>(static_cast<int>(parts->size())));
  for (CpuHead* head : *parts) head->Join(exchange);
  return absl::OkStatus();
}

}  // namespace

absl::Status JoinCpuClasses(absl::Span<HeadKernels* const> heads) {
  return Join(heads, [](auto exchange) { return exchange; });
}

absl::Status JoinTimedCpuClasses(absl::Span<HeadKernels* const> heads,
                                 const std::shared_ptr<MemberExchanges>& clocks) {
  return Join(heads,
              [&](auto exchange) { return std::make_shared<TimedExchange>(std::move(exchange), clocks); });
}

}  // namespace lossd::kernels
