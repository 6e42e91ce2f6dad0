// SPDX-License-Identifier: Apache-2.0
// How an optimizer step was applied and what it answered: what a repeated ApplyStep is checked against and
// answered with, also after a restart from a checkpoint. Plain data.
#ifndef LOSSD_SERVER_HEAD_APPLIED_STEP_H_
#define LOSSD_SERVER_HEAD_APPLIED_STEP_H_

#include <cstdint>

#include "kernels/optimizer_options.h"

namespace lossd::head {

struct AppliedStep {
  uint64_t incarnation = 0;  // of the server that applied it
  uint64_t generation = 0;   // of the gradients that it was applied with; 0: not known
  kernels::OptimizerOptions optimizer;
  double grad_norm = 0.0;  // may be infinite or NaN
  int64_t microbatches = 0;
  int64_t rows = 0;
  int64_t contributions = 0;
  bool skipped = false;          // closed without an update
  bool begin_optimizer = false;  // the optimizer's state was zeroed before it

  friend bool operator==(const AppliedStep&, const AppliedStep&) = default;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_APPLIED_STEP_H_
