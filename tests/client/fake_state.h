// SPDX-License-Identifier: Apache-2.0
// What the fake server remembers, and what its services have in common.
#ifndef LOSSD_TESTS_CLIENT_FAKE_STATE_H_
#define LOSSD_TESTS_CLIENT_FAKE_STATE_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "lossd/v1/head.pb.h"
#include "proto/wire/status_details.h"
#include "tests/client/fake_server.h"

namespace lossd::fake {

struct Head {
  v1::HeadSpec spec;
  uint64_t step = 0;
  uint64_t generation = 0;
  uint64_t weights_version = 0;
  std::map<v1::Param, std::vector<float>> values;
  std::vector<double> weight_gradient;            // [V], of the first column
  std::map<uint64_t, std::set<uint64_t>> ledger;  // microbatch id -> rows
  std::map<uint64_t, std::set<uint64_t>> added;   // contribution id -> rows
  uint64_t updates = 0;
  uint64_t total_rows = 0;
  v1::ApplyStepResponse last_step;
  std::map<std::string, v1::ResetHeadResponse> resets;  // by id
  v1::HeadHistory history;
  struct Retained {
    v1::DType dtype = v1::DTYPE_FP32;
    std::map<uint64_t, std::vector<float>> hidden;  // by row; valid rows only
    std::map<uint64_t, int32_t> targets;            // by row; all rows
  };
  std::map<uint64_t, Retained> retained;  // by microbatch id
};

// Shared by the services, and outlives them.
struct FakeState {
  explicit FakeState(const FakeServer::Options& o) : options(o) {}

  grpc::Status Error(grpc::StatusCode code, const std::string& message, const std::string& field = "",
                     const std::string& value = "") ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    v1::ErrorDetail detail;
    detail.set_field(field);
    detail.set_value(value);
    detail.set_incarnation(incarnation);
    return wire::MakeGrpcStatus(code, message, detail);
  }
  grpc::Status NotFound(const std::string& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return Error(grpc::StatusCode::NOT_FOUND, absl::StrCat("no head \"", head, "\""), "head", head);
  }
  // Does what a fault says; OK if the call goes on.
  grpc::Status Apply(const Fault& fault) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (fault.restart) Restart();
    for (auto& [name, head] : heads) {
      if (fault.discard) Discard(&head);
      if (fault.new_weights) head.weights_version = ++drawn;
    }
    if (fault.max_rows > 0) faults.sudden_max_rows = fault.max_rows;
    const auto code = static_cast<grpc::StatusCode>(fault.code);
    if (code == grpc::StatusCode::OK) return grpc::Status::OK;
    if (fault.detail) return Error(code, "injected fault");
    return grpc::Status(code, fault.message.empty() ? "socket closed" : fault.message);
  }
  Head* Find(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    auto it = heads.find(name);
    return it == heads.end() ? nullptr : &it->second;
  }
  // Counts a unary call; true if it is to be refused.
  bool Refuse() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (faults.refuse_calls == 0) return false;
    --faults.refuse_calls;
    return true;
  }
  v1::HeadState StateOf(const Head& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    v1::HeadState state;
    state.set_incarnation(incarnation);
    state.set_step(head.step);
    if (!options.versions) return state;
    state.set_generation(head.generation);
    state.set_weights_version(head.weights_version);
    return state;
  }
  // Zeroes what belongs to the open step.
  void Discard(Head* head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    head->ledger.clear();
    head->added.clear();
    head->retained.clear();
    std::fill(head->weight_gradient.begin(), head->weight_gradient.end(), 0.0);
    head->generation = ++drawn;
  }
  // Whether the gradients that a call names are the head's; `prefix` of the fields, "open." for instance.
  template <typename Request>
  grpc::Status CheckMeant(const Request& request, const Head& head, const std::string& prefix)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (request.has_incarnation() && request.incarnation() != incarnation) {
      return Error(grpc::StatusCode::FAILED_PRECONDITION, "meant for another process",
                   prefix + "incarnation");
    }
    if (request.has_generation() && request.generation() != head.generation) {
      return Error(grpc::StatusCode::ABORTED, "meant for other gradients", prefix + "generation",
                   absl::StrCat(request.generation()));
    }
    return grpc::Status::OK;
  }
  v1::SliceLimits Limits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    v1::SliceLimits limits;
    limits.set_max_rows(faults.sudden_max_rows > 0 ? faults.sudden_max_rows : options.max_slice_rows);
    limits.set_max_bytes(options.max_slice_bytes);
    return limits;
  }
  v1::HeadDescription Describe(const Head& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    v1::HeadDescription description;
    *description.mutable_spec() = head.spec;
    *description.mutable_state() = StateOf(head);
    description.set_compute_dtype(v1::DTYPE_FP32);
    *description.mutable_slice_limits() = Limits();
    description.set_chunk_rows(options.max_slice_rows);
    const uint64_t parameters = head.spec.hidden_size() * head.spec.vocab_size();
    description.mutable_memory()->set_weights(parameters * 4);
    description.mutable_memory()->set_gradients(parameters * 4);
    description.set_step_microbatches(head.ledger.size());
    description.set_step_contributions(head.added.size());
    description.set_updates(head.updates);
    for (const auto& [id, seen] : head.ledger)
      description.set_step_rows(description.step_rows() + seen.size());
    description.set_total_rows(head.total_rows);
    *description.mutable_history() = head.history;
    return description;
  }
  void Restart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    absl::BitGen random;
    incarnation = options.numbered_incarnations
                      ? incarnation + 1
                      : absl::Uniform<uint64_t>(absl::IntervalClosed, random, 1, ~uint64_t{0});
    for (auto& [name, head] : heads) {
      Discard(&head);
      head.weights_version = ++drawn;
    }
  }
  Head MakeHead(const v1::HeadSpec& spec) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Head head;
    head.generation = ++drawn;
    head.weights_version = ++drawn;
    head.spec = spec;
    if (spec.norm() == v1::NORM_UNSPECIFIED) head.spec.set_norm(v1::NORM_NONE);
    if (spec.optimizer_state() == v1::OPTIMIZER_STATE_UNSPECIFIED)
      head.spec.set_optimizer_state(v1::OPTIMIZER_STATE_ADAM);
    if (spec.logits() == v1::LOGITS_UNSPECIFIED) head.spec.set_logits(v1::LOGITS_STORED);
    if (spec.gradients() == v1::GRADIENTS_UNSPECIFIED) head.spec.set_gradients(v1::GRADIENTS_EXACT);
    head.values[v1::PARAM_WEIGHT].resize(spec.vocab_size() * spec.hidden_size());
    if (spec.bias()) head.values[v1::PARAM_BIAS].resize(spec.vocab_size());
    head.weight_gradient.resize(spec.vocab_size());
    return head;
  }

  const FakeServer::Options options;
  mutable absl::Mutex mu;
  Faults faults ABSL_GUARDED_BY(mu);
  uint64_t incarnation ABSL_GUARDED_BY(mu) = 0;
  uint64_t drawn ABSL_GUARDED_BY(mu) = 0;  // generations and weights versions: 1, 2, ...
  std::map<std::string, Head> heads ABSL_GUARDED_BY(mu);
  std::map<std::string, std::string> deletions ABSL_GUARDED_BY(mu);  // deletion_id -> checkpoint
  uint64_t streams_seen ABSL_GUARDED_BY(mu) = 0;
  uint64_t describes_seen ABSL_GUARDED_BY(mu) = 0;
  uint64_t slices_seen ABSL_GUARDED_BY(mu) = 0;
  uint64_t additions_seen ABSL_GUARDED_BY(mu) = 0;
  uint64_t rows_seen ABSL_GUARDED_BY(mu) = 0;
};

// fp32 or bf16 bytes.
std::vector<float> ToFloats(const std::string& bytes, v1::DType dtype);
std::string ToBytes(const std::vector<float>& values, v1::DType dtype);

}  // namespace lossd::fake

#endif  // LOSSD_TESTS_CLIENT_FAKE_STATE_H_
