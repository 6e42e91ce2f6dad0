// SPDX-License-Identifier: Apache-2.0
// Statuses and their details on the wire (status_details.h).
#include "proto/wire/status_details.h"

#include <google/protobuf/wire_format_lite.h>

#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::wire {
namespace {

using google::protobuf::internal::WireFormatLite;

// `bytes` as valid UTF-8, cut to at most `limit` bytes.
std::string Text(absl::string_view bytes, size_t limit) {
  return errors::Shortened(errors::ValidUtf8(bytes), limit);
}

// `detail` with valid UTF-8 only, because protobuf does not parse a message with other bytes in a string.
v1::ErrorDetail Readable(v1::ErrorDetail detail) {
  detail.set_field(errors::ValidUtf8(detail.field()));
  detail.set_value(errors::ValidUtf8(detail.value()));
  for (std::string& entry : *detail.mutable_missing()) entry = errors::ValidUtf8(entry);
  return detail;
}

// `given` as valid UTF-8, shortened to at most kMaxDetailBytes.
v1::ErrorDetail Fitted(const v1::ErrorDetail& given) {
  const v1::ErrorDetail detail = Readable(given);
  v1::ErrorDetail fitted = detail;
  fitted.set_field(errors::Shortened(detail.field(), errors::kMaxFieldBytes));
  fitted.set_value(errors::Shortened(detail.value(), errors::kMaxValueBytes));
  if (fitted.ByteSizeLong() <= kMaxDetailBytes) return fitted;
  fitted.clear_missing();
  constexpr size_t kRoomForCount = 40;
  const size_t tag_size =
      WireFormatLite::TagSize(v1::ErrorDetail::kMissingFieldNumber, WireFormatLite::TYPE_STRING);
  int sent = 0;
  for (const std::string& entry : detail.missing()) {
    const size_t entry_size = tag_size + WireFormatLite::StringSize(entry);
    if (fitted.ByteSizeLong() + entry_size + kRoomForCount > kMaxDetailBytes) break;
    fitted.add_missing(entry);
    ++sent;
  }
  fitted.add_missing(absl::StrCat("and ", detail.missing_size() - sent, " more"));
  return fitted;
}

grpc::StatusCode GrpcCode(absl::StatusCode code) {
  const int number = static_cast<int>(code);
  const bool known = number >= 0 && number <= static_cast<int>(grpc::StatusCode::UNAUTHENTICATED);
  return known ? static_cast<grpc::StatusCode>(number) : grpc::StatusCode::UNKNOWN;
}

}  // namespace

grpc::Status MakeGrpcStatus(grpc::StatusCode code, absl::string_view message, const v1::ErrorDetail& detail) {
  const std::string short_message = Text(message, kMaxMessageBytes);
  v1::StatusDetails details;
  details.set_code(static_cast<int>(code));
  details.set_message(short_message);
  google::protobuf::Any* any = details.add_details();
  any->set_type_url(std::string(kErrorDetailType));
  Fitted(detail).SerializeToString(any->mutable_value());
  return grpc::Status(code, short_message, details.SerializeAsString());
}

std::optional<v1::ErrorDetail> GetErrorDetail(const grpc::Status& status) {
  v1::StatusDetails details;
  if (status.error_details().empty() || !details.ParseFromString(status.error_details())) return std::nullopt;
  for (const google::protobuf::Any& any : details.details()) {
    v1::ErrorDetail detail;
    if (any.UnpackTo(&detail)) return detail;
  }
  return std::nullopt;
}

void SetErrorDetail(const v1::ErrorDetail& detail, absl::Status* status) {
  status->SetPayload(kErrorDetailType, absl::Cord(Readable(detail).SerializeAsString()));
}

std::optional<v1::ErrorDetail> GetErrorDetail(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kErrorDetailType);
  v1::ErrorDetail detail;
  if (!payload.has_value() || !detail.ParseFromString(std::string(*payload))) return std::nullopt;
  return detail;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const grpc::StatusCode code = GrpcCode(status.code());
  const std::optional<v1::ErrorDetail> detail = GetErrorDetail(status);
  if (detail.has_value()) return MakeGrpcStatus(code, status.message(), *detail);
  return grpc::Status(code, Text(status.message(), kMaxMessageBytes));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  const std::optional<v1::ErrorDetail> detail = GetErrorDetail(status);
  if (detail.has_value()) SetErrorDetail(*detail, &result);
  return result;
}

}  // namespace lossd::wire
