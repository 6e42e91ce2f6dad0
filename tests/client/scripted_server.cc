// SPDX-License-Identifier: Apache-2.0
#include "tests/client/scripted_server.h"

#include <grpcpp/support/status.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <stdexcept>

namespace lossd::fake {
namespace {

using nlohmann::json;

constexpr uint64_t kClasses = 10;

constexpr const char* kCodes[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
static_assert(std::size(kCodes) == grpc::StatusCode::UNAUTHENTICATED + 1);

// The n-th fault of a list; an empty one behind its end.
json FaultOf(const json& faults, const char* list, size_t n) {
  const json all = faults.value(list, json::array());
  return n < all.size() ? all[n] : json::object();
}

Fault ToFault(const json& fault) {
  return {.code = fault.contains("code") ? StatusCodeNamed(fault["code"]) : 0,
          .detail = fault.value("detail", true),
          .message = fault.value("message", ""),
          .restart = fault.value("restart", false),
          .discard = fault.value("discard", false),
          .new_weights = fault.value("new_weights", false),
          .max_rows = fault.value("max_rows", uint64_t{0})};
}

json Range(const v1::RowRange& rows) { return {rows.begin(), rows.end()}; }

// The process and the gradients that a call is meant for.
template <typename Request>
json Meant(const Request& request) {
  return {{"incarnation", request.has_incarnation() ? json(request.incarnation()) : json(nullptr)},
          {"generation", request.has_generation() ? json(request.generation()) : json(nullptr)}};
}

// What identifies an opened call: id, step, and what it is meant for.
template <typename Open>
json Identity(const Open& open, uint64_t id) {
  json identity = Meant(open);
  identity["id"] = id;
  identity["step"] = open.step();
  return identity;
}

void CheckMembers(const json& faults) {
  const std::set<std::string> lists{"streams", "describes", "contributions", "reads", "steps"};
  const std::set<std::string> known{"at_slice", "code",          "detail",
                                    "restart",  "discard",       "new_weights",
                                    "max_rows", "accepted_step", "accepted_incarnation",
                                    "message"};
  for (const auto& [list, all] : faults.items()) {
    if (lists.count(list) == 0) throw std::invalid_argument("there are no faults of " + list);
    for (const json& fault : all) {
      for (const auto& [name, value] : fault.items()) {
        if (known.count(name) == 0) throw std::invalid_argument("a fault has a member " + name);
      }
    }
  }
}

}  // namespace

int StatusCodeNamed(const std::string& name) {
  const auto* found = std::find(std::begin(kCodes), std::end(kCodes), name);
  if (found == std::end(kCodes)) throw std::invalid_argument("there is no status code " + name);
  return static_cast<int>(found - std::begin(kCodes));
}

ScriptedServer::ScriptedServer(const json& script) : faults_(script.at("faults")) {
  CheckMembers(faults_);
  const json& limits = script.at("limits");
  server_ = std::make_unique<FakeServer>(FakeServer::Options{.max_slice_rows = limits.at("max_rows"),
                                                             .max_slice_bytes = limits.at("max_bytes"),
                                                             .numbered_incarnations = true,
                                                             .versions = script.value("versions", true)});
  server_->AddHead("head", /*hidden_size=*/8, kClasses);
  Faults faults;
  faults.on_request = [this](const v1::ComputeLossRequest& request) { return OnRequest(request); };
  faults.on_accepted = [this](v1::MicrobatchAccepted* accepted) { OnAccepted(accepted); };
  faults.on_describe = [this] { return OnDescribe(); };
  faults.on_add = [this](const v1::OpenGradient& open) { return OnAdd(open); };
  faults.on_read = [this](uint64_t slice) { return OnRead(slice); };
  faults.on_apply = [this](const v1::ApplyStepRequest& request) { return OnApply(request); };
  server_->SetFaults(faults);
}

json ScriptedServer::Log() const {
  absl::MutexLock lock(&mu_);
  return log_;
}

Fault ScriptedServer::OnRequest(const v1::ComputeLossRequest& request) {
  absl::MutexLock lock(&mu_);
  if (request.has_slice()) {
    ++slices_;
    log_[open_entry_]["slices"].push_back(Range(request.slice().rows()));
  } else {
    ++streams_;
    slices_ = 0;
    open_entry_ = log_.size();
    json entry;
    if (request.has_open()) {
      entry = Identity(request.open(), request.open().microbatch_id());
      entry["open"] = Range(request.open().rows());
      entry["slices"] = json::array();
    } else {
      entry = Identity(request.backward(), request.backward().microbatch_id());
      entry["backward"] = Range(request.backward().rows());
    }
    log_.push_back(entry);
  }
  const json fault = FaultOf(faults_, "streams", streams_ - 1);
  return fault.contains("at_slice") && fault["at_slice"] == slices_ ? ToFault(fault) : Fault{};
}

void ScriptedServer::OnAccepted(v1::MicrobatchAccepted* accepted) {
  absl::MutexLock lock(&mu_);
  const json fault = FaultOf(faults_, "streams", streams_ - 1);
  if (fault.contains("accepted_step")) accepted->mutable_state()->set_step(fault["accepted_step"]);
  if (fault.contains("accepted_incarnation")) {
    accepted->mutable_state()->set_incarnation(fault["accepted_incarnation"]);
  }
}

Fault ScriptedServer::OnDescribe() {
  absl::MutexLock lock(&mu_);
  log_.push_back({{"describe", "head"}});
  return ToFault(FaultOf(faults_, "describes", describes_++));
}

Fault ScriptedServer::OnAdd(const v1::OpenGradient& open) {
  absl::MutexLock lock(&mu_);
  json entry = Identity(open, open.contribution_id());
  v1::RowRange rows;
  rows.set_end(kClasses);  // a call that names no rows means all
  if (open.has_contribution_rows()) rows = open.contribution_rows();
  if (open.has_rows()) rows = open.rows();
  entry["contribution"] = Range(rows);
  log_.push_back(entry);
  return ToFault(FaultOf(faults_, "contributions", contributions_++));
}

Fault ScriptedServer::OnRead(uint64_t slice) {
  absl::MutexLock lock(&mu_);
  if (slice == 0) {
    log_.push_back({{"read", "head"}});
    ++reads_;
  }
  const json fault = FaultOf(faults_, "reads", reads_ - 1);
  return fault.value("at_slice", uint64_t{0}) == slice ? ToFault(fault) : Fault{};
}

Fault ScriptedServer::OnApply(const v1::ApplyStepRequest& request) {
  absl::MutexLock lock(&mu_);
  json entry = Meant(request);
  entry["apply"] = request.step();
  log_.push_back(entry);
  return ToFault(FaultOf(faults_, "steps", steps_++));
}

}  // namespace lossd::fake
