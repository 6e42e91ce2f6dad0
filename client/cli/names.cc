// SPDX-License-Identifier: Apache-2.0
#include "client/cli/names.h"

namespace lossd::cli {

const std::map<std::string, v1::DType>& DTypes() {
  static const auto* words = new std::map<std::string, v1::DType>{
      {"fp32", v1::DTYPE_FP32}, {"fp16", v1::DTYPE_FP16}, {"bf16", v1::DTYPE_BF16}};
  return *words;
}

const std::map<std::string, v1::Norm>& Norms() {
  static const auto* words = new std::map<std::string, v1::Norm>{
      {"none", v1::NORM_NONE}, {"layernorm", v1::NORM_LAYERNORM}, {"rmsnorm", v1::NORM_RMSNORM}};
  return *words;
}

const std::map<std::string, v1::OptimizerState>& OptimizerStates() {
  static const auto* words =
      new std::map<std::string, v1::OptimizerState>{{"none", v1::OPTIMIZER_STATE_NONE},
                                                    {"momentum", v1::OPTIMIZER_STATE_MOMENTUM},
                                                    {"adam", v1::OPTIMIZER_STATE_ADAM}};
  return *words;
}

const std::map<std::string, v1::Param>& Params() {
  static const auto* words = new std::map<std::string, v1::Param>{{"weight", v1::PARAM_WEIGHT},
                                                                  {"bias", v1::PARAM_BIAS},
                                                                  {"norm-gain", v1::PARAM_NORM_GAIN},
                                                                  {"norm-shift", v1::PARAM_NORM_SHIFT},
                                                                  {"class-weights", v1::PARAM_CLASS_WEIGHTS}};
  return *words;
}

const std::map<std::string, v1::Role>& Roles() {
  static const auto* words = new std::map<std::string, v1::Role>{{"value", v1::ROLE_VALUE},
                                                                 {"gradient", v1::ROLE_GRADIENT},
                                                                 {"moment1", v1::ROLE_MOMENT1},
                                                                 {"moment2", v1::ROLE_MOMENT2}};
  return *words;
}

const std::map<std::string, v1::Logits>& LogitsWords() {
  static const auto* words = new std::map<std::string, v1::Logits>{{"stored", v1::LOGITS_STORED},
                                                                   {"recomputed", v1::LOGITS_RECOMPUTED}};
  return *words;
}

const std::map<std::string, v1::Split>& Splits() {
  static const auto* words = new std::map<std::string, v1::Split>{
      {"any", v1::SPLIT_UNSPECIFIED}, {"rows", v1::SPLIT_ROWS}, {"vocabulary", v1::SPLIT_VOCABULARY}};
  return *words;
}

const std::map<std::string, v1::Gradients>& GradientsWords() {
  static const auto* words = new std::map<std::string, v1::Gradients>{{"exact", v1::GRADIENTS_EXACT},
                                                                      {"filtered", v1::GRADIENTS_FILTERED},
                                                                      {"sampled", v1::GRADIENTS_SAMPLED},
                                                                      {"auto", v1::GRADIENTS_AUTO}};
  return *words;
}

const std::map<std::string, v1::Reduction>& Reductions() {
  static const auto* words = new std::map<std::string, v1::Reduction>{
      {"sum", v1::REDUCTION_SUM}, {"none", v1::REDUCTION_NONE}, {"mean", v1::REDUCTION_MEAN}};
  return *words;
}

}  // namespace lossd::cli
