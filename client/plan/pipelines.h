// SPDX-License-Identifier: Apache-2.0
// What `lossctl plan --stages` compares: the layouts of a pipeline, their steps (pipeline.h) and the memory of
// every GPU. Plain data; thread-compatible.
#ifndef LOSSD_CLIENT_PLAN_PIPELINES_H_
#define LOSSD_CLIENT_PLAN_PIPELINES_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/plan/local_head.h"
#include "client/plan/measured.h"
#include "client/plan/pipeline.h"
#include "kernels/loss_options.h"

namespace lossd::plan {

struct Plan;
struct Request;

// Of pipelines; each trainer is one. Seconds are of a microbatch, alone on one GPU; 0: from the measured rates.
struct PipelineRequest {
  int stages = 0;                     // 0: no pipeline is planned
  std::vector<double> layer_seconds;  // one for all layers, or one each: forward and backward; > 0 with stages
  double embedding_seconds = 0.0;     // that the first stage has beside its layers
  double head_seconds = 0.0;          // of the server's exact gradients
  double sampled_seconds = 0.0;       // of its sampled ones
  double local_head_seconds = 0.0;    // of the head on the last stage
  int64_t layer_bytes = 0;  // that a layer keeps of a microbatch for its backward; 0: LayerActivationBytes()
};

enum class PipelineKind : uint8_t {
  kLocal,      // the head is on the last stage
  kServer,     // on GPUs of its own
  kColocated,  // on the GPUs of all stages, divided by vocabulary
};
absl::string_view Name(PipelineKind kind);  // "local", "server", "colocated"

struct Pipeline {
  PipelineKind kind = PipelineKind::kLocal;
  std::optional<LocalMethod> local;  // kLocal; none: the time was given, and its method is not known
  kernels::Gradients gradients = kernels::Gradients::kExact;  // of the server
  bool mps = false;  // kColocated: trainer and server run at the same time (CUDA MPS), else in turns
  PipelineLayout layout;
  double over_local = 0.0;             // rows per second and GPU over those of kLocal; 0: not known
  std::vector<int64_t> stage_bytes;    // of each stage's GPU at its peak, its part of the head included
  std::optional<int64_t> server_bytes;  // kServer: of each of its GPUs
  bool fits = false;                   // Request::memory_bytes
  // kColocated: what the division was made of, as lossd.torch.balance() takes it.
  double head_seconds = 0.0;
  int64_t least_share = 0;
};

// What a layer of a transformer keeps of a microbatch from its forward to its backward, in 16 bits, without
// checkpointing and without a matrix of attention scores; and a 16-bit copy of its parameters, as autocast
// makes it.
int64_t LayerActivationBytes(int64_t hidden, int64_t rows, int64_t layer_parameters);

// INVALID_ARGUMENT naming the field.
absl::Status CheckPipeline(const Request& request);

// The layouts, of heads whose time is known: with the fastest local head; with a server of the request's GPUs
// beside as many stages, and, of a single trainer with a server of one GPU, in place of one stage; colocated,
// with and without MPS as far as that was measured. Exact and sampled. `plan` has all but pipelines.
absl::StatusOr<std::vector<Pipeline>> PipelinesOf(const Plan& plan, const Measured& measured);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_PIPELINES_H_
