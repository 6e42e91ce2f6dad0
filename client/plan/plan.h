// SPDX-License-Identifier: Apache-2.0
// What a loss head would take and how fast it would be: on a server, and on the last stage of a pipeline. The
// memory on a server is the server's own arithmetic (kernels/cuda/heads/head_memory.h); times are predicted
// from measured rates (measured.h), or missing where nothing was measured. MakePlan makes the whole plan of a
// Request; DeviceMemoryOf and PipelinesOf make its parts.
//
// Plain data and pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_PLAN_H_
#define LOSSD_CLIENT_PLAN_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/plan/measured.h"
#include "client/plan/model.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"

namespace lossd::plan {

// ---- The time of a step ----
// How long a training step of a pipeline takes with the head on the last stage, on a server with GPUs of its
// own, and on a server that has the GPUs of the stages (colocated); and how layers and the head are divided
// over the stages (Balance).
//
// Every GPU takes its time T for a microbatch, the slowest one works on one after the other, and the first
// and the last microbatch pass through all stages while others wait (1F1B; Overlapped1F1B with a server):
//
//   T    = layer factor x its layers
//          + embedding                              first stage
//          + local head factor x head               last stage, head there
//          + colocated factor x its share x head    colocated
//   step = sum of T without the colocated head + the head once, on a server
//          + (microbatches - 1) x the largest of T and, on a server, replicas x head
//
// With factors of 1 this is a bound: a schedule without gaps, in which each part takes the time that it takes
// alone. The factors are what measured steps take instead (Measured::factors): transfers, the optimizer, GPUs
// that are slower when all work, and, colocated, exchanges between the GPUs and two programs on one GPU.
// Layers that do not divide are in the largest T, filling and emptying the pipeline in the sum.

// The sum of the shares, but for rounding.
inline constexpr int64_t kWholeShare = 1000;

// Layers and shares that make all stages about as fast as each other.
struct Balanced {
  std::vector<int64_t> layers;  // of each stage, in order; at least one
  std::vector<int64_t> shares;  // of the head's classes, in thousandths (HeadSpec.shares)
};

// The arithmetic of lossd.torch.balance(), step by step: the same times give the same layers and shares,
// which tests/client/python/test_torch_balance.py proves. Layers stay in order, so that the slowest stage is
// as fast as can be; the head fills what the other stages have left. 1 <= stage_seconds.size() <=
// layer_seconds.size(), one stage an entry; all seconds finite and >= 0; 0 <= least_share <= kWholeShare /
// stage_seconds.size().
//   layer_seconds: of each layer, forward and backward of a microbatch
//   head_seconds: of the whole head on one GPU
//   stage_seconds: what each stage does beside its layers
Balanced Balance(absl::Span<const double> layer_seconds, double head_seconds,
                 absl::Span<const double> stage_seconds, int64_t least_share);

// Layers alone, in order: the slowest stage is as fast as can be, and of such divisions the most even one. A
// stage has a layer at least, but the last one `least_on_last`, 0 or 1. As many layers as stages, or one
// fewer with least_on_last 0.
std::vector<int64_t> DivideLayers(absl::Span<const double> layer_seconds,
                                  absl::Span<const double> stage_seconds, int64_t least_on_last);

// Seconds of each stage with so many layers.
std::vector<double> StageSeconds(absl::Span<const double> layer_seconds,
                                 absl::Span<const double> stage_seconds, absl::Span<const int64_t> layers);

// A pipeline and the times of its parts.
struct PipelineShape {
  std::vector<double> layer_seconds;  // of each layer: forward and backward of a microbatch, alone; > 0
  double embedding_seconds = 0.0;     // that the first stage has beside its layers, measured as they are
  int stages = 1;                     // from 1 to as many as layers
  int64_t microbatches = 1;           // of a step of one replica, >= 1
  int64_t microbatch_rows = 1;        // >= 1
  int64_t replicas = 1;               // of the pipeline, >= 1; they share a server, if it has GPUs of its own
};

// The factors of the formulas above; 1: each part takes the time that it takes alone.
struct PipelineFactors {
  double layer = 1.0;
  double local_head = 1.0;
  double colocated = 1.0;
};

// One way to lay a pipeline out.
struct PipelineLayout {
  std::vector<int64_t> layers;           // of each stage
  std::vector<int64_t> shares;           // colocated: of the head, of each stage; else empty
  int64_t gpus = 0;                      // of all replicas, the server's included
  double slowest_stage_seconds = 0.0;    // of a microbatch: the largest T
  double step_seconds = 0.0;             // predicted
  double least_step_seconds = 0.0;       // the same layout with factors of 1
  double rows_per_second_and_gpu = 0.0;  // predicted
  bool server_bound = false;             // the server has more to do than the slowest stage
};

// The head on the last stage. head_seconds: of the whole head on one GPU for a microbatch; > 0. Layers are
// divided so that the predicted step is the shortest.
PipelineLayout WithLocalHead(const PipelineShape& shape, double head_seconds, const PipelineFactors& factors);

// On a server of `gpus` GPUs, which together take head_seconds for a microbatch.
PipelineLayout WithServer(const PipelineShape& shape, double head_seconds, int gpus,
                          const PipelineFactors& factors);

// On the stages' own GPUs, divided by vocabulary. Balance() gives layers and shares, for the times as they
// are, without factors.
PipelineLayout Colocated(const PipelineShape& shape, double head_seconds, int64_t least_share,
                         const PipelineFactors& factors);

// The time of a step that is laid out so, as above. Shares may be empty: evenly.
PipelineLayout LocalLayout(const PipelineShape& shape, std::vector<int64_t> layers, double head_seconds,
                           const PipelineFactors& factors);
PipelineLayout ServerLayout(const PipelineShape& shape, std::vector<int64_t> layers, double head_seconds,
                            int gpus, const PipelineFactors& factors);
PipelineLayout ColocatedLayout(const PipelineShape& shape, std::vector<int64_t> layers,
                               std::vector<int64_t> shares, double head_seconds,
                               const PipelineFactors& factors);

// ---- The memory of a head ----

struct Request;

// The memory of a head on one GPU of the server, by the server's own arithmetic.
struct DeviceMemory {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Split split = kernels::Split::kAny;  // kAny: the server has one GPU
  kernels::MemoryBytes memory;                  // by part; of several GPUs, that with most
  int64_t library_bytes = 0;                    // scratch of the library's products, once a GPU
  int64_t device_bytes = 0;                     // of the GPU, in all
  int64_t chunk_rows = 0;
  bool fits = false;
  std::vector<kernels::Choice> choices;
};

// How a head lies on the GPUs of a server.
struct Placement {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Split split = kernels::Split::kAny;
  std::vector<int32_t> shares;  // HeadConfig::shares
};

// Of GPU replica.index of replica.count. INVALID_ARGUMENT naming the field of the head.
absl::StatusOr<DeviceMemory> DeviceMemoryOf(const Request& request, const Card& card,
                                            const Placement& placement, kernels::Replica replica);

// ---- Pipelines ----

struct Plan;

// What is asked about pipelines (`lossctl plan --stages`); each trainer is one pipeline. Seconds are of a
// microbatch, alone on one GPU; 0: from the measured rates.
struct PipelineRequest {
  int stages = 0;  // 0: no pipeline is planned
  std::vector<double>
      layer_seconds;                // one for all layers, or one each: forward and backward; > 0 with stages
  double embedding_seconds = 0.0;   // that the first stage has beside its layers
  double head_seconds = 0.0;        // of the server's exact gradients
  double sampled_seconds = 0.0;     // of its sampled ones
  double local_head_seconds = 0.0;  // of the head on the last stage
  int64_t layer_bytes = 0;  // that a layer keeps of a microbatch for its backward; 0: LayerActivationBytes()
};

enum class PipelineKind : uint8_t {
  kLocal,      // the head is on the last stage
  kServer,     // on GPUs of its own
  kColocated,  // on the GPUs of all stages, divided by vocabulary
};
absl::string_view Name(PipelineKind kind);  // "local", "server", "colocated"

// One layout of a pipeline and what it takes.
struct Pipeline {
  PipelineKind kind = PipelineKind::kLocal;
  std::optional<LocalMethod> local;  // kLocal; none: the time was given, and its method is not known
  kernels::Gradients gradients = kernels::Gradients::kExact;  // of the server
  bool mps = false;  // kColocated: trainer and server run at the same time (CUDA MPS), else in turns
  PipelineLayout layout;
  double over_local = 0.0;              // rows per second and GPU over those of kLocal; 0: not known
  std::vector<int64_t> stage_bytes;     // of each stage's GPU at its peak, its part of the head included
  std::optional<int64_t> server_bytes;  // kServer: of each of its GPUs
  bool fits = false;                    // Request::memory_bytes
  // kColocated: what the division was made of, as lossd.torch.balance() takes it.
  double head_seconds = 0.0;
  int64_t least_share = 0;
};

// What a layer of a transformer keeps of a microbatch from its forward to its backward, in 16 bits, without
// checkpointing and without a matrix of attention scores; and a 16-bit copy of its parameters, as autocast
// makes it.
int64_t LayerActivationBytes(int64_t hidden, int64_t rows, int64_t layer_parameters);

// What `lossctl plan --stages` compares: the layouts of a pipeline, their steps and the memory of every GPU.
struct Pipelines {
  std::vector<Pipeline> known;
  std::vector<std::string> left_out;  // layouts of which nothing can be said, and why, as sentences
};

// INVALID_ARGUMENT naming the field.
absl::Status CheckPipeline(const Request& request);

// The layouts, of heads whose time is known: with the fastest local head; with a server of the request's GPUs
// beside as many stages, and, of a single trainer with a server of one GPU, in place of one stage; colocated,
// with and without MPS if that was measured. Gradients are exact and sampled. `plan` has everything except
// pipelines.
absl::StatusOr<Pipelines> PipelinesOf(const Plan& plan, const Measured& measured);

// ---- The plan ----

// What a plan is asked for.
struct Request {
  Model model;
  // Of the head, beside its size.
  bool bias = false;
  kernels::Norm norm = kernels::Norm::kNone;
  kernels::OptimizerState optimizer_state = kernels::OptimizerState::kAdam;
  int64_t workspace_bytes = 0;  // 0: the server's default

  std::string data = "real";     // kind of rows whose times count
  int64_t rows = 65536;          // a step of one trainer
  int64_t microbatch = 8192;     // rows of one
  int64_t trainers = 1;          // that share the server
  double trainer_seconds = 0.0;  // of a step of a trainer without the head; 0: not known
  int gpus = 1;                  // of the server
  int64_t memory_bytes = 0;      // of a GPU; 0: the card's
  int64_t stage_bytes = 0;       // that layers take on the last stage beside a local head

  PipelineRequest pipeline;

  // Whose memory is planned, too: one trainer with its whole model. A 0 in memory_bytes, rows or parameters
  // is replaced by what the request or its model has of that name; head_parameters by the head's.
  std::optional<TrainerShape> trainer;
};

// One way to compute gradients on the server.
struct ServerSpeed {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Gradients gradients = kernels::Gradients::kExact;
  Estimate microbatch;  // on one GPU
  // The rest holds if the estimate is known. Rows per second of all GPUs, at least and at most.
  double low_rows_per_second = 0.0, high_rows_per_second = 0.0;
  double low_gigabytes_per_second = 0.0, high_gigabytes_per_second = 0.0;  // hidden states; as much back
  double step_seconds = 0.0;            // of all trainers' rows and the update, at most
  std::optional<int64_t> trainers_fed;  // if trainer_seconds is known
};

// What was measured of a transport between processes of one host.
struct Link {
  std::string transport;
  int connections = 1;
  double most_gigabytes_per_second = 0.0;  // each way
  double most_rows_per_second = 0.0;       // of this head
  double server_cores = 0.0;               // of that run
  size_t source = 0;
};

// A head on the last stage.
struct LastStage {
  LocalMethod method = LocalMethod::kTorch;
  Estimate microbatch;
  int64_t peak_bytes = 0;  // of a microbatch
  int64_t state_bytes = 0;
  int64_t largest_microbatch = 0;  // rows that fit beside Request::stage_bytes
};

// The time between two steps.
struct Update {
  std::optional<double> seconds;  // of the optimizer and the gradient norm, on one GPU; none: not measured
  std::vector<size_t> sources;
};

// The whole plan.
struct Plan {
  Request request;  // with memory_bytes set
  std::vector<DeviceMemory> server;
  std::vector<ServerSpeed> speeds;
  Update update;
  // By how much more rows GPUs compute than one, the least that was measured; none: not measured for so many.
  std::optional<double> rows_speedup, vocabulary_speedup;
  std::vector<size_t> speedup_sources;
  std::vector<Link> links;
  std::vector<LastStage> last_stage;
  Pipelines pipelines;  // empty: none is planned
  // Of the trainer: hidden states and gradients of a microbatch in bf16, instead of all of `last_stage`.
  int64_t trainer_bytes = 0;
  std::optional<TrainerMemory> trainer_memory;  // if the request has a trainer
};

// INVALID_ARGUMENT naming the field of the request. `measured` is of the server's card.
absl::StatusOr<Plan> MakePlan(const Request& request, const Measured& measured);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_PLAN_H_
