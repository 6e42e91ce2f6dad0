// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/parallel_for.h"

#include <atomic>
#include <vector>

#include "gtest/gtest.h"

namespace lossd::kernels::parallel_for_test {
namespace {

TEST(ThreadPoolTest, CoversEveryIndexOnce) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t n : {0, 1, 2, 7, 8, 9, 1000}) {
      for (int64_t grain : {0, 1, 3, 5000}) {
        std::vector<int> hits(static_cast<size_t>(n), 0);
        std::atomic<int> calls = 0;
        pool.ParallelFor(n, grain, [&](int64_t begin, int64_t end) {
          ++calls;
          EXPECT_LT(begin, end);
          for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
        });
        EXPECT_EQ(hits, std::vector<int>(static_cast<size_t>(n), 1));
        EXPECT_LE(calls, threads);
        if (grain >= n) {
          EXPECT_EQ(calls, n > 0 ? 1 : 0);
        }
      }
    }
  }
}

TEST(ThreadPoolTest, ManyLoopsInARow) {
  ThreadPool pool(3);
  std::atomic<int64_t> total = 0;
  for (int i = 0; i < 2000; ++i) {
    pool.ParallelFor(3, 1, [&](int64_t begin, int64_t end) { total += end - begin; });
  }
  EXPECT_EQ(total, 6000);
}

}  // namespace
}  // namespace lossd::kernels::parallel_for_test
