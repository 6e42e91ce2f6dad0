// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/loss_call.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/call_errors.h"
#include "client/cpp/connections.h"
#include "kernels/clocks/clock.h"

namespace lossd::client::internal {
namespace {

void NameRun(const std::string& run, v1::ComputeLossRequest* first) {
  first->has_backward() ? first->mutable_backward()->set_run(run) : first->mutable_open()->set_run(run);
}

bool RefusedForLimits(const absl::Status& status) {
  return status.code() == absl::StatusCode::kInvalidArgument ||
         (status.code() == absl::StatusCode::kResourceExhausted && !IsTransient(status));
}

bool Aborted(const absl::Status& status) { return status.code() == absl::StatusCode::kAborted; }

}  // namespace

struct LossCall::Describe {
  grpc::ClientContext context;
  v1::DescribeHeadRequest request;
  v1::HeadDescription response;
};

LossCall::LossCall(Core* core, std::unique_ptr<const LossWork> work, const CallOptions& options,
                   LossCallback callback)
    : core_(core),
      work_(std::move(work)),
      options_(options),
      start_(clocks::SteadyNow()),
      deadline_(start_ +
                (options.timeout > absl::ZeroDuration() ? options.timeout : core->options().loss_timeout)),
      answers_(&core->head_cache(), work_->head(), work_->step(), work_->accumulates(), work_->in_step()),
      callback_(std::move(callback)) {}

void LossCall::Start() {
  core_->Add(shared_from_this());
  core_->executor().RunOrPost([self = shared_from_this()] { self->Begin(); });
}

void LossCall::Cancel() {
  absl::MutexLock lock(&mu_);
  if (done_ || cancelled_) return;
  cancelled_ = true;
  // The executor outlives this: the client waits for calls that are not done, and mu_ keeps it that way.
  core_->executor().Post([self = shared_from_this()] {
    if (!self->finishing_) self->Fail(absl::CancelledError("cancelled by the caller"));
  });
}

bool LossCall::Done() const {
  absl::MutexLock lock(&mu_);
  return done_;
}

absl::StatusOr<LossResult> LossCall::Wait() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&called_back_));
  return result_;
}

bool LossCall::WaitFor(absl::Duration timeout) {
  absl::MutexLock lock(&mu_);
  return clocks::AwaitFor(mu_, absl::Condition(&called_back_), timeout);
}

void LossCall::Begin() {
  if (absl::Status status = work_->Validate(); !status.ok()) return Fail(status);
  std::optional<HeadInfo> facts = core_->head_cache().Facts(work_->head());
  if (facts.has_value() && facts->hidden_size == work_->hidden_size()) {
    Launch(*facts);
  } else {
    StartDescribe();
  }
}

void LossCall::StartDescribe() {
  auto describe = std::make_shared<Describe>();
  describe->request.set_head(work_->head());
  SetDeadline(deadline_, &describe->context);
  describing_ = true;
  ++describe_attempts_;
  ++under_way_;
  describe_ = describe;
  core_->connections().heads()->async()->DescribeHead(
      &describe->context, &describe->request, &describe->response,
      [self = shared_from_this()](const grpc::Status& status) {
        self->core_->executor().Post([self, result = CallStatus(status, self->core_->connections().peer())] {
          self->FinishDescribe(result);
        });
      });
}

void LossCall::FinishDescribe(const absl::Status& status) {
  --under_way_;
  const std::shared_ptr<Describe> describe = std::exchange(describe_, nullptr);
  if (finishing_) return MaybeFinish();
  if (start_over_.has_value()) return MaybeStartOver();
  if (!status.ok()) {
    const std::optional<absl::Time> next = NextAttempt(status, describe_attempts_, Repeat::kIfTransient);
    if (!next.has_value()) return Fail(WithAttempts(answers_.Interpret(status), describe_attempts_));
    core_->executor().PostAt(*next, [self = shared_from_this(), round = rounds_] {
      if (self->Goes(round)) self->StartDescribe();
    });
    return;
  }
  core_->head_cache().Learn(describe->response);
  const uint64_t hidden_size = describe->response.spec().hidden_size();
  if (hidden_size != work_->hidden_size()) {
    return Fail(ArgumentError(
        "microbatch.hidden_size", work_->hidden_size(),
        absl::StrCat("is ", work_->hidden_size(), ", but head \"", work_->head(), "\" has ", hidden_size)));
  }
  const HeadInfo facts{hidden_size, describe->response.slice_limits()};
  describing_ = false;
  facts_are_fresh_ = !parts_.empty();
  if (parts_.empty()) {
    Launch(facts);
  } else {
    Relaunch(facts);
  }
}

void LossCall::Launch(const HeadInfo& facts) {
  facts_ = facts;
  const int streams = options_.streams > 0 ? options_.streams : StreamsWanted();
  const std::vector<Rows> ranges = work_->Split(streams, core_->options().max_message_bytes);
  total_.streams = static_cast<int>(ranges.size());
  parts_.resize(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) parts_[i].rows = ranges[i];
  for (size_t i = 0; i < ranges.size() && !finishing_; ++i) StartPart(i);
}

int LossCall::StreamsWanted() const {
  const int connections = core_->connections().count();
  // Where rows have an order, a range of rows may only be answered after those before it.
  const uint64_t bytes = MovedBytes();
  if (bytes == 0 || work_->gpu().has_value() || facts_.limits.row_grid() > 0) return connections;
  if (core_->connections().RegionFor(std::nullopt, bytes) == nullptr) return connections;
  return std::max(connections, StreamsInRegion(bytes, std::thread::hardware_concurrency()));
}

void LossCall::StartPart(size_t index) {
  Part& part = parts_[index];
  const absl::StatusOr<SliceRule> rule = Rule();
  if (!rule.ok()) return Fail(rule.status());
  part.rule = *rule;
  const absl::StatusOr<std::optional<GradientsId>> meant = answers_.Meant();
  if (!meant.ok()) return Fail(meant.status());
  // Where rows have an order, those of other calls may have to come before a slice is answered.
  auto places = std::make_unique<SlicePlaces>(
      MovedBytes() > 0 ? core_->connections().RegionFor(work_->gpu(), MovedBytes()) : nullptr,
      /*may_wait=*/rule->row_grid == 0, work_->gpu());
  const SliceRule cut = places->RuleFor(*rule, part.rows, work_->row_bytes());
  absl::StatusOr<StreamWork> work = work_->Prepare(part.rows, cut, *meant);
  if (!work.ok()) return Fail(work.status());
  NameRun(core_->options().run, &work->first);
  places->Name(*work, &work->first);
  StreamJob job{.work = *std::move(work),
                .rule = *rule,
                .deadline = deadline_,
                .peer = core_->connections().peer(),
                .holds = holds_,
                .places = std::move(places),
                .moved = core_->connections().moved(),
                .executor = &core_->executor(),
                .patience = options_.patience};
  auto stream = std::make_shared<LossStream>(
      std::move(job),
      [self = shared_from_this()](const v1::HeadState& state) { return self->answers_.Accept(state); },
      [self = shared_from_this(), index](StreamEnd end) {
        auto finish = [self, index, end = std::move(end)] { self->FinishPart(index, end); };
        // After an error another attempt may begin, which may open a region.
        if (end.status.ok()) return self->core_->executor().RunOrPost(std::move(finish));
        self->core_->executor().Post(std::move(finish));
      });
  ++part.attempts;
  ++under_way_;
  part.stream = stream;
  core_->connections().Begin();
  stream->Start(core_->connections().channel(index));
}

std::optional<absl::Time> LossCall::NextAttempt(const absl::Status& status, int attempts,
                                                Repeat repeat) const {
  RetryOptions retry = core_->options().retry;
  if (options_.max_attempts > 0) retry.max_attempts = options_.max_attempts;
  const absl::Time now = clocks::SteadyNow();
  const auto wait = WaitBeforeRepeat(retry, status, attempts, deadline_ - now, Jitter(), repeat);
  if (!wait.has_value()) return std::nullopt;
  return now + *wait;
}

bool LossCall::Relearn(Part& part, const absl::Status& status) {
  if (!RefusedForLimits(status)) return false;
  if (facts_are_fresh_ && !WouldCutOtherwise(part)) return false;
  part.refused = status;
  if (facts_are_fresh_) {
    Relaunch(facts_);
  } else if (!describing_) {
    StartDescribe();
  }
  return true;
}

void LossCall::Relaunch(const HeadInfo& facts) {
  facts_ = facts;
  for (size_t i = 0; i < parts_.size() && !finishing_; ++i) {
    Part& part = parts_[i];
    if (part.refused.ok()) continue;
    if (!WouldCutOtherwise(part)) return Fail(part.refused);
    part.refused = absl::OkStatus();
    ++total_.repeats;
    StartPart(i);
  }
}

absl::StatusOr<SliceRule> LossCall::Rule() const {
  return MakeSliceRule(work_->row_bytes(), options_.slice_bytes, facts_.limits);
}

bool LossCall::WouldCutOtherwise(const Part& part) const {
  const absl::StatusOr<SliceRule> rule = Rule();
  return !rule.ok() || rule->max_rows < part.rule.max_rows || rule->row_grid != part.rule.row_grid ||
         rule->max_rows_in_region < part.rule.max_rows_in_region;
}

void LossCall::FinishPart(size_t index, const StreamEnd& end) {
  --under_way_;
  Part& part = parts_[index];
  part.stream = nullptr;
  core_->connections().End();
  total_.sent_bytes += end.sent_bytes;
  total_.received_bytes += end.received_bytes;
  if (start_over_.has_value() && !finishing_) return MaybeStartOver();
  if (end.status.ok()) {
    part.done = true;
    AddSummary(end.summary);
    return MaybeFinish();
  }
  core_->connections().DropUnusableRegions();
  if (finishing_) return MaybeFinish();

  const absl::Status status = answers_.Interpret(end.status);
  if (Relearn(part, status) || BeginAgain(status)) return;
  const std::optional<absl::Time> next = NextAttempt(status, part.attempts, Repeat::kIfTransient);
  if (!next.has_value()) return Fail(WithAttempts(status, AttemptsOf(part, status)));
  ++part.unanswered;
  ++total_.repeats;
  core_->executor().PostAt(*next, [self = shared_from_this(), index, round = rounds_] {
    if (self->Goes(round)) self->StartPart(index);
  });
}

int LossCall::AttemptsOf(const Part& part, const absl::Status& status) const {
  if (IsTransient(status)) return part.attempts;
  // Of a call that may begin again nothing counts until it ends well.
  if (work_->restartable()) return Aborted(status) ? rounds_ : 1;
  return 1 + part.unanswered;
}

bool LossCall::BeginAgain(const absl::Status& status) {
  if (!work_->restartable() || !Aborted(status)) return false;
  start_over_ = NextAttempt(status, rounds_, Repeat::kIfTransientOrAborted);
  if (!start_over_.has_value()) return false;
  if (describe_ != nullptr) describe_->context.TryCancel();
  CancelStreams();
  MaybeStartOver();
  return true;
}

void LossCall::MaybeStartOver() {
  if (under_way_ > 0) return;
  core_->executor().PostAt(*start_over_, [self = shared_from_this()] {
    if (!self->finishing_) self->StartOver();
  });
}

void LossCall::StartOver() {
  ++rounds_;
  start_over_.reset();
  describing_ = false;
  describe_attempts_ = 0;
  answers_.BeginAgain();
  LossResult begun;
  begun.streams = total_.streams;
  begun.repeats = total_.repeats + static_cast<int>(parts_.size());
  begun.sent_bytes = total_.sent_bytes;
  begun.received_bytes = total_.received_bytes;
  total_ = begun;
  for (Part& part : parts_) part = Part{.rows = part.rows};
  for (size_t i = 0; i < parts_.size() && !finishing_ && !start_over_.has_value(); ++i) StartPart(i);
}

void LossCall::AddSummary(const v1::MicrobatchSummary& summary) {
  total_.loss_sum += summary.loss_sum();
  total_.z_loss_sum += summary.z_loss_sum();
  total_.entropy_sum += summary.entropy_sum();
  total_.dropped_mass += summary.dropped_mass();
  total_.sampling_variance += summary.sampling_variance();
  total_.squared_gradient += summary.squared_gradient();
  total_.valid_rows += summary.valid_rows();
  total_.correct_rows += summary.correct_rows();
  total_.accumulated_rows += summary.accumulated_rows();
  total_.repeated_rows += summary.repeated_rows();
  total_.queue_seconds += summary.queue_seconds();
  total_.compute_seconds += summary.compute_seconds();
  total_.incarnation = summary.state().incarnation();
  total_.step = summary.state().step();
}

void LossCall::Fail(const absl::Status& status) {
  if (error_.ok()) error_ = status;
  finishing_ = true;
  if (describe_ != nullptr) describe_->context.TryCancel();
  CancelStreams();
  MaybeFinish();
}

void LossCall::CancelStreams() {
  for (const Part& part : parts_) {
    if (part.stream != nullptr) part.stream->Cancel();
  }
}

void LossCall::MaybeFinish() {
  if (under_way_ > 0) return;
  const bool complete = std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.done; });
  if (!finishing_ && !complete) return;  // a part waits for its repetition
  finishing_ = true;
  if (callback_ == nullptr && holds_->free()) return Finish();
  // At most one task waits on the holds; Finish may still be posted twice.
  holds_->WhenFree([self = shared_from_this()] { self->core_->executor().Post([self] { self->Finish(); }); });
}

absl::StatusOr<LossResult> LossCall::MakeResult() {
  if (!error_.ok()) return error_;
  if (absl::Status status = work_->Conclude(&total_); !status.ok()) return status;
  total_.wall_seconds = absl::ToDoubleSeconds(clocks::SteadyNow() - start_);
  return total_;
}

void LossCall::Finish() {
  if (finished_) return;
  finished_ = true;
  const absl::StatusOr<LossResult> result = MakeResult();
  {
    absl::MutexLock lock(&mu_);
    result_ = result;
    done_ = true;
  }
  if (callback_) std::exchange(callback_, nullptr)(result);
  {
    absl::MutexLock lock(&mu_);
    called_back_ = true;
  }
  core_->Remove(shared_from_this());  // the core may go from here on
}

Core::~Core() {
  absl::flat_hash_set<std::shared_ptr<LossCall>> calls;
  {
    absl::MutexLock lock(&mu_);
    calls = calls_;
  }
  for (const auto& call : calls) call->Cancel();
  auto empty = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return calls_.empty(); };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&empty));
}

void Core::Add(std::shared_ptr<LossCall> call) {
  absl::MutexLock lock(&mu_);
  calls_.insert(std::move(call));
}

void Core::Remove(const std::shared_ptr<LossCall>& call) {
  absl::MutexLock lock(&mu_);
  calls_.erase(call);
}

}  // namespace lossd::client::internal
