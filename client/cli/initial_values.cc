// SPDX-License-Identifier: Apache-2.0
#include "client/cli/initial_values.h"

#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <string>

namespace lossd::cli {

void AddInitialValues(CLI::App* command, InitialValues* values) {
  v1::TensorFile* const file = &values->file;
  const std::string group = "Initial values (default: --seed 0)";
  CLI::Option* seed =
      command->add_option("--seed", values->seed, "Uniform, as torch.nn.Linear's")->group(group);
  CLI::Option* zeros = command->add_flag("--zeros", values->zeros, "All zero")->group(group);
  CLI::Option* from = command
                          ->add_option("--from", *file->mutable_path(),
                                       "safetensors file, index (.json) or model folder below the server's "
                                       "checkpoint directory")
                          ->type_name("PATH")
                          ->group(group);
  seed->excludes(zeros)->excludes(from);
  zeros->excludes(from);
  const auto add_tensor = [&](const std::string& name, std::string* tensor, const std::string& description) {
    return command->add_option(name, *tensor, description)->type_name("TENSOR")->needs(from)->group(group);
  };
  from->needs(add_tensor("--weight", file->mutable_weight(),
                         "Tensor [V, D], e.g. lm_head.weight; if tied, the embedding's name"));
  add_tensor("--bias-tensor", file->mutable_bias(), "Tensor [V] in the file");
  add_tensor("--norm-gain-tensor", file->mutable_norm_gain(), "Tensor [D] in the file");
  add_tensor("--norm-shift-tensor", file->mutable_norm_shift(), "Tensor [D] in the file");
  add_tensor("--class-weights-tensor", file->mutable_class_weights(), "Tensor [V] in the file");
  command
      ->add_flag_function(
          "--allow-non-finite", [file](int64_t count) { file->set_allow_non_finite(count > 0); },
          "Take NaN and infinities that the file holds")
      ->needs(from)
      ->group(group);
}

}  // namespace lossd::cli
