// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/rank_metrics.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/metrics/families.h"

namespace lossd::metrics {

namespace {

void AddTraffic(const std::vector<RankReading>& ranks, std::vector<prometheus::MetricFamily>* families) {
  const auto add = [&](const char* name, const char* help, int64_t RankTraffic::*value) {
    prometheus::MetricFamily family = MakeFamily(name, help, prometheus::MetricType::Counter);
    for (const RankReading& one : ranks) {
      if (!one.traffic.has_value()) continue;
      AddSample(&family, {{"rank", absl::StrCat(one.rank)}}, static_cast<double>(*one.traffic.*value));
    }
    families->push_back(std::move(family));
  };
  add("lossd_rank_chunks_total", "Chunks, or parts of them, that a worker has computed.",
      &RankTraffic::chunks);
  add("lossd_rank_rows_total", "Rows of these.", &RankTraffic::rows);
  add("lossd_rank_sent_bytes_total", "Bytes of messages from rank 0 to a worker.", &RankTraffic::sent_bytes);
  add("lossd_rank_received_bytes_total", "Bytes of messages from a worker to rank 0.",
      &RankTraffic::received_bytes);
}

}  // namespace

void AddRankLabel(int rank, std::vector<prometheus::MetricFamily>* families) {
  for (prometheus::MetricFamily& family : *families) {
    for (prometheus::ClientMetric& metric : family.metric)
      metric.label.insert(metric.label.begin(), {"rank", absl::StrCat(rank)});
  }
}

void AddRankFamilies(std::vector<RankReading> ranks, std::vector<prometheus::MetricFamily>* families) {
  using prometheus::MetricType;
  if (ranks.empty()) return;
  prometheus::MetricFamily up =
      MakeFamily("lossd_rank_up", "1 while the process of this rank is there, else 0.", MetricType::Gauge);
  prometheus::MetricFamily memory =
      MakeFamily("lossd_rank_memory_bytes", "Planned memory in use, by rank and purpose.", MetricType::Gauge);
  prometheus::MetricFamily peak = MakeFamily(
      "lossd_rank_memory_peak_bytes", "Most planned memory of a rank since the start.", MetricType::Gauge);
  for (const RankReading& one : ranks) {
    const std::string rank = absl::StrCat(one.rank);
    AddSample(&up, {{"rank", rank}, {"host", one.host}, {"device", one.device}}, one.lost ? 0 : 1);
    AddSample(&peak, {{"rank", rank}}, static_cast<double>(one.memory.peak_total));
    for (size_t kind = 0; kind < kernels::kMemoryKinds; ++kind) {
      const auto name = std::string(kernels::Name(static_cast<kernels::MemoryKind>(kind)));
      AddSample(&memory, {{"rank", rank}, {"kind", name}},
                static_cast<double>(one.memory.current.by_kind[kind]));
    }
  }
  families->push_back(std::move(up));
  families->push_back(std::move(memory));
  families->push_back(std::move(peak));
  AddTraffic(ranks, families);
  const size_t own = families->size();
  for (RankReading& one : ranks) {
    AddRankLabel(one.rank, &one.metrics);
    AddFamilies(std::move(one.metrics), own, families);
  }
}

}  // namespace lossd::metrics
