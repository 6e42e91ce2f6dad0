// SPDX-License-Identifier: Apache-2.0
// One loss computation: learns the head's limits, splits the rows over streams, repeats what broke and sums
// up.
//
// Threads: Start, Cancel, Done, Wait and WaitFor are thread-safe. Everything else runs on the executor. Core
// keeps the object alive until the call is done.
#ifndef LOSSD_CLIENT_CPP_LOSS_CALL_H_
#define LOSSD_CLIENT_CPP_LOSS_CALL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/core.h"
#include "client/cpp/head_cache.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/loss_stream.h"
#include "client/cpp/loss_work.h"

namespace lossd::client::internal {

// How a call travels. Zeros: the client's defaults.
struct CallOptions {
  int streams = 0;
  std::optional<uint64_t> slice_bytes;
  absl::Duration timeout;
  int max_attempts = 0;
  absl::Duration patience = absl::Milliseconds(100);  // StreamJob::patience
};

class LossCall : public std::enable_shared_from_this<LossCall> {
 public:
  LossCall(Core* core, std::unique_ptr<const LossWork> work, const CallOptions& options,
           LossCallback callback);

  void Start();
  void Cancel();
  bool Done() const;
  absl::StatusOr<LossResult> Wait();
  bool WaitFor(absl::Duration timeout);

 private:
  // A range of rows and the stream that carries it.
  struct Part {
    Rows rows;
    int attempts = 0;
    int unanswered = 0;  // attempts after which the call was sent again
    bool done = false;
    SliceRule rule;  // of the last attempt
    absl::Status
        refused;  // why the server refused the last attempt, if the head's limits are being asked for
    std::shared_ptr<LossStream> stream;  // the attempt under way
  };
  struct Describe;  // the DescribeHead call under way

  void Begin();
  void StartDescribe();
  void FinishDescribe(const absl::Status& status);
  void Launch(const HeadInfo& facts);
  // Unless the caller has said so.
  int StreamsWanted() const;
  // Of rows that travel in either direction.
  uint64_t MovedBytes() const { return work_->MovedRows() * work_->row_bytes(); }
  void StartPart(size_t index);
  void FinishPart(size_t index, const StreamEnd& end);

  absl::StatusOr<SliceRule> Rule() const;
  // Whether the head's limits, as known now, ask for other slices than the part's last attempt sent.
  bool WouldCutOtherwise(const Part& part) const;
  void AddSummary(const v1::MicrobatchSummary& summary);
  // The stream was refused, maybe because the head's limits are not what they were: asks for them and tries
  // again if so. False if that would not help.
  bool Relearn(Part& part, const absl::Status& status);
  void Relaunch(const HeadInfo& facts);
  // Whether attempt number `attempts` may be followed by another one; if so, when.
  std::optional<absl::Time> NextAttempt(const absl::Status& status, int attempts, Repeat repeat) const;
  // How often the part was tried, for the message: of attempts that the server answered it says all.
  int AttemptsOf(const Part& part, const absl::Status& status) const;
  // Whether the round of that number goes on.
  bool Goes(int round) const { return !finishing_ && rounds_ == round && !start_over_.has_value(); }
  // If the whole call may begin again after `status`: sees to that. False if not.
  bool BeginAgain(const absl::Status& status);
  // Begins again, once nothing is under way any more.
  void MaybeStartOver();
  void StartOver();
  // Remembers the first error and cancels what is under way.
  void Fail(const absl::Status& status);
  void CancelStreams();
  // Finishes if nothing is under way any more.
  void MaybeFinish();
  void Finish();
  absl::StatusOr<LossResult> MakeResult();

  // Set at construction.
  Core* const core_;
  const std::unique_ptr<const LossWork> work_;
  const CallOptions options_;
  const absl::Time start_;
  const absl::Time deadline_;
  const std::shared_ptr<PayloadHolds> holds_ = PayloadHolds::Create();
  AnswerCheck answers_;  // gRPC's threads use it too

  // Used on the executor only.
  LossCallback callback_;
  HeadInfo facts_;
  bool facts_are_fresh_ = false;  // asked for again by this call, since a stream was refused
  std::shared_ptr<Describe> describe_;
  bool describing_ = false;  // from the first attempt to the last one, waits included
  int describe_attempts_ = 0;
  int rounds_ = 1;                        // how often all rows were begun
  std::optional<absl::Time> start_over_;  // a round has failed: when the next one begins
  std::vector<Part> parts_;
  int under_way_ = 0;       // streams and descriptions
  bool finishing_ = false;  // only waits for what is under way
  bool finished_ = false;
  absl::Status error_;  // the first one
  LossResult total_;

  mutable absl::Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;    // by the caller
  bool done_ ABSL_GUARDED_BY(mu_) = false;         // result_ is final
  bool called_back_ ABSL_GUARDED_BY(mu_) = false;  // nothing will happen any more
  absl::StatusOr<LossResult> result_ ABSL_GUARDED_BY(mu_) = absl::UnknownError("not done");
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_LOSS_CALL_H_
