// SPDX-License-Identifier: Apache-2.0
// What the client remembers of heads between calls (HeadCache): the limits on slices, and to which gradients
// the rows of the open step were added. AnswerCheck compares the answers to one call with that.
//
// Thread-safe. Memory is bounded by the number of heads that the client has used.
// client/python/src/lossd/_head_cache.py and _loss_call.py do the same;
// tests/client/golden/incarnations.json holds both clients to it.
#ifndef LOSSD_CLIENT_CPP_HEAD_CACHE_H_
#define LOSSD_CLIENT_CPP_HEAD_CACHE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client::internal {

// What the server has said of a head.
struct HeadInfo {
  uint64_t hidden_size = 0;  // D
  v1::SliceLimits limits;
  bool histories = false;  // the server knows of histories, and so of optimizers that begin with a step
};

// Names the gradients that a server process has accumulated for a head since they were last zero.
struct GradientsId {
  uint64_t incarnation = 0;
  uint64_t generation = 0;  // 0: not known, or the server is one that does not say

  static GradientsId Of(const v1::HeadState& state) { return {state.incarnation(), state.generation()}; }
};

// Names in an opening message the gradients that it is meant for; nullopt: any.
template <typename Message>
void SetMeant(const std::optional<GradientsId>& meant, Message* message) {
  if (!meant.has_value()) return;
  message->set_incarnation(meant->incarnation);
  if (meant->generation != 0) message->set_generation(meant->generation);
}

// A step of a head as a call found it when it began.
struct TrainerStep {
  std::string head;
  uint64_t step = 0;
  uint64_t starts = 0;  // how often this client had started a step of the head over
};

// What the client remembers of all heads. Thread-safe.
class HeadCache {
 public:
  // `expected_incarnation`: ClientOptions's.
  explicit HeadCache(uint64_t expected_incarnation) : expected_incarnation_(expected_incarnation) {}

  std::optional<HeadInfo> Facts(absl::string_view head) const;
  void Learn(const v1::HeadDescription& description);
  // The head's facts are to be learnt anew; what was accumulated stays remembered.
  void ForgetFacts(absl::string_view head);

  // For a call that begins.
  TrainerStep StepOf(absl::string_view head, uint64_t step) const;
  // ABORTED (IsStepDiscarded) if this client has started the step over since the call began.
  absl::Status CheckCurrent(const TrainerStep& at) const;

  // Rows of the step are being added to these gradients. ABORTED (RestartOf, IsStepDiscarded) if earlier ones
  // of the step went to others, or if another process is expected; then nothing changes.
  absl::Status NoteAccumulation(const TrainerStep& at, const GradientsId& gradients);
  // Where rows of the step have to go, since earlier ones went there or since it is expected; nullopt:
  // anywhere.
  std::optional<GradientsId> GradientsOf(const TrainerStep& at) const;
  // As NoteAccumulation, for an answer that says where the head stands. Nothing is noted. If this client has
  // started the step over meanwhile, there is nothing to check.
  absl::Status Check(const TrainerStep& at, const GradientsId& gradients) const;
  // `status`, the error of a call, or the ABORTED that it means: RestartOf, IsStepDiscarded.
  absl::Status Interpret(const TrainerStep& at, const absl::Status& status) const;

  // The step has been applied: its gradients are not outstanding any more. Gradients of a later step stay so.
  void CloseStep(absl::string_view head, uint64_t step);
  // This client starts its step over: no gradients of the head are outstanding any more. Calls of the step
  // that are under way are not repeated.
  void ForgetAccumulation(absl::string_view head);

 private:
  struct Accumulation {
    uint64_t step = 0;
    GradientsId gradients;
  };

  bool IsCurrent(const TrainerStep& at) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  std::optional<GradientsId> Meant(const TrainerStep& at) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckLocked(const TrainerStep& at, const GradientsId& now) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const uint64_t expected_incarnation_;
  mutable absl::Mutex mu_;
  absl::flat_hash_set<std::string> acknowledged_ ABSL_GUARDED_BY(mu_);  // heads for which nothing is expected
  absl::flat_hash_map<std::string, HeadInfo> facts_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, Accumulation> accumulations_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, uint64_t> starts_ ABSL_GUARDED_BY(mu_);  // TrainerStep::starts
};

// Checks that all answers to one loss call are about one state of a head, and that this state has the earlier
// rows of the step. Thread-safe.
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

#endif  // LOSSD_CLIENT_CPP_HEAD_CACHE_H_
