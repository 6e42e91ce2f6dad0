// SPDX-License-Identifier: Apache-2.0
// The options that say which values a head begins with, for the commands that make or reset one.
#ifndef LOSSD_CLIENT_CLI_INITIAL_VALUES_H_
#define LOSSD_CLIENT_CLI_INITIAL_VALUES_H_

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>

#include "lossd/v1/head.pb.h"

namespace lossd::cli {

struct InitialValues {
  std::optional<uint64_t> seed;
  bool zeros = false;
  v1::TensorFile file;

  bool given() const { return seed.has_value() || zeros || !file.path().empty(); }

  // `request`: a CreateHeadRequest or ResetHeadRequest.
  template <typename Request>
  void SetIn(Request* request) const {
    if (zeros) {
      request->mutable_zeros();
    } else if (!file.path().empty()) {
      *request->mutable_tensor_file() = file;
    } else {
      request->mutable_kaiming_uniform()->set_seed(seed.value_or(0));
    }
  }
};

// --seed, --zeros, or --from with the names of tensors. `values` outlives the command.
void AddInitialValues(CLI::App* command, InitialValues* values);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_INITIAL_VALUES_H_
