#include "server/rpc/errors.h"

#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"
#include "server/engine/errors.h"

namespace lossd::rpc {
namespace {

constexpr absl::string_view kMust = " must ";
constexpr absl::string_view kGot = ", got ";

absl::Status WithField(absl::Status status, absl::string_view field, absl::string_view value) {
  v1::ErrorDetail detail;
  detail.set_field(std::string(field));
  detail.set_value(std::string(value));
  wire::SetErrorDetail(detail, &status);
  return status;
}

std::string PayloadText(const absl::Status& status, absl::string_view type) {
  const absl::optional<absl::Cord> payload = status.GetPayload(type);
  return payload.has_value() ? std::string(*payload) : std::string();
}

// The detail of a status that rpc made, or what the engine says of its own.
v1::ErrorDetail DetailOf(const absl::Status& status) {
  if (std::optional<v1::ErrorDetail> detail = wire::GetErrorDetail(status); detail.has_value())
    return *detail;
  v1::ErrorDetail detail;
  detail.set_field(PayloadText(status, engine::kFieldPayload));
  detail.set_value(PayloadText(status, engine::kValuePayload));
  uint64_t step = 0;
  if (absl::SimpleAtoi(PayloadText(status, engine::kCurrentStepPayload), &step))
    detail.set_current_step(step);
  return detail;
}

}  // namespace

absl::Status FieldError(absl::string_view field, absl::string_view rule, const absl::AlphaNum& value,
                        absl::StatusCode code) {
  return WithField(absl::Status(code, absl::StrCat(field, kMust, rule, kGot, value)), field, value.Piece());
}

absl::Status CheckIncarnation(absl::string_view field, uint64_t meant, uint64_t own) {
  if (meant == own) return absl::OkStatus();
  return FieldError(field, absl::StrCat("be that of this server process, ", absl::Hex(own, absl::kZeroPad16)),
                    absl::Hex(meant, absl::kZeroPad16), absl::StatusCode::kFailedPrecondition);
}

absl::Status Located(absl::Status status, absl::string_view prefix) {
  if (absl::IsNotFound(status) && PayloadText(status, engine::kFieldPayload) == "head") {
    return FieldError(absl::StrCat(prefix, "head"), "name a head of this server",
                      PayloadText(status, engine::kValuePayload), absl::StatusCode::kNotFound);
  }
  const absl::string_view message = status.message();
  const size_t must = message.find(kMust);
  const size_t got = message.rfind(kGot);
  if (status.ok() || status.GetPayload(wire::kErrorDetailType).has_value() ||
      status.GetPayload(engine::kFieldPayload).has_value() || must == absl::string_view::npos ||
      got == absl::string_view::npos || message.substr(0, must).find(' ') != absl::string_view::npos) {
    return status;
  }
  const std::string field = absl::StrCat(prefix, message.substr(0, must));
  absl::Status located(status.code(), absl::StrCat(prefix, message));
  return WithField(std::move(located), field, message.substr(got + kGot.size()));
}

absl::Status WithMissing(absl::Status status, const std::vector<std::string>& missing) {
  v1::ErrorDetail detail = DetailOf(status);
  for (const std::string& entry : missing) detail.add_missing(entry);
  wire::SetErrorDetail(detail, &status);
  return status;
}

grpc::Status ToGrpc(absl::Status status, uint64_t incarnation) {
  if (status.ok()) return grpc::Status::OK;
  status = Located(std::move(status), "");
  v1::ErrorDetail detail = DetailOf(status);
  detail.set_incarnation(incarnation);
  wire::SetErrorDetail(detail, &status);
  return wire::ToGrpcStatus(status);
}

std::string CodeName(const grpc::Status& status) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
}

}  // namespace lossd::rpc
