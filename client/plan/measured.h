// SPDX-License-Identifier: Apache-2.0
// Measured: the times and rates that were measured on one card, which bench/plan_data.py writes from
// bench/results. OnCard derives bounds for another card from them, and EstimateTime predicts the time of
// another shape.
//
// Plain data and pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_MEASURED_H_
#define LOSSD_CLIENT_PLAN_MEASURED_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/head_config.h"

namespace lossd::plan {

// Where a measured number comes from.
struct Source {
  std::string file;
  std::string date;
  std::string commit;  // or the versions of packages; may be empty
};

struct Card {
  std::string name;
  int64_t memory_bytes = 0;
  int multiprocessors = 0;
  // The number of clusters with which the logit pass runs (kernels/cuda/device/device_limits.h); 0: it does
  // not run on the card.
  int clusters = 0;
};

// The time of one microbatch: loss, dx and dW.
struct Timing {
  int64_t hidden = 0;
  int64_t vocab = 0;
  int64_t rows = 0;
  double ms = 0.0;
  size_t source = 0;  // the index in Measured::sources
  std::string data;   // the kind of rows: "real", "peaked", "flat"
};

struct LossTiming : Timing {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Gradients gradients = kernels::Gradients::kExact;
};

// The time of a head in the trainer's own process.
struct LastStageTiming : Timing {
  std::string method;     // "torch", "compiled", "liger", "cce"
  double peak_mib = 0.0;  // above the memory of its inputs
};

// The rate of a pass over all parameters between steps.
struct PassRate {
  std::string name;  // "adamw bf16", "gradient norm"
  int64_t bytes_per_parameter = 0;
  double gbps = 0.0;
  size_t source = 0;
};

// The rates of `lossctl bench` with a server on the same host.
struct TransportRate {
  std::string transport;  // "cuda_ipc", "shared_memory", "tcp", "unix"
  int connections = 1;
  double gigabytes_per_second = 0.0;  // the rate of hidden states; gradients come back at the same rate
  double rows_per_second = 0.0;
  double kernels_rows_per_second = 0.0;  // the rate of the kernels alone, without a server, on the same card
  double server_cores = 0.0;
  size_t source = 0;
};

// The rows per second of several GPUs, divided by the rows per second of one GPU.
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
  int64_t microbatches = 0;  // the microbatches of a step
  int64_t rows = 0;          // the rows of a step
  double step_seconds = 0.0;
  std::vector<int64_t> peak_bytes;  // the peak memory of each stage
  size_t source = 0;
};

// Bounds for a card whose times were not measured: its times lie between `least` and `most` times those of
// another card.
struct CardBounds {
  std::string measured_on;  // the other card's name
  double least = 1.0;
  double most = 1.0;
};

// One step of a pipeline, as bench/pipeline_bench.py measures it. It counts every GPU, also the server's.
struct PipelineStep {
  std::string kind;       // "local", "server", "colocated"
  std::string gradients;  // only with a head on a server: "exact", "sampled"
  bool mps = false;       // only colocated: trainer and server run at the same time (CUDA MPS)
  int64_t hidden = 0;
  int64_t vocab = 0;
  int64_t microbatches = 0;  // the microbatches of a step
  int64_t microbatch_rows = 0;
  std::vector<int64_t> layers;  // the number of layers of each stage
  std::vector<int64_t> shares;  // the share of the head that each stage has; empty: equal shares
  double layer_seconds = 0.0;   // the time of one layer alone, forward and backward of a microbatch
  double step_seconds = 0.0;
  std::vector<int64_t> peak_bytes;  // the peak memory of each stage, without what the server takes there
  size_t source = 0;
};

// Measured step times divided by the times of their parts alone (the formulas are in plan.h), and the
// relative error of the steps that these factors predict.
struct StepFactors {
  double layer = 1.0;
  double local_head = 1.0;
  struct Colocated {
    std::string gradients;
    bool mps = false;
    double factor = 1.0;
  };
  std::vector<Colocated> colocated;  // only the kinds that were measured
  double worst_error = 0.0;          // the largest relative error of a predicted step
};

// Everything that was measured on one card.
struct Measured {
  Card card;
  std::optional<CardBounds> bounds;  // none: the times were measured on `card` itself
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

// Reads what bench/plan_data.py writes. INVALID_ARGUMENT says where the text differs from that form.
absl::StatusOr<Measured> ParseMeasured(absl::string_view json);

// The text of client/plan/measured.json, which is part of the program.
absl::string_view BuiltinMeasured();

// The rest of this file predicts times that were not measured. First, bounds on the times of a card that was
// not measured, from its data sheet and the data sheet of a card that was.
//
// At every moment a kernel is limited either by arithmetic or by memory. So its time on another card that
// runs the same code lies between two factors: the quotient of the cards' arithmetic rates, and the quotient
// of their memory bandwidths. This is true if both cards come equally near to their data sheets; a card that
// must lower its clock to stay within its power limit is slower. Only Hopper cards are listed, because other
// cards run other kernels (docs/kernels/README.md).

// The names that OnCard takes: "h100-nvl", "h100-sxm", "h200".
std::vector<std::string> CardNames();

// What is known of the card `name`. If it is the card that was measured, `measured` stays as it is. Otherwise
// the result has Measured::bounds, and leaves out what says nothing about another card: the speedup of
// several GPUs, and the transport through GPU memory that is shared with trainers. INVALID_ARGUMENT naming
// the field "card" if `name` is not one of CardNames(), or if no data sheet of the measured card is known.
absl::StatusOr<Measured> OnCard(Measured measured, absl::string_view name);

// How a time is known. Nothing is known of microbatches with fewer than kLeastRows rows. For others,
// EstimateTime uses the first of these rules that applies:
//   - kMeasured: the shape was measured. Its time is in proportion to the rows.
//   - kLikeShapes: the measured shapes predict each other. When each of them is left out in turn, the others
//     predict its time per row and element of the weight (D V) within 10 %. Then they predict this shape,
//     too, and the bounds are the worst of these errors, up and down.
//   - kBetween: they do not predict each other. The bounds are the fastest and the slowest of them, per row
//     and element of the weight.
//   - kNone: nothing is known, for example of shapes far from all measured shapes.
enum class Basis : uint8_t {
  kMeasured,
  kLikeShapes,  // predicted from other shapes, which predict each other
  kBetween,     // between the fastest and the slowest of other shapes
  kDataSheets,  // bounds for another card than the one that was measured
  kNone,        // not known
};
absl::string_view Name(Basis basis);  // "measured", "from other shapes", "between other shapes", "bounds by
                                      // data sheets", "not measured"

// A predicted time: a lower and an upper bound.
struct Estimate {
  Basis basis = Basis::kNone;
  double low_seconds = 0.0;
  double high_seconds = 0.0;
  std::vector<size_t> sources;  // indices in Measured::sources, ascending
  std::string why_none;         // if the basis is kNone: why nothing is known

  bool known() const { return basis != Basis::kNone; }
  double middle_seconds() const { return (low_seconds + high_seconds) / 2.0; }
};

// From this many rows of a microbatch on, the time is taken as proportional to the rows.
inline constexpr int64_t kLeastRows = 2048;
// The largest relative error with which measured shapes may predict each other (Basis::kLikeShapes).
inline constexpr double kMostError = 0.10;
// A shape is near the measured ones if D and V are at most this factor outside of their ranges.
inline constexpr double kNearFactor = 2.0;

// The time for `rows` rows of the shape. rows, hidden and vocab > 0.
Estimate EstimateTime(absl::Span<const Timing> measured, int64_t hidden, int64_t vocab, int64_t rows);

// The estimate for a card that was not measured. An unknown estimate stays unknown.
Estimate Bounded(Estimate estimate, const std::optional<CardBounds>& bounds);

// The timings of one kind, for EstimateTime.
std::vector<Timing> TimingsOf(const Measured& measured, kernels::Logits logits, kernels::Gradients gradients,
                              absl::string_view data);
std::vector<Timing> TimingsOf(const Measured& measured, absl::string_view last_stage_method,
                              absl::string_view data);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_MEASURED_H_
