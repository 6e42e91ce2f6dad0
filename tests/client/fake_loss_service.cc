// SPDX-License-Identifier: Apache-2.0
// ComputeLoss and ReleaseMicrobatch of the fake server.
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "tests/client/fake_services.h"

namespace lossd::fake {
namespace {

bool IsValid(const v1::OpenMicrobatch& open, uint64_t row) {
  const int32_t ignore = open.options().has_ignore_index() ? open.options().ignore_index() : -100;
  return open.targets(static_cast<int>(row - open.rows().begin())) != ignore;
}

class FakeLossService final : public v1::LossService::Service {
 public:
  explicit FakeLossService(FakeState* state) : state_(state) {}

  using Stream = grpc::ServerReaderWriter<v1::ComputeLossResponse, v1::ComputeLossRequest>;

  grpc::Status ComputeLoss(grpc::ServerContext* context, Stream* stream) override {
    v1::ComputeLossRequest request;
    if (!stream->Read(&request)) return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "nothing opened");
    if (grpc::Status status = Ask(request); !status.ok()) return status;
    if (request.has_backward()) return Backward(request.backward(), stream);
    const v1::OpenMicrobatch open = request.open();
    v1::ComputeLossResponse accepted;
    v1::MicrobatchSummary summary;
    if (grpc::Status status = Open(open, accepted.mutable_accepted()); !status.ok()) return status;
    if (!stream->Write(accepted)) return grpc::Status::CANCELLED;
    uint64_t rows_left = 0;
    for (uint64_t row = open.rows().begin(); row < open.rows().end(); ++row) rows_left += IsValid(open, row);
    summary.set_valid_rows(rows_left);
    while (stream->Read(&request)) {
      if (grpc::Status status = Ask(request); !status.ok()) return status;
      v1::ComputeLossResponse response;
      grpc::Status status = Compute(open, request, accepted.accepted(), &response, &summary, &rows_left);
      if (!status.ok()) return status;
      std::function<bool(v1::ComputeLossResponse*)> on_slice;
      double delay;
      {
        absl::MutexLock lock(&state_->mu);
        on_slice = state_->faults.on_slice;
        delay = state_->faults.slice_delay_seconds;
      }
      if (delay > 0) absl::SleepFor(absl::Seconds(delay));
      if (on_slice && !on_slice(&response)) continue;
      if (!stream->Write(response)) return grpc::Status::CANCELLED;
    }
    if (context->IsCancelled()) return grpc::Status::CANCELLED;
    if (rows_left > 0) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, absl::StrCat(rows_left, " rows are missing"));
    }
    return Summarize(stream, open, accepted.accepted(), summary);
  }

 private:
  grpc::Status Ask(const v1::ComputeLossRequest& request) {
    absl::MutexLock lock(&state_->mu);
    return state_->faults.on_request ? state_->Apply(state_->faults.on_request(request)) : grpc::Status::OK;
  }

  grpc::Status Open(const v1::OpenMicrobatch& open, v1::MicrobatchAccepted* accepted) {
    absl::MutexLock lock(&state_->mu);
    ++state_->streams_seen;
    if (state_->faults.refuse_streams > 0) {
      --state_->faults.refuse_streams;
      return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    }
    Head* head = state_->Find(open.head());
    if (head == nullptr) return state_->NotFound(open.head());
    if (grpc::Status status = state_->CheckMeant(open, *head, "open."); !status.ok()) return status;
    if (open.accumulate_gradients() && open.step() != head->step) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION,
                           absl::StrCat("step ", open.step(), " is not open"), "open.step",
                           absl::StrCat(open.step()));
    }
    if (static_cast<uint64_t>(open.targets_size()) != open.rows().end() - open.rows().begin()) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "open.targets has a wrong size",
                           "open.targets");
    }
    for (int i = 0; i < open.targets_size(); ++i) {
      const int32_t target = open.targets(i);
      if (!IsValid(open, open.rows().begin() + i)) continue;
      if (target < 0 || static_cast<uint64_t>(target) >= head->spec.vocab_size()) {
        return state_->Error(grpc::StatusCode::INVALID_ARGUMENT,
                             absl::StrCat("open.targets[", i, "] is ", target),
                             absl::StrCat("open.targets[", i, "]"), absl::StrCat(target));
      }
    }
    if (open.retain()) {
      Head::Retained& retained = head->retained[open.microbatch_id()];
      retained.dtype = open.hidden_dtype();
      for (int i = 0; i < open.targets_size(); ++i) {
        retained.targets[open.rows().begin() + i] =
            IsValid(open, open.rows().begin() + i) ? open.targets(i) : -1;
      }
    }
    *accepted->mutable_state() = state_->StateOf(*head);
    *accepted->mutable_limits() = state_->Limits();
    if (state_->faults.on_accepted) state_->faults.on_accepted(accepted);
    return grpc::Status::OK;
  }

  // Whether the call may go on as it was accepted.
  grpc::Status CheckUnchanged(const v1::OpenMicrobatch& open, const v1::HeadState& accepted, const Head& head)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu) {
    const v1::HeadState now = state_->StateOf(head);
    const bool in_step = open.accumulate_gradients() || open.retain();
    if (in_step && accepted.generation() != now.generation()) {
      return state_->Error(grpc::StatusCode::ABORTED, "the gradients were zeroed under the call");
    }
    if (accepted.weights_version() != now.weights_version()) {
      return state_->Error(grpc::StatusCode::ABORTED, "the weights changed under the call");
    }
    return grpc::Status::OK;
  }

  grpc::Status Compute(const v1::OpenMicrobatch& open, const v1::ComputeLossRequest& request,
                       const v1::MicrobatchAccepted& accepted, v1::ComputeLossResponse* response,
                       v1::MicrobatchSummary* summary, uint64_t* rows_left) {
    absl::MutexLock lock(&state_->mu);
    const v1::RowRange& rows = request.slice().rows();
    Head* head = state_->Find(open.head());
    if (head == nullptr) return state_->NotFound(open.head());
    if (grpc::Status status = CheckUnchanged(open, accepted.state(), *head); !status.ok()) return status;
    ++state_->slices_seen;
    if (state_->faults.fail_slice) {
      const int code = state_->faults.fail_slice(state_->slices_seen);
      if (code != 0 && state_->faults.restart_on_failure) state_->Restart();
      if (code == grpc::StatusCode::UNAVAILABLE)
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "socket closed");
      if (code != 0)
        return state_->Error(static_cast<grpc::StatusCode>(code), "injected fault", "slice.rows");
    }
    if (rows.begin() < open.rows().begin() || rows.end() > open.rows().end() || rows.begin() >= rows.end()) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "slice.rows outside the range", "slice.rows");
    }
    const uint64_t count = rows.end() - rows.begin();
    const uint64_t d = head->spec.hidden_size();
    const uint64_t row_bytes = d * (open.hidden_dtype() == v1::DTYPE_FP32 ? 4 : 2);
    if (count > accepted.limits().max_rows() || request.payload().size() > accepted.limits().max_bytes()) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, absl::StrCat("slice of ", count, " rows"),
                           "slice.rows");
    }
    if (request.payload().size() != count * row_bytes) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "payload has a wrong size", "payload");
    }
    state_->rows_seen += count;
    const std::vector<float> x = ToFloats(request.payload(), open.hidden_dtype());
    std::vector<float> dx(x.size(), 0.0f);
    v1::SliceResult* result = response->mutable_slice();
    *result->mutable_rows() = rows;
    for (uint64_t row = rows.begin(); row < rows.end(); ++row) {
      const bool valid = IsValid(open, row);
      const int at = static_cast<int>(row - open.rows().begin());
      const size_t first = (row - rows.begin()) * d;
      const int32_t target = open.targets(at);
      double sum = 0;
      for (size_t i = first; i < first + d; ++i) {
        sum += x[i];
        dx[i] = valid ? 2 * x[i] : 0;
      }
      const float weight = open.row_weights_size() > 0 ? open.row_weights(at) : 1.0f;
      const double loss = valid ? (sum + 0.25 * target) * weight : 0;
      const int32_t argmax = !valid ? -1 : row % 2 == 0 ? target : target + 1;
      if (open.want_row_loss()) result->add_row_loss(loss);
      if (open.want_row_lse()) result->add_row_lse(valid ? loss + 1 : 0);
      if (open.want_row_entropy()) result->add_row_entropy(valid ? 0.125f * target : 0);
      if (open.want_row_logprob()) result->add_row_logprob(valid ? -loss : 0);
      if (open.want_row_argmax()) result->add_row_argmax(argmax);
      if (!valid) continue;
      if (open.retain()) {
        head->retained[open.microbatch_id()].hidden[row].assign(x.begin() + first, x.begin() + first + d);
      }
      --*rows_left;
      ++head->total_rows;
      summary->set_loss_sum(summary->loss_sum() + loss);
      if (open.want_row_entropy()) summary->set_entropy_sum(summary->entropy_sum() + 0.125 * target);
      summary->set_correct_rows(summary->correct_rows() + (argmax == target));
      if (!open.accumulate_gradients()) continue;
      if (head->ledger[open.microbatch_id()].insert(row).second) {
        summary->set_accumulated_rows(summary->accumulated_rows() + 1);
        head->weight_gradient[target] += sum;
      } else {
        summary->set_repeated_rows(summary->repeated_rows() + 1);
      }
    }
    summary->set_queue_seconds(summary->queue_seconds() + 0.001);
    summary->set_compute_seconds(summary->compute_seconds() + 0.002);
    if (open.want_grad_hidden()) response->set_payload(ToBytes(dx, open.hidden_dtype()));
    return grpc::Status::OK;
  }

  // dL/dx = 2 x times the row's grad_loss, in slices of 7 rows, the last one first.
  grpc::Status Backward(const v1::OpenBackward& open, Stream* stream) {
    std::vector<v1::ComputeLossResponse> responses(1);
    {
      absl::MutexLock lock(&state_->mu);
      ++state_->streams_seen;
      Head* head = state_->Find(open.head());
      if (head == nullptr) return state_->NotFound(open.head());
      if (grpc::Status status = state_->CheckMeant(open, *head, "backward."); !status.ok()) return status;
      const auto it = head->retained.find(open.microbatch_id());
      if (it == head->retained.end() || it->second.targets.count(open.rows().end() - 1) == 0) {
        return state_->Error(grpc::StatusCode::NOT_FOUND, "the rows are not retained",
                             "backward.microbatch_id");
      }
      *responses[0].mutable_accepted()->mutable_state() = state_->StateOf(*head);
      v1::MicrobatchSummary summary;
      for (uint64_t end = open.rows().end(); end > open.rows().begin();
           end -= std::min(end - open.rows().begin(), uint64_t{7})) {
        const uint64_t begin = std::max(open.rows().begin(), end - std::min(end, uint64_t{7}));
        responses.push_back(BackwardSlice(open, it->second, begin, end, head, &summary));
      }
      *summary.mutable_state() = state_->StateOf(*head);
      *responses.emplace_back().mutable_summary() = summary;
      if (state_->faults.fail_slice && state_->faults.fail_slice(++state_->slices_seen) != 0)
        responses.resize(2);
    }
    for (const auto& response : responses) stream->Write(response);
    const bool whole = responses.back().has_summary();
    return whole ? grpc::Status::OK : grpc::Status(grpc::StatusCode::UNAVAILABLE, "socket closed");
  }

  v1::ComputeLossResponse BackwardSlice(const v1::OpenBackward& open, const Head::Retained& retained,
                                        uint64_t begin, uint64_t end, Head* head,
                                        v1::MicrobatchSummary* summary) {
    v1::ComputeLossResponse response;
    response.mutable_slice()->mutable_rows()->set_begin(begin);
    response.mutable_slice()->mutable_rows()->set_end(end);
    std::vector<float> dx;
    for (uint64_t row = begin; row < end; ++row) {
      const auto it = retained.hidden.find(row);
      if (it == retained.hidden.end()) {
        dx.insert(dx.end(), head->spec.hidden_size(), 0.0f);
        continue;
      }
      const float gradient = open.grad_loss(static_cast<int>(row - open.rows().begin()));
      double sum = 0;
      for (float x : it->second) {
        dx.push_back(2 * gradient * x);
        sum += x;
      }
      summary->set_valid_rows(summary->valid_rows() + 1);
      if (!open.accumulate_gradients()) continue;
      const bool added = head->ledger[open.microbatch_id()].insert(row).second;
      if (added) head->weight_gradient[retained.targets.at(row)] += gradient * sum;
      summary->set_accumulated_rows(summary->accumulated_rows() + added);
      summary->set_repeated_rows(summary->repeated_rows() + !added);
    }
    if (open.want_grad_hidden()) response.set_payload(ToBytes(dx, retained.dtype));
    return response;
  }

 public:
  grpc::Status ReleaseMicrobatch(grpc::ServerContext*, const v1::ReleaseMicrobatchRequest* request,
                                 v1::ReleaseMicrobatchResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    response->set_released(head->retained.erase(request->microbatch_id()) > 0);
    *response->mutable_state() = state_->StateOf(*head);
    return grpc::Status::OK;
  }

 private:
  grpc::Status Summarize(Stream* stream, const v1::OpenMicrobatch& open,
                         const v1::MicrobatchAccepted& accepted, const v1::MicrobatchSummary& summary) {
    std::vector<v1::ComputeLossResponse> responses;
    {
      absl::MutexLock lock(&state_->mu);
      Head* head = state_->Find(open.head());
      if (head == nullptr) return state_->NotFound(open.head());
      if (grpc::Status status = CheckUnchanged(open, accepted.state(), *head); !status.ok()) return status;
      if (open.accumulate_gradients()) head->ledger[open.microbatch_id()];
      if (state_->faults.extra) responses = state_->faults.extra();
      if (!state_->faults.no_summary) {
        v1::ComputeLossResponse response;
        *response.mutable_summary() = summary;
        *response.mutable_summary()->mutable_state() = state_->StateOf(*head);
        response.mutable_summary()->set_normalizer(open.reduction() == v1::REDUCTION_MEAN ? open.normalizer()
                                                                                          : 1);
        if (state_->faults.on_summary) state_->faults.on_summary(response.mutable_summary());
        responses.push_back(response);
      }
    }
    for (const auto& response : responses) stream->Write(response);
    return grpc::Status::OK;
  }

  FakeState* const state_;
};

}  // namespace

std::unique_ptr<v1::LossService::Service> MakeLossService(FakeState* state) {
  return std::make_unique<FakeLossService>(state);
}

}  // namespace lossd::fake
