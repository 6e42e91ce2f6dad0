#include "server/rpc/errors.h"

#include <utility>

#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"

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

}  // namespace

absl::Status FieldError(absl::string_view field, absl::string_view rule, const absl::AlphaNum& value,
                        absl::StatusCode code) {
  return WithField(absl::Status(code, absl::StrCat(field, kMust, rule, kGot, value)), field, value.Piece());
}

absl::Status Located(absl::Status status, absl::string_view prefix) {
  const absl::string_view message = status.message();
  const size_t must = message.find(kMust);
  const size_t got = message.rfind(kGot);
  if (status.ok() || wire::GetErrorDetail(status).has_value() || must == absl::string_view::npos ||
      got == absl::string_view::npos || message.substr(0, must).find(' ') != absl::string_view::npos) {
    return status;
  }
  const std::string field = absl::StrCat(prefix, message.substr(0, must));
  absl::Status located(status.code(), absl::StrCat(prefix, message));
  return WithField(std::move(located), field, message.substr(got + kGot.size()));
}

absl::Status NoSuchHead(absl::string_view field, absl::string_view name) {
  return WithField(absl::NotFoundError(absl::StrCat(field, ": there is no head \"", name, "\"")), field, name);
}

grpc::Status ToGrpc(absl::Status status, const ErrorContext& context) {
  if (status.ok()) return grpc::Status::OK;
  v1::ErrorDetail detail = wire::GetErrorDetail(status).value_or(v1::ErrorDetail());
  detail.set_incarnation(context.incarnation);
  if (context.current_step.has_value()) detail.set_current_step(*context.current_step);
  for (const std::string& entry : context.missing) detail.add_missing(entry);
  wire::SetErrorDetail(detail, &status);
  return wire::ToGrpcStatus(status);
}

std::string CodeName(const grpc::Status& status) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
}

}  // namespace lossd::rpc
