// SPDX-License-Identifier: Apache-2.0
// Words for the protocol's enumerations: as printed, as in JSON and as taken by flags. Thread-safe.
#ifndef LOSSD_CLIENT_CLI_NAMES_H_
#define LOSSD_CLIENT_CLI_NAMES_H_

#include <map>
#include <string>

#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::cli {

const std::map<std::string, v1::DType>& DTypes();                    // fp32, fp16, bf16
const std::map<std::string, v1::Norm>& Norms();                      // none, layernorm, rmsnorm
const std::map<std::string, v1::OptimizerState>& OptimizerStates();  // none, momentum, adam
const std::map<std::string, v1::Param>& Params();                    // weight, bias, norm-gain, ...
const std::map<std::string, v1::Role>& Roles();                      // value, gradient, moment1, moment2
const std::map<std::string, v1::Logits>& LogitsWords();              // stored, recomputed
const std::map<std::string, v1::Split>& Splits();                    // any, rows, vocabulary
const std::map<std::string, v1::Gradients>& GradientsWords();        // exact, filtered, sampled, auto
const std::map<std::string, v1::Reduction>& Reductions();            // sum, mean, none

// The word for a value; "unspecified" for one without.
template <typename E>
std::string NameOf(const std::map<std::string, E>& words, E value) {
  for (const auto& [word, meaning] : words) {
    if (meaning == value) return word;
  }
  return "unspecified";
}

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_NAMES_H_
