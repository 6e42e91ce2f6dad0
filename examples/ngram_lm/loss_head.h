// SPDX-License-Identifier: Apache-2.0
// Stage two as the trainer sees it: hidden states in, loss and their gradient out.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_LOSS_HEAD_H_
#define LOSSD_EXAMPLES_NGRAM_LM_LOSS_HEAD_H_

#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace lossd::ngram_lm {

// N rows. The memory is the caller's and must stay until the ticket has been called or destroyed.
struct LossRequest {
  uint64_t step = 0;                  // of the head
  uint64_t microbatch = 0;            // within the step
  absl::Span<const float> hidden;     // [N, D]
  absl::Span<const int32_t> targets;  // [N]
  // What the summed loss is divided by before gradients are taken.
  double normalizer = 1;
  // [N, D]: where dL/dx goes; the head's own gradient is accumulated as well. Empty: loss only.
  absl::Span<float> grad_hidden;
  // Empty, or [N]: the most likely class of each row.
  absl::Span<int32_t> argmax;
};

struct LossSums {
  double loss = 0;  // nats, summed over rows, before the normalizer
  int64_t rows = 0;
  int64_t correct = 0;  // rows whose most likely class is the target
};

class LossHead {
 public:
  // Called once: blocks until the request is done. Destroying it uncalled cancels the request.
  using Ticket = absl::AnyInvocable<absl::StatusOr<LossSums>()>;

  virtual ~LossHead() = default;

  // The head's open step, which training requests name.
  virtual uint64_t step() const = 0;
  // Starts a request. Several may be under way.
  virtual Ticket Start(const LossRequest& request) = 0;
  // Updates the head from microbatches 0 .. microbatches - 1 of the open step and opens the next one.
  virtual absl::Status ApplyStep(int64_t microbatches, double learning_rate) = 0;
};

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_LOSS_HEAD_H_
