// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "server/head/paths.h"

namespace lossd::head::parallel_test {
namespace {

TEST(RunInThreadsTest, EveryTaskOnce) {
  for (const int threads : {0, 1, 3, 8}) {
    for (const size_t tasks : {0, 1, 5, 200}) {
      std::vector<std::atomic<int>> runs(tasks);
      EXPECT_TRUE(RunInThreads(threads, tasks, [&](size_t task) {
                    ++runs[task];
                    return absl::OkStatus();
                  }).ok());
      for (const auto& count : runs) EXPECT_EQ(count, 1);
    }
  }
}

// Whichever thread is faster.
TEST(RunInThreadsTest, TheErrorOfTheLowestTask) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<size_t> begun{0};
    const absl::Status status = RunInThreads(4, 100, [&](size_t task) -> absl::Status {
      ++begun;
      if (task == 5) absl::SleepFor(absl::Milliseconds(1));
      return task < 5 ? absl::OkStatus() : absl::DataLossError(std::to_string(task));
    });
    EXPECT_EQ(status, absl::DataLossError("5"));
    EXPECT_LT(begun, 100u) << "went on after an error";
  }
}

}  // namespace
}  // namespace lossd::head::parallel_test
