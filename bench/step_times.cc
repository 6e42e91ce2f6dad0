// SPDX-License-Identifier: Apache-2.0
#include "bench/step_times.h"

#include <utility>
#include <vector>

#include "bench/gpu_group.h"
#include "bench/gpu_results.h"
#include "bench/gpu_timer.h"
#include "kernels/optimizer_options.h"

namespace lossd::bench {

nlohmann::json TimeSteps(const kernels::Backend& backend, kernels::HeadKernels& head, int count,
                         const std::function<void()>& accumulate) {
  constexpr int kUntimed = 2;
  const kernels::OptimizerOptions options = {.learning_rate = 1e-6};  // so that the rows stay what they are
  nlohmann::json exchanges;
  std::vector<double> times;
  for (int step = 1; step <= kUntimed + count; ++step) {
    accumulate();
    const ExchangeWatch watch(backend);
    const Clock::time_point begin = Clock::now();
    Check(head.GradNorm().status(), "GradNorm");
    Check(head.ApplyStep(options, step), "ApplyStep");
    if (step > kUntimed) times.push_back(SecondsSince(begin) * 1e3);
    exchanges = watch.PerOne(1);
  }
  return {{"norm_and_update", ToJson(Summarise(std::move(times)))}, {"exchanges", std::move(exchanges)}};
}

}  // namespace lossd::bench
