// SPDX-License-Identifier: Apache-2.0
// Predicts what a loss head would take and how fast it would be, on a server and on the last stage of a
// pipeline. The memory on a server comes from the server's own arithmetic (kernels/cuda/heads/head_memory.h).
// Times are predicted from measured rates (measured.h), or missing where nothing was measured. MakePlan makes
// the whole plan for a Request; DeviceMemoryOf and PipelinesOf make parts of it.
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
// How long a training step of a pipeline takes with the head in one of three places: on the last stage, on a
// server with GPUs of its own, or on a server that uses the GPUs of the stages (colocated). Also how layers
// and head are divided over the stages (Balance).
//
// Each GPU takes its time T for a microbatch. The slowest GPU works on one microbatch after the other. The
// first and the last microbatch pass through all stages while other GPUs wait (1F1B; Overlapped1F1B with a
// server):
//
//   T    = layer factor x its layers
//          + embedding                              first stage
//          + local head factor x head               last stage, head there
//          + colocated factor x its share x head    colocated
//   step = sum of T without the colocated head + the head once, on a server
//          + (microbatches - 1) x the largest of T and, on a server, replicas x head
//
// With all factors 1 the result is a bound: a schedule without gaps, in which each part takes the time that
// it takes alone. The factors are fitted to measured steps (Measured::factors). They cover transfers, the
// optimizer, and GPUs that are slower when all of them work; colocated also the exchanges between GPUs and
// two programs on one GPU. If the layers do not divide evenly, the largest T shows it. The sum of T is the
// time to fill and empty the pipeline.

// The sum of all shares, up to rounding.
inline constexpr int64_t kWholeShare = 1000;

// Layers and shares that make all stages about equally fast.
struct Balanced {
  std::vector<int64_t> layers;  // the number of layers of each stage, in order; >= 1 each
  std::vector<int64_t> shares;  // each stage's share of the classes, in thousandths (HeadSpec.shares)
};

// Divides layers and head over the stages with the same arithmetic as lossd.torch.balance(), step by step:
// the same times give the same layers and shares (tests/client/python/test_torch_balance.py checks that). The
// layers stay in order, and are divided so that the slowest stage is as fast as possible. The head fills the
// time that the other stages have left. Requires: one entry of stage_seconds for each stage; 1 <=
// stage_seconds.size() <= layer_seconds.size(); all seconds finite and >= 0; 0 <= least_share <= kWholeShare
// / stage_seconds.size().
//   layer_seconds: the time of each layer: forward and backward of a microbatch
//   head_seconds: the time of the whole head on one GPU
//   stage_seconds: the time of each stage's other work
Balanced Balance(absl::Span<const double> layer_seconds, double head_seconds,
                 absl::Span<const double> stage_seconds, int64_t least_share);

// Divides the layers alone, in order, so that the slowest stage is as fast as possible. Of such divisions it
// takes the most even one. Each stage has at least one layer, but the last stage only `least_on_last`, which
// is 0 or 1. There must be at least as many layers as stages; one fewer if least_on_last is 0.
std::vector<int64_t> DivideLayers(absl::Span<const double> layer_seconds,
                                  absl::Span<const double> stage_seconds, int64_t least_on_last);

// The seconds of each stage with this division of the layers.
std::vector<double> StageSeconds(absl::Span<const double> layer_seconds,
                                 absl::Span<const double> stage_seconds, absl::Span<const int64_t> layers);

// A pipeline, and the times of its parts.
struct PipelineShape {
  std::vector<double> layer_seconds;  // for each layer: forward and backward of a microbatch, alone; > 0
  double embedding_seconds = 0.0;     // the first stage's embedding, measured in the same way
  int stages = 1;                     // the number of stages, from 1 to the number of layers
  int64_t microbatches = 1;           // the microbatches of a step of one replica, >= 1
  int64_t microbatch_rows = 1;        // the rows of a microbatch, >= 1
  int64_t replicas = 1;  // copies of the pipeline, >= 1; they share the server, if it has GPUs of its own
};

// The factors in the formulas above. 1: the part takes the time that it takes alone.
struct PipelineFactors {
  double layer = 1.0;
  double local_head = 1.0;
  double colocated = 1.0;
};

// One division of a pipeline over its GPUs, and its times.
struct PipelineLayout {
  std::vector<int64_t> layers;           // the number of layers of each stage
  std::vector<int64_t> shares;           // colocated: the share of the head on each stage; otherwise empty
  int64_t gpus = 0;                      // all GPUs of all replicas, and those of the server
  double slowest_stage_seconds = 0.0;    // the largest T, of a microbatch
  double step_seconds = 0.0;             // the predicted time of a step
  double least_step_seconds = 0.0;       // the predicted time of the same division if all factors are 1
  double rows_per_second_and_gpu = 0.0;  // predicted rate, divided by `gpus`
  bool server_bound = false;             // the server takes longer than the slowest stage
};

// The layout with the head on the last stage. head_seconds > 0 is the time of the whole head for a microbatch
// on one GPU. Layers are divided so that the predicted step is as short as possible.
PipelineLayout WithLocalHead(const PipelineShape& shape, double head_seconds, const PipelineFactors& factors);

// The layout with the head on a server of `gpus` GPUs, which together take head_seconds for a microbatch.
PipelineLayout WithServer(const PipelineShape& shape, double head_seconds, int gpus,
                          const PipelineFactors& factors);

// The layout with the head on the stages' own GPUs, divided by vocabulary. Balance() divides layers and head;
// it gets the times without factors.
PipelineLayout Colocated(const PipelineShape& shape, double head_seconds, int64_t least_share,
                         const PipelineFactors& factors);

// The times of a step whose layers and shares are given, with the formulas above. Empty shares mean equal
// shares.
PipelineLayout LocalLayout(const PipelineShape& shape, std::vector<int64_t> layers, double head_seconds,
                           const PipelineFactors& factors);
PipelineLayout ServerLayout(const PipelineShape& shape, std::vector<int64_t> layers, double head_seconds,
                            int gpus, const PipelineFactors& factors);
PipelineLayout ColocatedLayout(const PipelineShape& shape, std::vector<int64_t> layers,
                               std::vector<int64_t> shares, double head_seconds,
                               const PipelineFactors& factors);

// ---- The memory of a head ----

struct Request;

// The memory that a head takes on one GPU of the server, by the server's own arithmetic.
struct DeviceMemory {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Split split = kernels::Split::kAny;  // kAny: the server has one GPU
  kernels::MemoryBytes memory;  // by purpose; with several GPUs, on the GPU that needs the most
  int64_t library_bytes = 0;    // scratch memory of the library's matrix products, once for each GPU
  int64_t device_bytes = 0;     // the total on the GPU
  int64_t chunk_rows = 0;
  bool fits = false;
  std::vector<kernels::Choice> choices;
};

// How a head is placed on the GPUs of a server.
struct Placement {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Split split = kernels::Split::kAny;
  std::vector<int32_t> shares;  // HeadConfig::shares
};

// The memory on GPU replica.index of replica.count. INVALID_ARGUMENT naming the field of the head.
absl::StatusOr<DeviceMemory> DeviceMemoryOf(const Request& request, const Card& card,
                                            const Placement& placement, kernels::Replica replica);

// ---- Pipelines ----

struct Plan;

// What `lossctl plan --stages` asks about a pipeline. Each trainer is one pipeline. The seconds are those of
// one microbatch, alone on one GPU; 0: taken from the measured rates.
struct PipelineRequest {
  int stages = 0;  // 0: no pipeline is planned
  std::vector<double>
      // For each layer, or one value for all layers: forward and backward; > 0 if there are stages.
      layer_seconds;
  double embedding_seconds = 0.0;   // the time of the first stage's embedding
  double head_seconds = 0.0;        // the time of a server's exact gradients
  double sampled_seconds = 0.0;     // the time of a server's sampled gradients
  double local_head_seconds = 0.0;  // the time of the head on the last stage
  int64_t layer_bytes = 0;  // what a layer keeps of a microbatch for its backward; 0: LayerActivationBytes()
};

enum class PipelineKind : uint8_t {
  kLocal,      // the head is on the last stage
  kServer,     // the head is on a server with GPUs of its own
  kColocated,  // the head is on the GPUs of all stages, divided by vocabulary
};
absl::string_view Name(PipelineKind kind);  // "local", "server", "colocated"

// One layout of a pipeline, with its memory and its speed.
struct Pipeline {
  PipelineKind kind = PipelineKind::kLocal;
  std::optional<LocalMethod> local;  // kLocal; none: the user gave the time, and its method is not known
  // The kind of gradients that the server computes.
  kernels::Gradients gradients = kernels::Gradients::kExact;
  bool mps = false;  // kColocated: trainer and server run at the same time (CUDA MPS); false: in turns
  PipelineLayout layout;
  double over_local = 0.0;              // rows per second and GPU divided by those of kLocal; 0: not known
  std::vector<int64_t> stage_bytes;     // the peak on each stage's GPU, with its part of the head
  std::optional<int64_t> server_bytes;  // kServer: on each of its GPUs
  bool fits = false;                    // every GPU needs at most Request::memory_bytes
  // kColocated: the arguments that the division was made with, as lossd.torch.balance() takes them.
  double head_seconds = 0.0;
  int64_t least_share = 0;
};

// The memory that a layer of a transformer keeps of a microbatch from its forward to its backward, in 16
// bits, without checkpointing and without a matrix of attention scores. A 16-bit copy of the layer's
// parameters, which autocast makes, is included.
int64_t LayerActivationBytes(int64_t hidden, int64_t rows, int64_t layer_parameters);

// What `lossctl plan --stages` compares: the layouts of a pipeline, with the time of a step and the memory of
// every GPU.
struct Pipelines {
  std::vector<Pipeline> known;
  std::vector<std::string> left_out;  // sentences: each says which layout is missing, and why
};

// Checks request.pipeline. INVALID_ARGUMENT naming the field.
absl::Status CheckPipeline(const Request& request);

// The layouts whose head's time is known, with exact and with sampled gradients:
// - the fastest local head;
// - a server with the request's GPUs in addition to the stages; for a single trainer and a server of one GPU,
//   also with one stage fewer;
// - colocated, with and without MPS, if that was measured.
// `plan` has everything except its pipelines.
absl::StatusOr<Pipelines> PipelinesOf(const Plan& plan, const Measured& measured);

// ---- The plan ----

// The questions that a plan answers.
struct Request {
  Model model;
  // The head, apart from its size.
  bool bias = false;
  kernels::Norm norm = kernels::Norm::kNone;
  kernels::OptimizerState optimizer_state = kernels::OptimizerState::kAdam;
  int64_t workspace_bytes = 0;  // 0: the server's default

  std::string data = "real";     // the kind of rows whose measured times count
  int64_t rows = 65536;          // rows that one trainer sends in a step
  int64_t microbatch = 8192;     // rows of one microbatch
  int64_t trainers = 1;          // the number of trainers that share the server
  double trainer_seconds = 0.0;  // the time of a trainer's step without the head; 0: not known
  int gpus = 1;                  // the number of the server's GPUs
  int64_t memory_bytes = 0;      // the memory of one GPU; 0: that of the card
  int64_t stage_bytes = 0;       // what layers take on the last stage next to a local head

  PipelineRequest pipeline;

  // A trainer with its whole model, whose memory is planned, too. If memory_bytes, rows or parameters is 0,
  // the request's or its model's value of that name is taken; for head_parameters, the size of the head.
  std::optional<TrainerShape> trainer;
};

// The speed of the server with one kind of gradients.
struct ServerSpeed {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Gradients gradients = kernels::Gradients::kExact;
  Estimate microbatch;  // the time of one microbatch on one GPU
  // The fields below are valid if the estimate is known. Rows per second are those of all GPUs, at least and
  // at most.
  double low_rows_per_second = 0.0, high_rows_per_second = 0.0;
  double low_gigabytes_per_second = 0.0, high_gigabytes_per_second = 0.0;  // hidden states; as much back
  double step_seconds = 0.0;  // at most: the rows of all trainers, and the update
  // If trainer_seconds is known: how many trainers compute their steps without waiting for the server.
  std::optional<int64_t> trainers_fed;
};

// The measured rate of a transport between processes of one host.
struct Link {
  std::string transport;
  int connections = 1;
  double most_gigabytes_per_second = 0.0;  // in each direction
  double most_rows_per_second = 0.0;       // rows of this head
  double server_cores = 0.0;               // the cores that the server used in that run
  size_t source = 0;
};

// A head on the last stage of a pipeline.
struct LastStage {
  LocalMethod method = LocalMethod::kTorch;
  Estimate microbatch;
  int64_t peak_bytes = 0;  // the peak for one microbatch
  int64_t state_bytes = 0;
  int64_t largest_microbatch = 0;  // rows that fit in addition to Request::stage_bytes
};

// The work between two steps.
struct Update {
  // The time of the optimizer and the gradient norm, on one GPU; none: not measured.
  std::optional<double> seconds;
  std::vector<size_t> sources;
};

// The whole plan.
struct Plan {
  Request request;  // its memory_bytes is never 0
  std::vector<DeviceMemory> server;
  std::vector<ServerSpeed> speeds;
  Update update;
  // The rows per second of several GPUs divided by those of one GPU, the least that was measured. None: not
  // measured with this number of GPUs.
  std::optional<double> rows_speedup, vocabulary_speedup;
  std::vector<size_t> speedup_sources;
  std::vector<Link> links;
  std::vector<LastStage> last_stage;
  Pipelines pipelines;  // empty: none is planned
  // What a trainer without a head needs in the place of `last_stage`: hidden states and gradients of a
  // microbatch in bf16.
  int64_t trainer_bytes = 0;
  std::optional<TrainerMemory> trainer_memory;  // if the request has a trainer
};

// Makes the plan. `measured` is of the server's card. INVALID_ARGUMENT naming the field of the request.
absl::StatusOr<Plan> MakePlan(const Request& request, const Measured& measured);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_PLAN_H_
