// SPDX-License-Identifier: Apache-2.0
#include "client/cli/same_spec.h"

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/names.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

class Differences {
 public:
  template <typename T>
  void Compare(const std::string& field, const T& has, const T& wanted) {
    if (has == wanted) return;
    if (found_.empty()) first_ = {field, "must be what the head has", absl::StrCat(wanted)};
    found_.push_back(absl::StrCat(field, " ", has, " instead of ", wanted));
  }
  void Flag(const std::string& field, bool has, bool wanted) {
    Compare<std::string>(field, has ? "true" : "false", wanted ? "true" : "false");
  }
  // `unsaid`: what an enumeration's value stands for that is unspecified; also that of the head.
  template <typename E>
  void Word(const std::string& field, const std::map<std::string, E>& words, E has, E wanted, E unsaid) {
    if (static_cast<int>(wanted) == 0) return;
    Compare<std::string>(field, NameOf(words, static_cast<int>(has) == 0 ? unsaid : has),
                         NameOf(words, wanted));
  }

  absl::Status Status(const std::string& head) const {
    if (found_.empty()) return absl::OkStatus();
    return errors::WithViolation(absl::AlreadyExistsError(absl::StrCat(
                                     "head \"", head, "\" exists with ", absl::StrJoin(found_, ", "),
                                     "; ask for what it has, give another name, or delete it first")),
                                 first_);
  }

 private:
  std::vector<std::string> found_;
  errors::FieldViolation first_;
};

}  // namespace

absl::Status CheckSameSpec(const v1::HeadSpec& has, const v1::HeadSpec& wanted) {
  Differences differences;
  differences.Compare("spec.hidden_size", has.hidden_size(), wanted.hidden_size());
  differences.Compare("spec.vocab_size", has.vocab_size(), wanted.vocab_size());
  differences.Flag("spec.bias", has.bias(), wanted.bias());
  differences.Flag("spec.class_weights", has.class_weights(), wanted.class_weights());
  differences.Flag("spec.frozen", has.frozen(), wanted.frozen());
  differences.Word("spec.norm", Norms(), has.norm(), wanted.norm(), v1::NORM_NONE);
  if (wanted.has_norm_epsilon()) {
    differences.Compare("spec.norm_epsilon", has.has_norm_epsilon() ? has.norm_epsilon() : 1e-5f,
                        wanted.norm_epsilon());
  }
  differences.Word("spec.compute_dtype", DTypes(), has.compute_dtype(), wanted.compute_dtype(),
                   v1::DTYPE_FP32);
  differences.Word("spec.optimizer_state", OptimizerStates(), has.optimizer_state(), wanted.optimizer_state(),
                   v1::OPTIMIZER_STATE_ADAM);
  differences.Word("spec.logits", LogitsWords(), has.logits(), wanted.logits(), v1::LOGITS_STORED);
  differences.Word("spec.gradients", GradientsWords(), has.gradients(), wanted.gradients(),
                   v1::GRADIENTS_EXACT);
  if (wanted.workspace_bytes() > 0) {
    differences.Compare("spec.workspace_bytes", has.workspace_bytes(), wanted.workspace_bytes());
  }
  differences.Word("spec.split", Splits(), has.split(), wanted.split(), v1::SPLIT_UNSPECIFIED);
  return differences.Status(wanted.name());
}

}  // namespace lossd::cli
