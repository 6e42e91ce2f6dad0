// Whether the answers to one loss call come from one server process at one step, and from the one that has
// the earlier rows of the step.
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
#include "absl/synchronization/mutex.h"
#include "client/cpp/head_cache.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client::internal {

class AnswerCheck {
 public:
  // `head_cache` must outlive this. `accumulates`: the call adds gradients to `step`, which then is there.
  AnswerCheck(HeadCache* head_cache, std::string head, std::optional<uint64_t> step, bool accumulates)
      : head_cache_(head_cache), head_(std::move(head)), step_(step), accumulates_(accumulates) {}

  // Notes where the server stands as a stream is accepted. ABORTED, with a Restart, if it is another process
  // than earlier answers of the call or earlier rows of the step came from; ABORTED if the step has changed
  // during the call; INTERNAL if the answer cannot be right.
  absl::Status Accept(const v1::HeadState& state);
  // The error as the caller should see it: ABORTED, with a Restart, if it comes from another process than
  // that.
  absl::Status Interpret(const absl::Status& status) const;
  // The server process that has earlier rows of the step, or of this call; nullopt: none has.
  std::optional<uint64_t> KnownIncarnation() const;

 private:
  HeadCache* const head_cache_;
  const std::string head_;
  const std::optional<uint64_t> step_;
  const bool accumulates_;

  mutable absl::Mutex mu_;
  std::optional<v1::HeadState> state_ ABSL_GUARDED_BY(mu_);  // where the first stream found the server
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_ANSWER_CHECK_H_
