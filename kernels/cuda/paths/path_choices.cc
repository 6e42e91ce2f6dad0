// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/path_choices.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/paths/filter_plan.h"

namespace lossd::kernels::cuda {

absl::Status DescribeGemm(Gemms& gemms, absl::string_view what, const GemmShape& shape,
                          std::vector<Choice>& choices) {
  LOSSD_RETURN_IF_ERROR(gemms.Prepare(shape));
  choices.push_back(gemms.Describe(shape));
  choices.back().what = std::string(what);
  return absl::OkStatus();
}

Choice FusedLogitsChoice(const DeviceLimits& limits) {
  return {.what = "logits product",
          .choice = absl::StrCat("with the loss, ", limits.fused_clusters, " clusters")};
}

Choice FilterChoice(const PathContext& context) {
  const FilterShape shape = FilterShapeOf(context.config, context.sizes);
  Carver own(nullptr), lists(nullptr);
  FilterBuffers::Carve(shape, own, lists, lists);
  const absl::string_view reason = WhyNotFilteredOnDevice(shape, context.device->limits());
  return {.what = "filtered gradients",
          .choice = reason.empty() ? "where asked for" : "never",
          .reason = std::string(reason),
          .workspace_bytes = own.used()};
}

}  // namespace lossd::kernels::cuda
