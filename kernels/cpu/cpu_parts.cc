// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_parts.h"

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {

absl::StatusOr<std::vector<CpuHead*>> CpuPartsOf(absl::Span<HeadKernels* const> heads) {
  std::vector<CpuHead*> parts;
  for (HeadKernels* kernels : heads) {
    auto* const head = dynamic_cast<CpuHead*>(kernels);
    if (head == nullptr) return errors::FieldError("heads", "be heads of CPU backends", "another one");
    const Replica replica = head->params().replica();
    if (replica.index != static_cast<int>(parts.size()) || replica.count != static_cast<int>(heads.size())) {
      return errors::FieldError(absl::StrCat("heads[", parts.size(), "]"),
                                absl::StrCat("be replica ", parts.size(), " of ", heads.size()),
                                absl::StrCat("replica ", replica.index, " of ", replica.count));
    }
    if (!(head->config() == heads.front()->config())) {
      return errors::FieldError(absl::StrCat("heads[", parts.size(), "].config"), "be that of the first",
                                "another one");
    }
    parts.push_back(head);
  }
  return parts;
}

}  // namespace lossd::kernels
