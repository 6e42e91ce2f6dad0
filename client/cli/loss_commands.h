// SPDX-License-Identifier: Apache-2.0
// The commands loss and bench, which options.h declares. This header has the functions that tests call
// directly: they sum up what a benchmark measured and print it. Pure functions.
//
// It is shorter than 60 lines because main.cc calls the commands alone.
#ifndef LOSSD_CLIENT_CLI_LOSS_COMMANDS_H_
#define LOSSD_CLIENT_CLI_LOSS_COMMANDS_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace lossd::cli {

// The quantile q in [0, 1]: the smallest value such that a share q of the values is not above it. `sorted` is
// ascending and not empty.
double SampleQuantile(absl::Span<const double> sorted, double q);

struct BenchSetup {
  std::string head;
  std::string data;  // "random" or "real"
  std::string what;  // "loss", "dx" or "all"
  std::string dtype;
  uint64_t hidden_size = 0;
  uint64_t rows = 0;  // per microbatch
  int in_flight = 1;
  int channels = 0;
  std::optional<uint64_t> slice_bytes;  // as the user asked for
  std::string transport = "grpc";       // client::TransportChoice
  std::string transport_reason = "";
  std::optional<int> gpu;            // the GPU that has the rows; nullopt: they are on the host
  std::string channels_reason = "";  // client::ConnectionChoice
};

struct BenchTotals {
  double seconds = 0;
  uint64_t rows = 0;
  uint64_t sent_bytes = 0;
  uint64_t received_bytes = 0;
  int streams = 0;  // the number of streams of the last microbatch
  uint64_t repeats = 0;
  double queue_seconds = 0;      // on the server, summed over slices
  double compute_seconds = 0;    // on the server, summed over slices
  double sampling_variance = 0;  // of sampled gradients: see client::LossResult
  double squared_gradient = 0;
  std::vector<double> latencies;  // seconds, one per microbatch
};

nlohmann::ordered_json BenchJson(const BenchSetup& setup, const BenchTotals& totals);
std::string BenchText(const BenchSetup& setup, const BenchTotals& totals);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_LOSS_COMMANDS_H_
