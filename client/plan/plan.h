// SPDX-License-Identifier: Apache-2.0
// What a loss head would take and how fast it would be: on a server, and on the last stage of a pipeline. The
// memory on a server is the server's own arithmetic (kernels/cuda/heads/head_plan.h); times are predicted
// from measured rates (rates.h), or missing where nothing was measured.
//
// Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_PLAN_H_
#define LOSSD_CLIENT_PLAN_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/plan/device_memory.h"
#include "client/plan/local_head.h"
#include "client/plan/measured.h"
#include "client/plan/model.h"
#include "client/plan/pipelines.h"
#include "client/plan/rates.h"
#include "client/plan/trainer_memory.h"
#include "kernels/head_config.h"

namespace lossd::plan {

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
  // is replaced by what the request or its model has of that name; head_parameters by those of the head.
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

// A transport between processes of one host, as far as it was measured.
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

struct Update {
  std::optional<double> seconds;  // of the optimizer and the gradient norm, on one GPU; none: not measured
  std::vector<size_t> sources;
};

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
  std::vector<Pipeline> pipelines;  // empty: none is planned
  // Of the trainer: hidden states and gradients of a microbatch in bf16, instead of all of `last_stage`.
  int64_t trainer_bytes = 0;
  std::optional<TrainerMemory> trainer_memory;  // if the request has a trainer
};

// INVALID_ARGUMENT naming the field of the request. `measured` is of the server's card.
absl::StatusOr<Plan> MakePlan(const Request& request, const Measured& measured);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_PLAN_H_
