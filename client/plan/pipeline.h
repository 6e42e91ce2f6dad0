// SPDX-License-Identifier: Apache-2.0
// How long a training step of a pipeline takes at least, with the head on the last stage and with a server:
// the arithmetic of a schedule without gaps. Pure functions; thread-safe.
//
// A microbatch passes through all stages, and the slowest stage works on one after the other: a step takes
// the sum of the stages' times and (microbatches - 1) times the largest of them (1F1B). Transfers between
// stages, the optimizer and, in plain 1F1B, the last stage's wait for the server are not in it
// (docs/training/pipeline.md).
#ifndef LOSSD_CLIENT_PLAN_PIPELINE_H_
#define LOSSD_CLIENT_PLAN_PIPELINE_H_

#include <cstdint>
#include <vector>

namespace lossd::plan {

struct PipelineShape {
  int64_t layers = 0;           // >= stages
  int stages = 1;               // >= 1
  int64_t microbatches = 1;     // of a step of one replica, >= 1
  int64_t microbatch_rows = 1;  // >= 1
  int64_t replicas = 1;         // that share a server, >= 1
  double layer_seconds = 0.0;   // forward and backward of one layer, of one microbatch; > 0
};

// One way to lay it out.
struct PipelineLayout {
  std::vector<int64_t> layers;           // of each stage
  int64_t gpus = 0;                      // of all replicas, the server's included
  double slowest_stage_seconds = 0.0;    // of a microbatch
  double step_seconds = 0.0;             // at least
  double rows_per_second_and_gpu = 0.0;  // at most
  bool server_bound = false;             // the server computes fewer rows per second than the stages
};

// The head on the last stage, which takes head_seconds for a microbatch: layers divided so that the slowest
// stage is as fast as can be.
PipelineLayout WithLocalHead(const PipelineShape& shape, double head_seconds);

// The head on a server of `gpus` GPUs that computes so many rows per second for all replicas.
PipelineLayout WithServer(const PipelineShape& shape, double server_rows_per_second, int gpus);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_PIPELINE_H_
