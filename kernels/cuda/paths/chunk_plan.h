// SPDX-License-Identifier: Apache-2.0
// Which kernels compute a chunk, and why those: decided from what is known before anything is enqueued. Pure
// functions; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_PATHS_CHUNK_PLAN_H_
#define LOSSD_KERNELS_CUDA_PATHS_CHUNK_PLAN_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/norm/norm_plan.h"
#include "kernels/cuda/paths/filter_plan.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

struct ChunkPlan {
  // kFiltered and kAuto: the device decides when it has seen the logits.
  Gradients gradients = Gradients::kExact;
  // Gradients from a list get the uniform part of label smoothing in closed form, instead of in ds.
  bool uniform_apart = false;
  // Filtered gradients are selected from the matrix of ds, not from the logits.
  bool filters_elements = false;
  absl::string_view why_exact;      // "" unless gradients are kExact
  absl::string_view why_not_fused;  // "": the loss is computed in the epilogue of the logits product
  // "": the gradients are products of our own (hopper/gradient_gemm.h) instead of cuBLASLt's.
  absl::string_view why_library_gemms;
  std::optional<NormPlan> norm;           // none: the head has no norm
  std::optional<NormPlan> norm_gradient;  // none: it has no norm, or none is wanted

  bool filtered() const { return gradients == Gradients::kFiltered; }
  bool sampled() const { return MaySample(gradients); }
  bool exact() const { return gradients == Gradients::kExact; }
  bool fused() const { return why_not_fused.empty(); }
  bool own_gemms() const { return why_library_gemms.empty(); }
};

// What the plan needs to know of a chunk beside its options.
struct ChunkFacts {
  LossTerms terms;
  int64_t rows = 0;
  int64_t padded_rows = 0;
  bool wants_gradient = false;
};

// What it needs to know of the head and the device.
struct PlanLimits {
  Logits logits = Logits::kStored;
  FilterShape filter;  // of the head; of one that is split, of the part with most classes
  DeviceLimits device;
  FusedLoss fused_loss = FusedLoss::kWhereFaster;
  bool split = false;  // the head is split by vocabulary
};

// All but the norm. Where logits are recomputed, products are cuBLASLt's, and the pass that computes the loss
// stores nothing.
ChunkPlan PlanChunk(const LossOptions& options, const ChunkFacts& chunk, const PlanLimits& limits);

std::vector<Choice> Describe(const ChunkPlan& plan);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_CHUNK_PLAN_H_
