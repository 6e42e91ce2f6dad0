// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/rank_metrics.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/metrics/families.h"

namespace lossd::metrics {
namespace {

using kernels::RankState;
using prometheus::MetricFamily;
using prometheus::MetricType;

// A counter of the ranks of which `value` says something.
void AddCounter(const std::vector<RankReading>& ranks, const char* name, const char* help,
                absl::FunctionRef<std::optional<int64_t>(const RankState&)> value,
                std::vector<MetricFamily>* families) {
  MetricFamily family = MakeFamily(name, help, MetricType::Counter);
  for (const RankReading& one : ranks) {
    const std::optional<int64_t> count = value(one.state);
    if (!count.has_value()) continue;
    AddSample(&family, {{"rank", absl::StrCat(one.state.rank)}}, static_cast<double>(*count));
  }
  families->push_back(std::move(family));
}

std::optional<int64_t> BytesOf(const RankState& rank, int64_t kernels::RankTraffic::*bytes) {
  return rank.traffic.has_value() ? std::optional(*rank.traffic.*bytes) : std::nullopt;
}

void AddWork(const std::vector<RankReading>& ranks, std::vector<MetricFamily>* families) {
  AddCounter(
      ranks, "lossd_rank_chunks_total", "Chunks, or parts of them, that a rank has computed.",
      [](const RankState& rank) { return rank.chunks; }, families);
  AddCounter(
      ranks, "lossd_rank_rows_total", "Rows of these.", [](const RankState& rank) { return rank.rows; },
      families);
  AddCounter(
      ranks, "lossd_rank_sent_bytes_total", "Bytes of messages from rank 0 to a worker.",
      [](const RankState& rank) { return BytesOf(rank, &kernels::RankTraffic::sent_bytes); }, families);
  AddCounter(
      ranks, "lossd_rank_received_bytes_total", "Bytes of messages from a worker to rank 0.",
      [](const RankState& rank) { return BytesOf(rank, &kernels::RankTraffic::received_bytes); }, families);
}

}  // namespace

std::vector<MetricFamily> RankTimeFamilies(const kernels::RankTimes& times) {
  MetricFamily collectives =
      MakeFamily("lossd_rank_collective_seconds_total",
                 "Of that, in exchanges with the other ranks and the wait for them, by what is exchanged.",
                 MetricType::Counter);
  for (size_t kind = 0; kind < kernels::kExchangeKinds; ++kind) {
    const auto operation = std::string(kernels::Name(static_cast<kernels::ExchangeKind>(kind)));
    AddSample(&collectives, {{"operation", operation}}, absl::ToDoubleSeconds(times.exchanges[kind]));
  }
  return {Single("lossd_rank_busy_seconds_total", "Time in which a rank had chunks or requests to do.",
                 MetricType::Counter, absl::ToDoubleSeconds(times.busy)),
          std::move(collectives)};
}

void AddRankLabel(int rank, std::vector<MetricFamily>* families) {
  for (MetricFamily& family : *families) {
    for (prometheus::ClientMetric& metric : family.metric)
      metric.label.insert(metric.label.begin(), {"rank", absl::StrCat(rank)});
  }
}

void AddRankFamilies(std::vector<RankReading> ranks, std::vector<MetricFamily>* families) {
  if (ranks.empty()) return;
  MetricFamily up = MakeFamily("lossd_rank_up", "1 while this rank is there, else 0.", MetricType::Gauge);
  MetricFamily memory =
      MakeFamily("lossd_rank_memory_bytes", "Planned memory in use, by rank and purpose.", MetricType::Gauge);
  MetricFamily peak = MakeFamily("lossd_rank_memory_peak_bytes",
                                 "Most planned memory of a rank since the start.", MetricType::Gauge);
  for (const RankReading& reading : ranks) {
    const RankState& one = reading.state;
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
  AddWork(ranks, families);
  const size_t own = families->size();
  for (RankReading& one : ranks) {
    AddRankLabel(one.state.rank, &one.metrics);
    AddFamilies(std::move(one.metrics), own, families);
  }
}

using prometheus::MetricFamily;
using prometheus::MetricType;

std::vector<PlainFamily> WorkerFamilies(const kernels::RankTimes& times,
                                        absl::Span<const std::unique_ptr<GpuMonitor>> gpus) {
  std::vector<MetricFamily> families = RankTimeFamilies(times);
  const size_t of_gpus = families.size();
  for (const std::unique_ptr<GpuMonitor>& gpu : gpus) {
    if (gpu != nullptr) AddFamilies(gpu->Collect(), of_gpus, &families);
  }
  return ToPlain(families);
}

std::vector<PlainFamily> ToPlain(const std::vector<MetricFamily>& families) {
  std::vector<PlainFamily> out;
  for (const MetricFamily& family : families) {
    out.push_back({.name = family.name, .help = family.help, .counter = family.type == MetricType::Counter});
    for (const prometheus::ClientMetric& metric : family.metric) {
      PlainFamily::Sample sample;
      sample.value = out.back().counter ? metric.counter.value : metric.gauge.value;
      for (const auto& [name, value] : metric.label) sample.labels.emplace_back(name, value);
      out.back().samples.push_back(std::move(sample));
    }
  }
  return out;
}

std::vector<MetricFamily> FromPlain(const std::vector<PlainFamily>& families) {
  std::vector<MetricFamily> out;
  for (const PlainFamily& family : families) {
    out.push_back(
        MakeFamily(family.name, family.help, family.counter ? MetricType::Counter : MetricType::Gauge));
    for (const PlainFamily::Sample& sample : family.samples) {
      AddSample(&out.back(), sample.labels, sample.value);
    }
  }
  return out;
}

}  // namespace lossd::metrics
