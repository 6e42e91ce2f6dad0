// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/rank_metrics.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/metrics/families.h"

namespace lossd::metrics {

void AddRankFamilies(const std::vector<RankReading>& ranks, std::vector<prometheus::MetricFamily>* families) {
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
}

}  // namespace lossd::metrics
