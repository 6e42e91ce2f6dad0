// SPDX-License-Identifier: Apache-2.0
// What the GPU benchmarks write: one JSON object that begins with the card, the date and the commit.
#ifndef LOSSD_BENCH_GPU_RESULTS_H_
#define LOSSD_BENCH_GPU_RESULTS_H_

#include <string>
#include <vector>

#include "bench/gpu_timer.h"
#include "kernels/choice.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

using Json = nlohmann::json;  // what results are collected in

// {"card", "date" (UTC), "commit", "copy_gbps" (measured now)}; prints the card and its bandwidth.
nlohmann::json StartResults(const std::string& commit, Timer& timer);

// {"median_ms", "min_ms", "max_ms"}
nlohmann::json ToJson(const Times& t);
// A list of {"what", "choice", "reason", "workspace_bytes"}.
nlohmann::json ToJson(const std::vector<kernels::Choice>& choices);

// Ends the program with an error where the file cannot be written. An empty path: nothing.
void WriteResults(const nlohmann::json& results, const std::string& path);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_GPU_RESULTS_H_
