// SPDX-License-Identifier: Apache-2.0
// Heads, their tensors, steps and checkpoints of the fake server.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "tests/client/fake_services.h"

namespace lossd::fake {
namespace {

class FakeHeadService final : public v1::HeadService::Service {
 public:
  explicit FakeHeadService(FakeState* state) : state_(state) {}

  grpc::Status CreateHead(grpc::ServerContext*, const v1::CreateHeadRequest* request,
                          v1::HeadDescription* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    const v1::HeadSpec& spec = request->spec();
    if (spec.hidden_size() == 0) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "spec.hidden_size is 0", "spec.hidden_size",
                           "0");
    }
    if (state_->Find(spec.name()) != nullptr) {
      return state_->Error(grpc::StatusCode::ALREADY_EXISTS,
                           absl::StrCat("head \"", spec.name(), "\" exists"), "spec.name", spec.name());
    }
    Head& head = state_->heads[spec.name()] = state_->MakeHead(spec);
    *response = state_->Describe(head);
    return grpc::Status::OK;
  }

  grpc::Status DescribeHead(grpc::ServerContext*, const v1::DescribeHeadRequest* request,
                            v1::HeadDescription* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    if (state_->faults.on_describe) {
      if (grpc::Status status = state_->Apply(state_->faults.on_describe()); !status.ok()) return status;
    }
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    ++state_->describes_seen;
    *response = state_->Describe(*head);
    return grpc::Status::OK;
  }

  grpc::Status ListHeads(grpc::ServerContext*, const v1::ListHeadsRequest*,
                         v1::ListHeadsResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    for (const auto& [name, head] : state_->heads) *response->add_heads() = state_->Describe(head);
    return grpc::Status::OK;
  }

  grpc::Status DeleteHead(grpc::ServerContext*, const v1::DeleteHeadRequest* request,
                          v1::DeleteHeadResponse*) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->heads.erase(request->head()) == 0) return state_->NotFound(request->head());
    return grpc::Status::OK;
  }

  grpc::Status ReadTensor(grpc::ServerContext*, const v1::ReadTensorRequest* request,
                          grpc::ServerWriter<v1::TensorSlice>* writer) override {
    uint64_t row = request->rows().begin();
    for (uint64_t slice = 0;; ++slice) {
      v1::TensorSlice answer;
      bool last = false;
      if (grpc::Status status = ReadSlice(*request, slice, row, &answer, &last); !status.ok()) return status;
      writer->Write(answer);
      if (last) return grpc::Status::OK;
      row = answer.rows().end();
    }
  }

  grpc::Status WriteTensor(grpc::ServerContext*, grpc::ServerReader<v1::WriteTensorRequest>* reader,
                           v1::WriteTensorResponse* response) override {
    v1::WriteTensorRequest request;
    v1::OpenTensor open;
    std::string bytes;
    while (reader->Read(&request)) {
      if (request.has_open()) open = request.open();
      bytes += request.payload();
    }
    absl::MutexLock lock(&state_->mu);
    Head* head = state_->Find(open.head());
    if (head == nullptr) return state_->NotFound(open.head());
    if (open.role() == v1::ROLE_GRADIENT) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "gradients only accumulate", "open.role");
    }
    std::vector<float>& values = head->values[open.param()];
    const uint64_t cols = open.param() == v1::PARAM_WEIGHT ? head->spec.hidden_size() : 1;
    const uint64_t begin = open.has_rows() ? open.rows().begin() : 0;
    const std::vector<float> written = ToFloats(bytes, open.dtype());
    if (begin * cols + written.size() > values.size()) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "too many values", "payload");
    }
    std::copy(written.begin(), written.end(), values.begin() + begin * cols);
    head->weights_version = ++state_->drawn;
    *response->mutable_state() = state_->StateOf(*head);
    response->mutable_rows()->set_begin(begin);
    response->mutable_rows()->set_end(begin + written.size() / cols);
    return grpc::Status::OK;
  }

  grpc::Status AddGradient(grpc::ServerContext*, grpc::ServerReader<v1::AddGradientRequest>* reader,
                           v1::AddGradientResponse* response) override {
    v1::AddGradientRequest request;
    v1::OpenGradient open;
    uint64_t row = 0;
    while (reader->Read(&request)) {
      if (request.has_open()) {
        open = request.open();
        row = open.rows().begin();
      }
      grpc::Status status = AddRows(open, request.payload(), &row, response);
      if (!status.ok()) return status;
    }
    response->mutable_rows()->set_begin(open.rows().begin());
    response->mutable_rows()->set_end(row);
    return grpc::Status::OK;
  }

  grpc::Status GradNorm(grpc::ServerContext*, const v1::GradNormRequest* request,
                        v1::GradNormResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    *response->mutable_state() = state_->StateOf(*head);
    response->set_grad_norm(Norm(*head));
    return grpc::Status::OK;
  }

  grpc::Status ApplyStep(grpc::ServerContext*, const v1::ApplyStepRequest* request,
                         v1::ApplyStepResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->faults.on_apply) {
      if (grpc::Status status = state_->Apply(state_->faults.on_apply(*request)); !status.ok()) return status;
    }
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    if (head->step > 0 && request->step() == head->step - 1) {
      *response = head->last_step;
      response->set_repeated_call(true);
      return grpc::Status::OK;
    }
    uint64_t rows = 0;
    for (const auto& [id, accumulated] : head->ledger) rows += accumulated.size();
    if (grpc::Status status = state_->CheckMeant(*request, *head, ""); !status.ok()) return status;
    if (request->step() != head->step) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION,
                           absl::StrCat("step ", head->step, " is open"), "step",
                           absl::StrCat(request->step()));
    }
    if (request->has_expected_rows() && request->expected_rows() != rows) {
      return state_->Error(
          grpc::StatusCode::FAILED_PRECONDITION,
          absl::StrCat("expected_rows is ", request->expected_rows(), ", but ", rows, " rows are there"),
          "expected_rows", absl::StrCat(request->expected_rows()));
    }
    response->set_grad_norm(Norm(*head));
    response->set_microbatches(head->ledger.size());
    response->set_contributions(head->added.size());
    response->set_rows(rows);
    response->set_skipped(!std::isfinite(Norm(*head)));
    if (response->skipped() && !request->skip_non_finite()) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "the norm is not finite",
                           "skip_non_finite");
    }
    if (!response->skipped()) {
      ++head->updates;
      head->weights_version = ++state_->drawn;
    }
    ++head->step;
    state_->Discard(head);
    *response->mutable_state() = state_->StateOf(*head);
    response->set_applied_incarnation(response->state().incarnation());
    head->last_step = *response;
    // The step was applied, but the answer is lost.
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "connection reset");
    return grpc::Status::OK;
  }

  grpc::Status ZeroGradients(grpc::ServerContext*, const v1::ZeroGradientsRequest* request,
                             v1::ZeroGradientsResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    if (request->step() != head->step) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "not the open step", "step",
                           absl::StrCat(request->step()));
    }
    state_->Discard(head);
    *response->mutable_state() = state_->StateOf(*head);
    return grpc::Status::OK;
  }

  grpc::Status SaveCheckpoint(grpc::ServerContext*, const v1::SaveCheckpointRequest* request,
                              grpc::ServerWriter<v1::SaveCheckpointUpdate>* writer) override {
    absl::MutexLock lock(&state_->mu);
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    const uint64_t bytes = head->values[v1::PARAM_WEIGHT].size() * 4;
    v1::SaveCheckpointUpdate update;
    update.mutable_progress()->set_phase(v1::SAVE_PHASE_WRITING);
    update.mutable_progress()->set_total_bytes(bytes);
    update.mutable_progress()->set_read_bytes(bytes);
    update.mutable_progress()->set_written_bytes(bytes / 2);
    writer->Write(update);
    v1::SaveCheckpointResponse& saved = *update.mutable_saved();
    *saved.mutable_state() = state_->StateOf(*head);
    const std::string name = request->name().empty() ? "step-0000000000" : request->name();
    saved.set_checkpoint(absl::StrCat(request->head(), "/", name));
    saved.set_bytes(bytes);
    saved.set_seconds(0.25);
    head->history.set_checkpoint(saved.checkpoint());
    head->history.set_checkpoint_step(head->step);
    if (request->keep() == 1) saved.add_pruned(absl::StrCat(request->head(), "/old"));
    writer->Write(update);
    return grpc::Status::OK;
  }

  grpc::Status ListCheckpoints(grpc::ServerContext*, const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsResponse* response) override {
    v1::CheckpointInfo& whole = *response->add_checkpoints();
    whole.set_checkpoint("head/step-0000000007");
    whole.set_step(7);
    whole.set_bytes(3 << 20);
    whole.set_saved_unix_seconds(1'700'000'000);
    whole.set_automatic(true);
    whole.mutable_spec()->set_name("head");
    whole.mutable_spec()->set_hidden_size(4);
    whole.mutable_spec()->set_vocab_size(10);
    v1::CheckpointInfo& damaged = *response->add_checkpoints();
    damaged.set_checkpoint("head/damaged");
    damaged.set_error("the manifest's checksum does not match");
    response->set_left_out(2);
    return grpc::Status::OK;
  }

  grpc::Status LoadCheckpoint(grpc::ServerContext*, const v1::LoadCheckpointRequest* request,
                              v1::HeadDescription* response) override {
    absl::MutexLock lock(&state_->mu);
    const std::string name = request->head().empty()
                                 ? request->checkpoint().substr(0, request->checkpoint().find('/'))
                                 : request->head();
    Head* head = state_->Find(name);
    if (head == nullptr) return state_->NotFound(name);
    state_->Discard(head);
    head->weights_version = ++state_->drawn;
    *response = state_->Describe(*head);
    return grpc::Status::OK;
  }

  grpc::Status ResetHead(grpc::ServerContext*, const v1::ResetHeadRequest* request,
                         v1::ResetHeadResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->faults.on_reset) {
      if (grpc::Status status = state_->Apply(state_->faults.on_reset(*request)); !status.ok()) return status;
    }
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    if (request->has_incarnation() && request->incarnation() != state_->incarnation) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "meant for another process", "incarnation");
    }
    const auto [reset, is_new] = head->resets.try_emplace(request->reset_id());
    if (is_new) {
      head->updates = 0;
      if (request->scope() == v1::RESET_SCOPE_ALL) head->step = 0;
      state_->Discard(head);
      *reset->second.mutable_head() = state_->Describe(*head);
    }
    *response = reset->second;
    response->set_repeated_call(!is_new);
    if (!is_new) return grpc::Status::OK;
    // The head was reset, but the answer is lost.
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "connection reset");
    return grpc::Status::OK;
  }

  // Of any name but "missing".
  grpc::Status DeleteCheckpoint(grpc::ServerContext*, const v1::DeleteCheckpointRequest* request,
                                v1::DeleteCheckpointResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    const std::string& checkpoint = request->checkpoint();
    if (checkpoint.ends_with("/missing")) {
      return state_->Error(grpc::StatusCode::NOT_FOUND, "no such checkpoint", "checkpoint", checkpoint);
    }
    const bool is_new = state_->deletions.emplace(request->deletion_id(), checkpoint).second;
    response->set_repeated_call(!is_new);
    response->set_bytes(3 << 20);
    // It is deleted, but the answer is lost.
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "connection reset");
    return grpc::Status::OK;
  }

 private:
  // Three rows of a tensor, from `row` on.
  grpc::Status ReadSlice(const v1::ReadTensorRequest& request, uint64_t number, uint64_t row,
                         v1::TensorSlice* slice, bool* last) {
    absl::MutexLock lock(&state_->mu);
    if (state_->faults.on_read) {
      if (grpc::Status status = state_->Apply(state_->faults.on_read(number)); !status.ok()) return status;
    }
    Head* head = state_->Find(request.head());
    if (head == nullptr) return state_->NotFound(request.head());
    if (head->values.count(request.param()) == 0) {
      return state_->Error(grpc::StatusCode::NOT_FOUND, "no such tensor", "param");
    }
    const uint64_t cols = request.param() == v1::PARAM_WEIGHT ? head->spec.hidden_size() : 1;
    std::vector<float> values = head->values[request.param()];
    const uint64_t rows = values.size() / cols;
    if (request.role() == v1::ROLE_GRADIENT && request.param() == v1::PARAM_WEIGHT) {
      for (uint64_t v = 0; v < rows; ++v) values[v * cols] = head->weight_gradient[v];
    }
    const uint64_t end = request.has_rows() ? request.rows().end() : rows;
    if (end > rows || row > end)
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "rows are outside the tensor", "rows");
    const uint64_t slice_end = std::min(end, row + 3);
    *slice->mutable_state() = state_->StateOf(*head);
    slice->mutable_rows()->set_begin(row);
    slice->mutable_rows()->set_end(slice_end);
    slice->set_tensor_rows(rows);
    slice->set_tensor_cols(cols);
    slice->set_dtype(request.dtype());
    slice->set_payload(
        ToBytes({values.begin() + row * cols, values.begin() + slice_end * cols}, request.dtype()));
    *last = slice_end == end;
    return grpc::Status::OK;
  }

  // Adds a message's rows, from `row` on, and moves `row` behind them. open.rows is set.
  grpc::Status AddRows(const v1::OpenGradient& open, const std::string& payload, uint64_t* row,
                       v1::AddGradientResponse* response) {
    absl::MutexLock lock(&state_->mu);
    if (state_->faults.on_add) {
      if (grpc::Status status = state_->Apply(state_->faults.on_add(open)); !status.ok()) return status;
    }
    ++state_->additions_seen;
    const int code = state_->faults.fail_add ? state_->faults.fail_add(state_->additions_seen) : 0;
    if (code != 0 && state_->faults.restart_on_failure) state_->Restart();
    if (code != 0) return grpc::Status(static_cast<grpc::StatusCode>(code), "injected fault");
    Head* head = state_->Find(open.head());
    if (head == nullptr) return state_->NotFound(open.head());
    if (grpc::Status status = state_->CheckMeant(open, *head, "open."); !status.ok()) return status;
    if (open.step() != head->step) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "the step is not open", "open.step");
    }
    const uint64_t d = head->spec.hidden_size();
    const std::vector<float> values = ToFloats(payload, open.dtype());
    for (size_t i = 0; i < values.size(); i += d, ++*row) {
      if (head->added[open.contribution_id()].insert(*row).second) {
        head->weight_gradient[*row] += (open.has_scale() ? open.scale() : 1.0f) * values[i];
        response->set_added_rows(response->added_rows() + 1);
      } else {
        response->set_repeated_rows(response->repeated_rows() + 1);
      }
    }
    *response->mutable_state() = state_->StateOf(*head);
    return grpc::Status::OK;
  }

  static double Norm(const Head& head) {
    double sum = 0;
    for (double g : head.weight_gradient) sum += g * g;
    return std::sqrt(sum);
  }

  FakeState* const state_;
};

}  // namespace

std::unique_ptr<v1::HeadService::Service> MakeHeadService(FakeState* state) {
  return std::make_unique<FakeHeadService>(state);
}

}  // namespace lossd::fake
