// SPDX-License-Identifier: Apache-2.0
// How long a training step of a pipeline takes with the head on the last stage, on a server with GPUs of its
// own, and on a server that has the GPUs of the stages (colocated); and how layers and the head are divided
// over the stages (Balance). Pure functions; thread-safe.
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
#ifndef LOSSD_CLIENT_PLAN_PIPELINE_H_
#define LOSSD_CLIENT_PLAN_PIPELINE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace lossd::plan {

// The sum of the shares, but for rounding and for the least share.
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

// The factors of the formulas at the head of this file; 1: each part takes the time that it takes alone.
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

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_PIPELINE_H_
