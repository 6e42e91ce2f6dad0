// SPDX-License-Identifier: Apache-2.0
#include "server/head/checkpoint.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::head {
namespace {

template <typename T>
absl::Status CheckSame(absl::string_view field, const T& saved, const T& head) {
  if (saved == head) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the checkpoint has ", field, " ", saved, ", the head has ", head));
}

}  // namespace

absl::Status CheckLoadable(const kernels::HeadConfig& saved, const kernels::HeadConfig& head) {
  const absl::Status checks[] = {
      CheckSame("hidden_size", saved.hidden_size, head.hidden_size),
      CheckSame("vocab_size", saved.vocab_size, head.vocab_size),
      CheckSame("bias", saved.has_bias, head.has_bias),
      CheckSame("class_weights", saved.has_class_weights, head.has_class_weights),
      CheckSame("norm", Name(saved.norm), Name(head.norm)),
      CheckSame("norm_epsilon", saved.norm_epsilon, head.norm_epsilon),
      CheckSame("optimizer_state", Name(saved.optimizer_state), Name(head.optimizer_state)),
      CheckSame("frozen", !saved.trainable, !head.trainable),
  };
  for (const absl::Status& check : checks) {
    if (!check.ok()) return check;
  }
  return absl::OkStatus();
}

std::string AutomaticName(uint64_t step) { return absl::StrFormat("step-%010d", step); }

}  // namespace lossd::head
