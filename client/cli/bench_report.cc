// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"

namespace lossd::cli {
namespace {

// Rates and means of a run.
struct Summary {
  explicit Summary(const BenchTotals& totals) : sorted(totals.latencies) {
    std::sort(sorted.begin(), sorted.end());
    if (totals.seconds > 0) {
      rows = static_cast<double>(totals.rows) / totals.seconds;
      sent = static_cast<double>(totals.sent_bytes) / totals.seconds;
      received = static_cast<double>(totals.received_bytes) / totals.seconds;
    }
    if (sorted.empty()) sorted = {0};
    const double count = std::max<double>(1, static_cast<double>(totals.latencies.size()));
    mean = std::accumulate(sorted.begin(), sorted.end(), 0.0) / count;
    queue = totals.queue_seconds / count;
    compute = totals.compute_seconds / count;
    if (totals.squared_gradient > 0) error = std::sqrt(totals.sampling_variance / totals.squared_gradient);
  }

  double rows = 0, sent = 0, received = 0;  // per second
  double mean = 0, queue = 0, compute = 0;  // seconds per microbatch
  double error = 0;                         // predicted, of sampled gradients
  std::vector<double> sorted;
};

}  // namespace

double SampleQuantile(absl::Span<const double> sorted, double q) {
  const double rank = std::ceil(q * static_cast<double>(sorted.size()));
  return sorted[static_cast<size_t>(std::clamp(rank, 1.0, static_cast<double>(sorted.size()))) - 1];
}

nlohmann::ordered_json BenchJson(const BenchSetup& setup, const BenchTotals& totals) {
  const Summary summary(totals);
  return {
      {"head", setup.head},
      {"data", setup.data},
      {"what", setup.what},
      {"dtype", setup.dtype},
      {"hidden_size", setup.hidden_size},
      {"rows_per_microbatch", setup.rows},
      {"in_flight", setup.in_flight},
      {"channels", setup.channels},
      {"channels_reason", setup.channels_reason},
      {"streams", totals.streams},
      {"slice_bytes", setup.slice_bytes.has_value() ? nlohmann::ordered_json(*setup.slice_bytes) : nullptr},
      {"transport", setup.transport},
      {"transport_reason", setup.transport_reason},
      {"gpu", setup.gpu.has_value() ? nlohmann::ordered_json(*setup.gpu) : nullptr},
      {"seconds", totals.seconds},
      {"microbatches", totals.latencies.size()},
      {"rows", totals.rows},
      {"rows_per_second", summary.rows},
      {"sent_bytes_per_second", summary.sent},
      {"received_bytes_per_second", summary.received},
      {"latency_seconds",
       {{"mean", summary.mean},
        {"p50", SampleQuantile(summary.sorted, 0.5)},
        {"p90", SampleQuantile(summary.sorted, 0.9)},
        {"p99", SampleQuantile(summary.sorted, 0.99)},
        {"max", summary.sorted.back()}}},
      {"server_seconds_per_microbatch", {{"queue", summary.queue}, {"compute", summary.compute}}},
      {"repeats", totals.repeats},
      {"gradient_error", summary.error}};
}

std::string BenchText(const BenchSetup& setup, const BenchTotals& totals) {
  const Summary summary(totals);
  const auto quantile = [&summary](double q) { return HumanSeconds(SampleQuantile(summary.sorted, q)); };
  FieldList fields;
  fields.Add("head", absl::StrCat(setup.head, ", D = ", HumanCount(setup.hidden_size), ", ", setup.dtype));
  fields.Add("computed", setup.what == "loss" ? "loss"
                         : setup.what == "dx" ? "loss and dL/dx"
                                              : "loss, dL/dx and dL/dW");
  fields.Add(
      "load",
      absl::StrCat(setup.in_flight, " x ", HumanCount(setup.rows), " ", setup.data, " rows in flight, ",
                   totals.streams, " streams over ", setup.channels, " channels",
                   setup.slice_bytes.has_value()
                       ? absl::StrCat(", slices of ", HumanBytes(static_cast<double>(*setup.slice_bytes)))
                       : ""));
  fields.Add("transport", setup.transport_reason.empty()
                              ? setup.transport
                              : absl::StrCat(setup.transport, " (", setup.transport_reason, ")"));
  if (!setup.channels_reason.empty())
    fields.Add("channels", absl::StrCat(setup.channels, " (", setup.channels_reason, ")"));
  fields.Add("ran", absl::StrCat(HumanSeconds(totals.seconds), ", ", HumanCount(totals.latencies.size()),
                                 " microbatches",
                                 totals.repeats > 0 ? absl::StrCat(", ", totals.repeats, " repeats") : ""));
  fields.Add("throughput", absl::StrCat(HumanRate(summary.rows), " rows/s"));
  fields.Add("transfer",
             absl::StrFormat("%.3f GB/s there, %.3f GB/s back", summary.sent / 1e9, summary.received / 1e9));
  fields.Add("latency", absl::StrCat("p50 ", quantile(0.5), ", p90 ", quantile(0.9), ", p99 ", quantile(0.99),
                                     ", max ", quantile(1)));
  fields.Add("server", absl::StrCat("per microbatch, summed over slices: queue ", HumanSeconds(summary.queue),
                                    ", device ", HumanSeconds(summary.compute)));
  if (summary.error > 0) fields.Add("gradients", absl::StrFormat("predicted error %.2g", summary.error));
  return fields.ToString();
}

}  // namespace lossd::cli
