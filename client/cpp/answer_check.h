// SPDX-License-Identifier: Apache-2.0
// Whether the answers to one loss call are about one state of a head, and the right one: that which has the
// earlier rows of the step.
//
// Thread-safe. client/python/src/lossd/_answer_check.py does the same; tests/client/golden/incarnations.json
// holds both to it.
#ifndef LOSSD_CLIENT_CPP_ANSWER_CHECK_H_
#define LOSSD_CLIENT_CPP_ANSWER_CHECK_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/head_cache.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client::internal {

class AnswerCheck {
 public:
  // `head_cache` must outlive this. `accumulates`: the call adds gradients to `step`, which then is there.
  // `in_step`: what the call does ends with the gradients of the step: it accumulates, retains, or uses what
  // was retained.
  AnswerCheck(HeadCache* head_cache, std::string head, std::optional<uint64_t> step, bool accumulates,
              bool in_step);

  // Notes where the server stands as a stream is accepted. ABORTED (RestartOf, IsStepDiscarded) if it is
  // another process, or has other gradients, than earlier answers of the call or earlier rows of the step
  // came from; ABORTED if step or weights have changed during the call; INTERNAL if the answer cannot be
  // right.
  absl::Status Accept(const v1::HeadState& state);
  // The error as the caller should see it: the ABORTED that it means, if it means one.
  absl::Status Interpret(const absl::Status& status) const;
  // What the next stream is meant for: where earlier rows of the step, or of this call, went; nullopt:
  // anything. The generation is 0 for a call that does not belong to a step. ABORTED (IsStepDiscarded) if
  // this client has started the step over since the call began.
  absl::StatusOr<std::optional<GradientsId>> Meant() const;
  // The call begins again, with whatever it finds. Only for calls that do not belong to a step.
  void BeginAgain();

 private:
  absl::Status CheckStep(const v1::HeadState& state);
  absl::Status Restarted(uint64_t before, uint64_t now) const;

  HeadCache* const head_cache_;
  const std::string head_;
  const bool accumulates_;
  const bool in_step_;
  const std::optional<TrainerStep> at_;  // the step that the call belongs to

  mutable absl::Mutex mu_;
  std::optional<v1::HeadState> state_ ABSL_GUARDED_BY(mu_);  // where the first stream found the server
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_ANSWER_CHECK_H_
