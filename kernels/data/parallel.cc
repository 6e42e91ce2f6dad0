// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/parallel.h"

#include <algorithm>
#include <thread>
#include <vector>

namespace lossd::data {

void InParallel(int64_t begin, int64_t end, absl::FunctionRef<void(int64_t from, int64_t to)> work) {
  const int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 64);
  std::vector<std::jthread> running;
  for (int64_t t = 0; t < threads; ++t) {
    running.emplace_back([work, from = begin + (end - begin) * t / threads,
                          to = begin + (end - begin) * (t + 1) / threads] { work(from, to); });
  }
}

}  // namespace lossd::data
