// SPDX-License-Identifier: Apache-2.0
// What was measured on a card, for predictions: the file that bench/plan_data.py makes from bench/results.
// Plain data; thread-compatible.
#ifndef LOSSD_CLIENT_PLAN_MEASURED_H_
#define LOSSD_CLIENT_PLAN_MEASURED_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/head_config.h"
#include "kernels/loss_options.h"

namespace lossd::plan {

// Where a number comes from.
struct Source {
  std::string file;
  std::string date;
  std::string commit;  // or versions of packages; may be empty
};

struct Card {
  std::string name;
  int64_t memory_bytes = 0;
  int multiprocessors = 0;
  int clusters =
      0;  // that the logit pass runs with (kernels/cuda/device/device_limits.h); 0: it does not run
};

// Loss, dx and dW of one microbatch.
struct Timing {
  int64_t hidden = 0;
  int64_t vocab = 0;
  int64_t rows = 0;
  double ms = 0.0;
  size_t source = 0;  // index of Measured::sources
  std::string data;   // kind of rows: "real", "peaked", "flat"
};

struct LossTiming : Timing {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Gradients gradients = kernels::Gradients::kExact;
};

// Of a head in the trainer's own process.
struct LastStageTiming : Timing {
  std::string method;     // "torch", "compiled", "liger", "cce"
  double peak_mib = 0.0;  // above its inputs
};

// A pass over all parameters between steps.
struct PassRate {
  std::string name;  // "adamw bf16", "gradient norm"
  int64_t bytes_per_parameter = 0;
  double gbps = 0.0;
  size_t source = 0;
};

// A server and `lossctl bench` on one host.
struct TransportRate {
  std::string transport;  // "cuda_ipc", "shared_memory", "tcp", "unix"
  int connections = 1;
  double gigabytes_per_second = 0.0;  // of hidden states, and as much of gradients back
  double rows_per_second = 0.0;
  double kernels_rows_per_second = 0.0;  // of the kernels alone, on the same card
  double server_cores = 0.0;
  size_t source = 0;
};

// Rows per second of several GPUs over those of one.
struct DeviceSpeedup {
  kernels::Split split = kernels::Split::kRows;
  int devices = 0;
  double speedup = 0.0;
  size_t source = 0;
};

// A training run of a model in two stages.
struct PipelineRun {
  std::string head;  // "local", "lossd"
  std::string schedule;
  int stages = 0;
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t vocab = 0;
  int64_t microbatches = 0;  // of a step
  int64_t rows = 0;          // of a step
  double step_seconds = 0.0;
  std::vector<int64_t> peak_bytes;  // by stage
  size_t source = 0;
};

// Of a card whose times were not measured (cards.h): they lie between these factors of those of another card.
struct CardBounds {
  std::string measured_on;  // the other card's name
  double least = 1.0;
  double most = 1.0;
};

// A step of a pipeline in which every GPU counts, as bench/pipeline_bench.py measures it.
struct PipelineStep {
  std::string kind;       // "local", "server", "colocated"
  std::string gradients;  // of a server: "exact", "sampled"
  bool mps = false;       // colocated
  int64_t hidden = 0;
  int64_t vocab = 0;
  int64_t microbatches = 0;     // of a step
  int64_t microbatch_rows = 0;
  std::vector<int64_t> layers;  // of each stage
  std::vector<int64_t> shares;  // of the head, of each stage; empty: evenly
  double layer_seconds = 0.0;   // of one, forward and backward of a microbatch, alone
  double step_seconds = 0.0;
  std::vector<int64_t> peak_bytes;  // of each stage, the server's part left out
  size_t source = 0;
};

// What stages take in measured steps over what their parts take alone (pipeline.h), and how far steps are from
// what this predicts.
struct StepFactors {
  double layer = 1.0;
  double local_head = 1.0;
  struct Colocated {
    std::string gradients;
    bool mps = false;
    double factor = 1.0;
  };
  std::vector<Colocated> colocated;  // those that were measured
  double worst_error = 0.0;          // relative
};

struct Measured {
  Card card;
  std::optional<CardBounds> bounds;  // none: the times are of `card`
  std::vector<Source> sources;
  std::vector<LossTiming> loss;
  std::vector<LastStageTiming> last_stage;
  std::vector<PassRate> passes;
  std::vector<TransportRate> transports;
  std::vector<DeviceSpeedup> devices;
  std::vector<PipelineRun> pipelines;
  std::vector<PipelineStep> steps;
  StepFactors factors;
};

// INVALID_ARGUMENT saying where the text is not as bench/plan_data.py writes it.
absl::StatusOr<Measured> ParseMeasured(absl::string_view json);

// The text of client/plan/measured.json.
absl::string_view BuiltinMeasured();

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_MEASURED_H_
