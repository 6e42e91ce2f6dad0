// SPDX-License-Identifier: Apache-2.0
#include "bench/deferred_times.h"

#include <cstdint>
#include <random>

#include "absl/strings/str_format.h"
#include "bench/gpu_microbatch.h"
#include "bench/gpu_results.h"
#include "bench/gpu_timer.h"
#include "bench/loss_errors.h"

namespace lossd::bench {

Json TimeDeferred(kernels::Backend& backend, kernels::HeadKernels& head, const DataShape& shape,
                  const LossData& data, kernels::DType dtype, const kernels::LossOptions& options,
                  int iterations, bool errors) {
  const int64_t bytes = shape.rows * shape.hidden * static_cast<int64_t>(kernels::SizeOf(dtype));
  const Deferral deferral = {MakeRowGradients(shape, std::random_device{}()),
                             Take(backend.AllocateRetained(bytes), "AllocateRetained")};
  Microbatch retain(backend, head, shape, data, dtype, options, Call::kRetain, &deferral);
  Microbatch backward(backend, head, shape, data, dtype, options, Call::kBackward, &deferral);
  const int in_flight = backend.max_chunks_in_flight();
  retain.WarmUp(in_flight);
  Json result;
  result["retain"] = ToJson(Summarise(retain.Run(iterations + 1, in_flight)));
  Check(head.ZeroGradients(), "ZeroGradients");
  backward.Run(1, 1);
  result["choices"] = ToJson(backward.choices());
  if (errors) result["errors"] = MeasureErrors(head, backward, shape, data, &deferral.gradients, 0);
  backward.WarmUp(in_flight);
  result["backward"] = ToJson(Summarise(backward.Run(iterations + 1, in_flight)));
  return result;
}

std::string DeferredText(const Json& deferred) {
  const auto ms = [&](const char* call, const char* which) { return deferred[call][which].get<double>(); };
  return absl::StrFormat("  deferred: retain %6.2f  backward %6.2f [%.2f %.2f] x%.3f of loss+grad",
                         ms("retain", "median_ms"), ms("backward", "median_ms"), ms("backward", "min_ms"),
                         ms("backward", "max_ms"), deferred["backward_ratio"].get<double>());
}

}  // namespace lossd::bench
