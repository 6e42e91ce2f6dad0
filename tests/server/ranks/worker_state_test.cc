// SPDX-License-Identifier: Apache-2.0
// What the leader knows of a worker: memory, traffic, metrics.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/ranks/worker_stream.h"
#include "tests/server/ranks/worker_stream_fixture.h"

namespace lossd::ranks::worker_state_test {
namespace {

using testing::kHidden;
using testing::kRows;
using testing::kSlices;
using testing::WorkerStreamTest;

// Chunks take memory of a worker too, and steps may be far between.
TEST_F(WorkerStreamTest, MemoryIsWhatTheWorkerSaidLastWithChunksToo) {
  Submit();
  Say(SliceResults(1, 0));
  Say(SliceResults(1, 1));
  Say(Results(1));
  v1::FromWorker done = Done(1);
  done.mutable_done()->mutable_memory()->set_peak_total(77);
  Say(done);
  worker_.AwaitHeard();
  EXPECT_EQ(stream_.memory().peak_total, 77);
  EXPECT_EQ(stream_.report().state.memory.peak_total, 77);
}

TEST_F(WorkerStreamTest, TrafficIsCounted) {
  Submit();
  Say(SliceResults(1, 0));
  Say(SliceResults(1, 1));
  Say(Results(1));
  Say(Done(1));
  worker_.AwaitHeard();
  const kernels::RankState once = stream_.report().state;
  EXPECT_EQ(once.chunks, 1);
  EXPECT_EQ(once.rows, kSlices * kRows);
  const int64_t payload = kSlices * kRows * kHidden * sizeof(float);
  ASSERT_TRUE(once.traffic.has_value());
  EXPECT_GT(once.traffic->sent_bytes, payload);
  EXPECT_GT(once.traffic->received_bytes, payload);
  EXPECT_LT(once.traffic->sent_bytes, payload + 400);
  EXPECT_LT(once.traffic->received_bytes, payload + 400);
  Submit();  // number 2, which fails
  v1::FromWorker failed = Results(2);
  failed.mutable_results()->mutable_status()->set_code(static_cast<int>(absl::StatusCode::kInternal));
  Say(failed);
  v1::FromWorker done = Done(2);
  done.mutable_done()->mutable_status()->set_code(static_cast<int>(absl::StatusCode::kInternal));
  Say(done);
  worker_.AwaitHeard();
  const kernels::RankState twice = stream_.report().state;
  EXPECT_EQ(twice.chunks, 1);
  EXPECT_EQ(twice.rows, once.rows);
  ASSERT_TRUE(twice.traffic.has_value());
  EXPECT_EQ(twice.traffic->sent_bytes, 2 * once.traffic->sent_bytes);
}

v1::FromWorker MetricsWith(const std::string& help) {
  v1::FromWorker message;
  v1::MetricFamily* const family = message.mutable_metrics()->add_families();
  family->set_name("lossd_something");
  family->set_help(help);
  return message;
}

TEST_F(WorkerStreamTest, MetricsAreThoseThatCameLast) {
  EXPECT_EQ(stream_.report().metrics.families_size(), 0);
  Say(MetricsWith("first"));
  Say(MetricsWith("second"));
  worker_.AwaitHeard();
  const v1::Metrics metrics = stream_.report().metrics;
  ASSERT_EQ(metrics.families_size(), 1);
  EXPECT_EQ(metrics.families(0).help(), "second");
}

TEST_F(WorkerStreamTest, MoreMetricsThanThereCanBeAreALoss) {
  Submit();
  Say(MetricsWith(std::string(kMostMetricsBytes, 'x')));
  ExpectLost("too many metrics");
}

}  // namespace
}  // namespace lossd::ranks::worker_state_test
