// SPDX-License-Identifier: Apache-2.0
// The calls of Client that make heads, or make them as new.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/text_format.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/client.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/run_name.h"
#include "client/cpp/step_errors.h"
#include "client/cpp/unary_call.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"

namespace lossd::client {
namespace {

using google::protobuf::FieldDescriptor;

// What a server takes where nothing is said.
v1::HeadSpec WithDefaults(v1::HeadSpec spec) {
  if (spec.norm() == v1::NORM_UNSPECIFIED) spec.set_norm(v1::NORM_NONE);
  if (spec.optimizer_state() == v1::OPTIMIZER_STATE_UNSPECIFIED) {
    spec.set_optimizer_state(v1::OPTIMIZER_STATE_ADAM);
  }
  if (spec.logits() == v1::LOGITS_UNSPECIFIED) spec.set_logits(v1::LOGITS_STORED);
  if (spec.gradients() == v1::GRADIENTS_UNSPECIFIED) spec.set_gradients(v1::GRADIENTS_EXACT);
  return spec;
}

// "7"; of a list "[7, 8]".
std::string ValueOf(const v1::HeadSpec& spec, const FieldDescriptor* field) {
  const auto value = [&](int index) {
    std::string text;
    google::protobuf::TextFormat::PrintFieldValueToString(spec, field, index, &text);
    return text;
  };
  if (!field->is_repeated()) return value(-1);
  std::vector<std::string> values;
  for (int i = 0; i < spec.GetReflection()->FieldSize(spec, field); ++i) values.push_back(value(i));
  return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
}

// Whether the specification says what the field is to be.
bool Says(const v1::HeadSpec& spec, const FieldDescriptor* field) {
  if (field->is_repeated()) return spec.GetReflection()->FieldSize(spec, field) > 0;
  return field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL || field->name() == "split" ||
         spec.GetReflection()->HasField(spec, field);
}

// ALREADY_EXISTS, naming every field, unless what is wanted is what a head has. A dtype, epsilon or size that
// is left to the server may be any.
absl::Status CheckSame(const v1::HeadSpec& has, const v1::HeadSpec& asked) {
  const v1::HeadSpec wanted = WithDefaults(asked);
  std::vector<std::string> different;
  std::optional<errors::FieldViolation> first;
  for (int i = 0; i < v1::HeadSpec::descriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = v1::HeadSpec::descriptor()->field(i);
    const std::string is = ValueOf(has, field), wants = ValueOf(wanted, field);
    if (!Says(wanted, field) || is == wants) continue;
    different.push_back(absl::StrCat(field->name(), " ", is, " instead of ", wants));
    if (!first.has_value()) first = {absl::StrCat("spec.", field->name()), "differs from the head's", wants};
  }
  if (different.empty()) return absl::OkStatus();
  return errors::WithViolation(
      absl::AlreadyExistsError(absl::StrCat("head \"", wanted.name(), "\" exists with ",
                                            absl::StrJoin(different, ", "),
                                            ". Give what it has, or another name, or delete it first")),
      *first);
}

v1::ResetHeadRequest ResetTo(const v1::CreateHeadRequest& wanted) {
  v1::ResetHeadRequest reset;
  reset.set_head(wanted.spec().name());
  reset.set_scope(v1::RESET_SCOPE_ALL);
  if (wanted.has_kaiming_uniform()) *reset.mutable_kaiming_uniform() = wanted.kaiming_uniform();
  if (wanted.has_zeros()) *reset.mutable_zeros() = wanted.zeros();
  if (wanted.has_tensor_file()) *reset.mutable_tensor_file() = wanted.tensor_file();
  return reset;
}

}  // namespace

absl::StatusOr<v1::HeadDescription> Client::CreateHead(const v1::CreateHeadRequest& request,
                                                       absl::Duration timeout, IfExists if_exists) {
  const absl::Time deadline = internal::DeadlineAfter(timeout, options().transfer_timeout);
  auto result = internal::Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::CreateHead,
                               request, deadline, internal::kNever);
  if (result.ok()) {
    core_->head_cache().Learn(*result);
    core_->head_cache().ForgetAccumulation(request.spec().name());
  }
  if (!absl::IsAlreadyExists(result.status()) || if_exists == IfExists::kError) return result;
  absl::StatusOr<v1::HeadDescription> found =
      DescribeHead(request.spec().name(), deadline - clocks::SteadyNow());
  if (!found.ok()) return found.status();
  if (absl::Status same = CheckSame(found->spec(), request.spec()); !same.ok()) return same;
  if (if_exists == IfExists::kKeep) return found;
  v1::ResetHeadRequest reset = ResetTo(request);
  reset.set_incarnation(found->state().incarnation());
  absl::StatusOr<v1::ResetHeadResponse> done = ResetHead(reset, deadline - clocks::SteadyNow());
  if (!done.ok()) return done.status();
  return std::move(*done->mutable_head());
}

namespace {

// What a call that names its server process ended with, if that was another one.
template <typename Response>
absl::StatusOr<Response> OrRestarted(absl::StatusOr<Response> result, absl::string_view head,
                                     uint64_t incarnation) {
  const std::optional<v1::ErrorDetail> detail = ErrorDetailOf(result.status());
  if (detail.has_value() && detail->field() == "incarnation" && detail->incarnation() != 0) {
    return internal::RestartedError(head, incarnation, detail->incarnation(), std::nullopt);
  }
  return result;
}

// A change of a head that has an id of its own, so that it is made once. It is meant for the process that the
// head is in now, unless the request says which: a repeat that finds another one must not change what that
// has restored.
template <typename Request, typename Response>
absl::StatusOr<Response> Change(Client& client, internal::Core& core,
                                grpc::Status (v1::HeadService::Stub::*method)(grpc::ClientContext*,
                                                                              const Request&, Response*),
                                Request request, absl::Time deadline) {
  if (!request.has_incarnation()) {
    const absl::StatusOr<v1::HeadDescription> head =
        client.DescribeHead(request.head(), deadline - clocks::SteadyNow());
    if (!head.ok()) return head.status();
    request.set_incarnation(head->state().incarnation());
  }
  auto result = internal::Call(core, core.connections().heads(), method, request, deadline,
                               internal::Repeat::kIfTransient);
  if (result.ok()) core.head_cache().Learn(result->head());
  return OrRestarted(std::move(result), request.head(), request.incarnation());
}

}  // namespace

absl::StatusOr<v1::ResetHeadResponse> Client::ResetHead(const v1::ResetHeadRequest& request,
                                                        absl::Duration timeout) {
  const absl::Time deadline = internal::DeadlineAfter(timeout, options().transfer_timeout);
  v1::ResetHeadRequest meant = request;
  if (meant.reset_id().empty()) meant.set_reset_id(internal::RandomDigits(32));
  auto result = Change(*this, *core_, &v1::HeadService::Stub::ResetHead, std::move(meant), deadline);
  if (result.ok()) core_->head_cache().ForgetAccumulation(request.head());
  return result;
}

absl::StatusOr<v1::SetSharesResponse> Client::SetShares(const v1::SetSharesRequest& request,
                                                        absl::Duration timeout) {
  const absl::Time deadline = internal::DeadlineAfter(timeout, options().transfer_timeout);
  v1::SetSharesRequest meant = request;
  if (meant.change_id().empty()) meant.set_change_id(internal::RandomDigits(32));
  return Change(*this, *core_, &v1::HeadService::Stub::SetShares, std::move(meant), deadline);
}

}  // namespace lossd::client
