// SPDX-License-Identifier: Apache-2.0
// Starts the JSON results of the GPU benchmarks, converts times to JSON, and writes the file (gpu_timer.h).
#include "bench/gpu_timer.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>

#include "absl/strings/str_format.h"

namespace lossd::bench {
namespace {

std::string Today() {
  const std::time_t now = std::time(nullptr);
  char text[16] = {};
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  return text;
}

}  // namespace

nlohmann::json StartResults(const std::string& commit, Timer& timer) {
  cudaDeviceProp properties = {};
  Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const double copy_gbps = CopyBandwidth(timer);
  std::cout << absl::StrFormat("%s, copy %.0f GB/s (read + write)", properties.name, copy_gbps) << std::endl;
  return {{"card", properties.name}, {"date", Today()}, {"commit", commit}, {"copy_gbps", copy_gbps}};
}

nlohmann::json ToJson(const Times& t) {
  return {{"median_ms", t.median}, {"min_ms", t.min}, {"max_ms", t.max}};
}

nlohmann::json ToJson(const std::vector<kernels::Choice>& choices) {
  nlohmann::json list = nlohmann::json::array();
  for (const kernels::Choice& choice : choices) {
    list.push_back({{"what", choice.what},
                    {"choice", choice.choice},
                    {"reason", choice.reason},
                    {"workspace_bytes", choice.workspace_bytes}});
  }
  return list;
}

void WriteResults(const nlohmann::json& results, const std::string& path) {
  if (path.empty()) return;
  std::ofstream file(path);
  file << results.dump(1) << std::endl;
  if (file) return;
  std::cerr << "--out: cannot write " << path << std::endl;
  std::exit(1);
}

}  // namespace lossd::bench
