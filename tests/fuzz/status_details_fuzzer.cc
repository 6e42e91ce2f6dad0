// SPDX-License-Identifier: Apache-2.0
// Statuses from and to the network. Whatever bytes a peer or a request brings, what is sent is small, valid
// UTF-8 and readable, and says the same when it is passed on.
//
// Input: one byte for the code, one for the length of the message, the message, the details.
#include <google/protobuf/stubs/logging.h>

#include <string>

#include "kernels/errors/field_error.h"
#include "proto/wire/status_details.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

std::string Bytes(const std::optional<v1::ErrorDetail>& detail) {
  return detail.has_value() ? detail->SerializeAsString() : "none";
}

void CheckSent(const grpc::Status& sent) {
  FUZZ_CHECK(sent.error_message().size() <= wire::kMaxMessageBytes, "a long message");
  FUZZ_CHECK(errors::ValidUtf8(sent.error_message()) == sent.error_message(), "the message is not UTF-8");
  constexpr size_t kFrame = 100;  // of StatusDetails and Any
  FUZZ_CHECK(sent.error_details().size() <= wire::kMaxMessageBytes + wire::kMaxDetailBytes + kFrame,
             absl::StrCat("details of ", sent.error_details().size(), " bytes"));
  if (sent.error_details().empty()) return;
  const std::optional<v1::ErrorDetail> detail = wire::GetErrorDetail(sent);
  FUZZ_CHECK(detail.has_value(), "the details cannot be read");
  FUZZ_CHECK(detail->ByteSizeLong() <= wire::kMaxDetailBytes, "a long detail");
}

// A status that is received and passed on, twice.
void CheckPassedOn(const grpc::Status& received) {
  const absl::Status status = wire::FromGrpcStatus(received);
  FUZZ_CHECK(status.ok() == received.ok(), status.ToString());
  const grpc::Status sent = wire::ToGrpcStatus(status);
  CheckSent(sent);
  const grpc::Status again = wire::ToGrpcStatus(wire::FromGrpcStatus(sent));
  FUZZ_CHECK(again.error_code() == sent.error_code() && again.error_message() == sent.error_message() &&
                 Bytes(wire::GetErrorDetail(again)) == Bytes(wire::GetErrorDetail(sent)),
             absl::StrCat(sent.error_message(), " becomes ", again.error_message()));
}

// A status that is made here.
void CheckMade(int code, absl::string_view message, absl::string_view bytes) {
  absl::Status status(static_cast<absl::StatusCode>(code), message);
  v1::ErrorDetail detail;
  if (detail.ParsePartialFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    wire::SetErrorDetail(detail, &status);
    FUZZ_CHECK(wire::GetErrorDetail(status).has_value() == !status.ok(), "SetErrorDetail has no effect");
  } else if (!status.ok()) {
    // Bytes that are no message: as what was wrong.
    detail.Clear();
    detail.set_field(std::string(bytes));
    detail.set_value(std::string(bytes));
    for (size_t i = 0; i < bytes.size(); i += 7 + bytes.size() / 64)
      detail.add_missing(std::string(bytes.substr(i, 90)));
    CheckSent(wire::MakeGrpcStatus(grpc::StatusCode::INTERNAL, message, detail));
  }
  CheckSent(wire::ToGrpcStatus(status));
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);  // it would write a line for every string that is not UTF-8
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const int code = data[0] % 20;  // gRPC has 0 to 16
  const absl::string_view rest = lossd::fuzz::AsText(data + 2, size - 2);
  const absl::string_view message = rest.substr(0, data[1] * size_t{8});
  const absl::string_view details = rest.substr(message.size());
  lossd::fuzz::CheckPassedOn(
      grpc::Status(static_cast<grpc::StatusCode>(code), std::string(message), std::string(details)));
  lossd::fuzz::CheckMade(code, message, details);
  return 0;
}
