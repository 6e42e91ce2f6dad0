// SPDX-License-Identifier: Apache-2.0
// What was measured on a card (Measured), as bench/plan_data.py writes it from bench/results, and what may be
// said of other cards (OnCard) and of other shapes (EstimateTime) because of it.
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
  int64_t microbatches = 0;  // of a step
  int64_t rows = 0;          // of a step
  double step_seconds = 0.0;
  std::vector<int64_t> peak_bytes;  // by stage
  size_t source = 0;
};

// For a card whose times were not measured: its times lie between these factors of another card's times.
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
  int64_t microbatches = 0;  // of a step
  int64_t microbatch_rows = 0;
  std::vector<int64_t> layers;  // of each stage
  std::vector<int64_t> shares;  // of the head, of each stage; empty: evenly
  double layer_seconds = 0.0;   // of one, forward and backward of a microbatch, alone
  double step_seconds = 0.0;
  std::vector<int64_t> peak_bytes;  // of each stage, the server's part left out
  size_t source = 0;
};

// What stages take in measured steps over what their parts take alone (plan.h), and how far steps are
// from what this predicts.
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

// Everything that was measured on one card.
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

// The rest of this file is about times that were not measured. First, bounds on the times of a card that was
// not measured, from its data sheet and that of a card that was.
//
// A kernel is limited by arithmetic or by memory at every moment, so its time on another card that runs the
// same code lies between two factors: the quotients of the cards' arithmetic and of their bandwidth. That
// holds if both cards come as near to their data sheets; a card that has to lower its clock for want of power
// is slower. Only Hopper cards are here, because others run other kernels (docs/kernels/README.md).

// "h100-nvl", "h100-sxm", "h200".
std::vector<std::string> CardNames();

// `measured` for that card: as it is, if it is of that card, else with Measured::bounds. What says nothing of
// another card is left out: several GPUs, and memory that they share with trainers. INVALID_ARGUMENT naming
// the field "card" if the name is none of CardNames, or if no data sheet is known of the card that was
// measured.
absl::StatusOr<Measured> OnCard(Measured measured, absl::string_view name);

// How a time is known. What is said of a shape depends on what was measured, and never goes further:
//   - The shape was measured: its time, in proportion to the rows.
//   - Leaving out each measured shape in turn, the others predict its time per row and D V within 10 %. They
//     predict this shape too, with the worst of these errors to both sides.
//   - They do not: between the fastest and the slowest of them per row and D V.
//   - Otherwise nothing. Too small microbatches and shapes far from all measured shapes are among these.
enum class Basis : uint8_t {
  kMeasured,
  kLikeShapes,  // predicted by other shapes, which predict each other
  kBetween,     // bounds
  kDataSheets,  // bounds of another card than the one that was measured
  kNone,        // not known
};
absl::string_view Name(Basis basis);  // "measured", "from other shapes", "between other shapes", "bounds by
                                      // data sheets", "not measured"

// A predicted time, between two bounds.
struct Estimate {
  Basis basis = Basis::kNone;
  double low_seconds = 0.0;
  double high_seconds = 0.0;
  std::vector<size_t> sources;  // indices of Measured::sources, ascending
  std::string why_none;         // why nothing is known

  bool known() const { return basis != Basis::kNone; }
  double middle_seconds() const { return (low_seconds + high_seconds) / 2.0; }
};

// Rows of a microbatch, at least, that its time is proportional to.
inline constexpr int64_t kLeastRows = 2048;
// What other shapes predict may be off by as much.
inline constexpr double kMostError = 0.10;
// A shape is near those that were measured if D and V are at most this factor outside of their range.
inline constexpr double kNearFactor = 2.0;

// Of `rows` rows of such a shape. rows, hidden and vocab > 0.
Estimate EstimateTime(absl::Span<const Timing> measured, int64_t hidden, int64_t vocab, int64_t rows);

// The same on a card that was not measured. What is not known stays so.
Estimate Bounded(Estimate estimate, const std::optional<CardBounds>& bounds);

// The timings of one kind, to estimate with.
std::vector<Timing> TimingsOf(const Measured& measured, kernels::Logits logits, kernels::Gradients gradients,
                              absl::string_view data);
std::vector<Timing> TimingsOf(const Measured& measured, absl::string_view last_stage_method,
                              absl::string_view data);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_MEASURED_H_
