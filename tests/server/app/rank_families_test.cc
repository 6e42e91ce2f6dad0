// SPDX-License-Identifier: Apache-2.0
// Metrics of workers on the leader's page: what a worker would answer a scrape, with the label rank.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "server/app/server_parts.h"
#include "server/metrics/metrics.h"

namespace lossd::app::rank_families_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Text(const std::vector<prometheus::MetricFamily>& families) {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return out.str();
}

// On the way from a worker to the leader.
std::vector<prometheus::MetricFamily> Sent(const std::vector<prometheus::MetricFamily>& families) {
  return metrics::FromPlain(FromProto(ToProto(metrics::ToPlain(families))));
}

std::vector<prometheus::MetricFamily> GpuFamilies(const metrics::GpuMonitor& gpu) {
  return Sent(gpu.Collect());
}

class RankFamiliesTest : public ::testing::Test {
 protected:
  RankFamiliesTest() : library_(dlopen(LOSSD_FAKE_NVML, RTLD_NOW)) {
    EXPECT_NE(library_, nullptr) << dlerror();
    const auto set =
        reinterpret_cast<void (*)(const char*, unsigned long long)>(dlsym(library_, "fake_nvml_set"));
    set("power", 350'500);
    set("temperature", 61);
  }
  ~RankFamiliesTest() override { dlclose(library_); }

  static std::unique_ptr<metrics::GpuMonitor> PlayedGpu() {
    auto gpu = metrics::GpuMonitor::Start(
        {.library = LOSSD_FAKE_NVML, .uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"});
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    return *std::move(gpu);
  }

 private:
  void* const library_;
};

TEST_F(RankFamiliesTest, WhatAWorkerSendsIsWhatItWouldAnswerAScrape) {
  const std::vector<prometheus::MetricFamily> collected = PlayedGpu()->Collect();
  EXPECT_EQ(Text(Sent(collected)), Text(collected));
  EXPECT_THAT(Text(Sent(collected)), HasSubstr("lossd_gpu_xid_errors_total{gpu=\"GPU-0123"));
  std::vector<std::unique_ptr<metrics::GpuMonitor>> gpus;
  gpus.push_back(PlayedGpu());
  const std::string times = Text(metrics::FromPlain(FromProto(
      ToProto(metrics::WorkerFamilies({.busy = absl::Milliseconds(2500),
                                       .exchanges = {absl::Milliseconds(500), absl::ZeroDuration(),
                                                     absl::Milliseconds(250), absl::Milliseconds(125)}},
                                      gpus)))));
  EXPECT_THAT(times, HasSubstr("# TYPE lossd_rank_busy_seconds_total counter\n"
                               "lossd_rank_busy_seconds_total 2.5\n"));
  const std::string collectives = "lossd_rank_collective_seconds_total{operation=";
  EXPECT_THAT(times, HasSubstr(collectives + "\"sum_gradients\"} 0.5\n" + collectives +
                               "\"spread_values\"} 0\n" + collectives + "\"row_statistics\"} 0.25\n" +
                               collectives + "\"hidden_gradients\"} 0.125\n"));
  EXPECT_THAT(times, HasSubstr("lossd_gpu_power_watts{gpu=\"GPU-0123"));
}

TEST_F(RankFamiliesTest, AllRanksAreOnOnePage) {
  const auto gpu = PlayedGpu();
  std::vector<prometheus::MetricFamily> families;
  std::vector<metrics::RankReading> ranks(3);
  for (int rank = 1; rank < 3; ++rank) {
    metrics::RankReading& one = ranks[static_cast<size_t>(rank)];
    one.state.rank = rank;
    one.state.chunks = 1;
    one.state.rows = 20;
    one.state.traffic = kernels::RankTraffic{.sent_bytes = 300, .received_bytes = 4000};
    one.metrics = GpuFamilies(*gpu);
  }
  ranks[2].state.lost = true;
  ranks[0].state.rows = 7;
  ranks[0].metrics = metrics::RankTimeFamilies({.busy = absl::Seconds(3)});
  metrics::AddRankFamilies(ranks, &families);
  const std::string text = Text(families);
  EXPECT_THAT(text, HasSubstr("lossd_rank_up{rank=\"1\",host=\"\",device=\"\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("lossd_rank_up{rank=\"2\",host=\"\",device=\"\"} 0\n"));
  for (const char* const rank : {"1", "2"}) {
    const std::string label = std::string("{rank=\"") + rank + "\"";
    EXPECT_THAT(text, HasSubstr("lossd_rank_chunks_total" + label + "} 1\n"));
    EXPECT_THAT(text, HasSubstr("lossd_rank_rows_total" + label + "} 20\n"));
    EXPECT_THAT(text, HasSubstr("lossd_rank_sent_bytes_total" + label + "} 300\n"));
    EXPECT_THAT(text, HasSubstr("lossd_rank_received_bytes_total" + label + "} 4000\n"));
    EXPECT_THAT(text, HasSubstr("lossd_gpu_temperature_celsius" + label + ",gpu=\"GPU-0123"));
  }
  EXPECT_THAT(text, HasSubstr("lossd_rank_rows_total{rank=\"0\"} 7\n"));
  EXPECT_THAT(text, HasSubstr("lossd_rank_busy_seconds_total{rank=\"0\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("lossd_rank_collective_seconds_total{rank=\"0\",operation=\"sum_gradients\"}"));
  EXPECT_THAT(text, Not(HasSubstr("lossd_rank_sent_bytes_total{rank=\"0\"")));
  const std::string type = "# TYPE lossd_gpu_temperature_celsius";
  EXPECT_EQ(text.find(type), text.rfind(type)) << "one family";
}

TEST_F(RankFamiliesTest, TheLeadersGpusHaveTheLabelWhereThereAreSeveralRanks) {
  const auto gpu = PlayedGpu();
  metrics::Metrics metrics({});
  metrics.AttachGpus({gpu.get()});
  EXPECT_THAT(metrics.RenderText(), HasSubstr("lossd_gpu_power_watts{gpu="));
  metrics.Attach(nullptr, nullptr, [&gpu] {
    std::vector<metrics::RankReading> ranks(2);
    ranks[1].state.rank = 1;
    ranks[1].metrics = GpuFamilies(*gpu);
    return ranks;
  });
  EXPECT_THAT(metrics.RenderText(), HasSubstr("lossd_gpu_power_watts{rank=\"0\",gpu="));
  EXPECT_THAT(metrics.RenderText(), HasSubstr("lossd_gpu_power_watts{rank=\"1\",gpu="));
  metrics.Detach();
}

}  // namespace
}  // namespace lossd::app::rank_families_test
