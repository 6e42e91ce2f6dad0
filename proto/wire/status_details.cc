#include "proto/wire/status_details.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace lossd::wire {
namespace {

constexpr absl::string_view kCut = "...";
constexpr size_t kMaxFieldBytes = 300;  // of ErrorDetail.field and ErrorDetail.value

// At most `limit` bytes of `text`, not ending within a UTF-8 character; marked if cut.
std::string Shortened(absl::string_view text, size_t limit) {
  if (text.size() <= limit) return std::string(text);
  size_t length = limit - kCut.size();
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80) --length;
  return absl::StrCat(text.substr(0, length), kCut);
}

// `detail` in at most kMaxDetailBytes.
v1::ErrorDetail Fitted(const v1::ErrorDetail& detail) {
  v1::ErrorDetail fitted = detail;
  fitted.set_field(Shortened(detail.field(), kMaxFieldBytes));
  fitted.set_value(Shortened(detail.value(), kMaxFieldBytes));
  if (fitted.ByteSizeLong() <= kMaxDetailBytes) return fitted;
  fitted.clear_missing();
  constexpr size_t kRoomForCount = 40;
  int sent = 0;
  for (const std::string& entry : detail.missing()) {
    constexpr size_t kEntryOverhead = 3;  // tag and length
    if (fitted.ByteSizeLong() + entry.size() + kEntryOverhead + kRoomForCount > kMaxDetailBytes) break;
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
  const std::string short_message = Shortened(message, kMaxMessageBytes);
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
    if (any.type_url() == kErrorDetailType && detail.ParseFromString(any.value())) return detail;
  }
  return std::nullopt;
}

void SetErrorDetail(const v1::ErrorDetail& detail, absl::Status* status) {
  status->SetPayload(kErrorDetailType, absl::Cord(detail.SerializeAsString()));
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
  return grpc::Status(code, Shortened(status.message(), kMaxMessageBytes));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  const std::optional<v1::ErrorDetail> detail = GetErrorDetail(status);
  if (detail.has_value()) SetErrorDetail(*detail, &result);
  return result;
}

}  // namespace lossd::wire
