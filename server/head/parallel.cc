// SPDX-License-Identifier: Apache-2.0
#include "server/head/parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace lossd::head {

absl::Status RunInThreads(int threads, size_t tasks, absl::FunctionRef<absl::Status(size_t)> task) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<absl::Status> results(tasks);
  const auto work = [&] {
    while (!failed) {
      const size_t number = next++;
      if (number >= tasks) return;
      results[number] = task(number);
      if (!results[number].ok()) failed = true;
    }
  };
  std::vector<std::thread> others;
  const size_t wanted = std::min(tasks, static_cast<size_t>(std::max(threads, 1)));
  try {
    for (size_t i = 1; i < wanted; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads; those that there are do it all.
  }
  work();
  for (std::thread& other : others) other.join();
  for (absl::Status& result : results) {
    if (!result.ok()) return result;
  }
  return absl::OkStatus();
}

}  // namespace lossd::head
