// SPDX-License-Identifier: Apache-2.0
// The defaults and errors of the client (client_options.h): values from the environment, and the statuses for
// restarts and discarded steps.
#include "client/cpp/client_options.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>

#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "proto/wire/status_details.h"

namespace lossd::client {
namespace {

constexpr size_t kMostCharacters = 128;
constexpr size_t kMostOfHost = 64;

bool IsControl(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

// The default run: "<host>:<pid>-<8 random hexadecimal digits>".
std::string OwnName() {
  char host[256] = {};
  if (gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  std::string name = errors::Shortened(errors::ValidUtf8(host), kMostOfHost);
  name.erase(std::remove_if(name.begin(), name.end(), IsControl), name.end());
  return absl::StrCat(name, ":", getpid(), "-", internal::RandomDigits(8));
}

}  // namespace

std::string EnvironmentVariable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string TransportFromEnvironment() {
  const std::string transport = EnvironmentVariable("LOSSD_TRANSPORT");
  return transport.empty() ? "auto" : transport;
}

std::string RunFromEnvironment() {
  std::string run = EnvironmentVariable("LOSSD_RUN");
  return run.empty() ? OwnName() : run;
}

double LossResult::gradient_error() const {
  return squared_gradient > 0 ? std::sqrt(sampling_variance / squared_gradient) : 0.0;
}

size_t ElementSize(v1::DType dtype) {
  if (dtype == v1::DTYPE_FP32) return 4;
  return dtype == v1::DTYPE_FP16 || dtype == v1::DTYPE_BF16 ? 2 : 0;
}

namespace internal {

absl::Status CheckRunName(absl::string_view run, absl::string_view source) {
  const auto is_first = [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  };  // whether a byte is the first one of a UTF-8 character
  const auto characters = static_cast<size_t>(std::count_if(run.begin(), run.end(), is_first));
  const bool printable = errors::ValidUtf8(run) == run && std::none_of(run.begin(), run.end(), IsControl);
  if (printable && characters <= kMostCharacters) return absl::OkStatus();
  const std::string valid = errors::ValidUtf8(run);
  return ArgumentError(source, valid,
                       absl::StrCat("is '", absl::Utf8SafeCEscape(errors::Shortened(valid, kMostCharacters)),
                                    "' (", characters, " characters); it must be at most ", kMostCharacters,
                                    " printable characters"));
}

std::string RandomDigits(int digits) {
  std::random_device random;
  std::string text;
  for (int i = 0; i < digits; i += 8) absl::StrAppend(&text, absl::Hex(random(), absl::kZeroPad8));
  return text;
}

namespace {

// A part of the error text that gRPC makes for a message that exceeds the size limit of one side.
constexpr absl::string_view kTooLarge = "essage larger than max";

constexpr char kRestartPayload[] = "lossd/restart";
constexpr char kDiscardPayload[] = "lossd/discard";

absl::Status Restarted(uint64_t before, uint64_t now, absl::string_view consequence) {
  absl::Status status = absl::AbortedError(
      absl::StrFormat("server restarted (incarnation %016x -> %016x); %s", before, now, consequence));
  status.SetPayload(kRestartPayload, absl::Cord(absl::StrCat(before, " ", now)));
  return status;
}

absl::Status Discarded(absl::string_view head, uint64_t step, absl::string_view how) {
  absl::Status status = absl::AbortedError(
      absl::StrCat("gradients of step ", step, " of head \"", head, "\" were discarded: ", how));
  status.SetPayload(kDiscardPayload, absl::Cord());
  return status;
}

}  // namespace

absl::Status RestartedError(absl::string_view head, uint64_t before, uint64_t now,
                            std::optional<uint64_t> step) {
  const std::string lost = step.has_value() ? absl::StrCat("gradients of step ", *step, " are lost")
                                            : "its weights may have changed";
  return Restarted(before, now, absl::StrFormat("%s: restore head \"%s\" or repeat the step", lost, head));
}

absl::Status RestartedError(uint64_t before, uint64_t now) {
  return Restarted(before, now, "gradients of open steps are lost: restore the heads or repeat the steps");
}

absl::Status DiscardedError(absl::string_view head, uint64_t step, uint64_t before, uint64_t now) {
  return Discarded(
      head, step,
      absl::StrCat("another caller has zeroed them, reset the head or loaded a checkpoint (generation ",
                   before, " -> ", now, "); start the step again"));
}

absl::Status DiscardedError(absl::string_view head, uint64_t step, const absl::Status& refusal) {
  return Discarded(
      head, step,
      absl::StrCat(
          "another caller has zeroed them, reset the head or loaded a checkpoint; start the step again (the "
          "server says: ",
          refusal.message(), ")"));
}

absl::Status DiscardedByThisClientError(absl::string_view head, uint64_t step) {
  return Discarded(head, step, "this client has started the step again during the call");
}

bool IsTransient(const absl::Status& status) {
  if (absl::IsUnavailable(status)) return true;
  return absl::IsResourceExhausted(status) && !wire::GetErrorDetail(status).has_value() &&
         !absl::StrContains(status.message(), kTooLarge);
}

bool RefusesGeneration(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kAborted || IsStepDiscarded(status)) return false;
  const std::optional<v1::ErrorDetail> detail = ErrorDetailOf(status);
  return detail.has_value() &&
         (detail->field() == "generation" || absl::EndsWith(detail->field(), ".generation"));
}

}  // namespace internal

std::optional<Restart> RestartOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(internal::kRestartPayload);
  if (!payload.has_value()) return std::nullopt;
  const std::vector<std::string> numbers = absl::StrSplit(std::string(*payload), ' ');
  Restart restart;
  if (numbers.size() != 2 || !absl::SimpleAtoi(numbers[0], &restart.before) ||
      !absl::SimpleAtoi(numbers[1], &restart.now)) {
    return std::nullopt;
  }
  return restart;
}

bool IsStepDiscarded(const absl::Status& status) {
  return status.GetPayload(internal::kDiscardPayload).has_value();
}

std::optional<v1::ErrorDetail> ErrorDetailOf(const absl::Status& status) {
  std::optional<v1::ErrorDetail> detail = wire::GetErrorDetail(status);
  if (detail.has_value()) return detail;
  const std::optional<errors::FieldViolation> violation = errors::GetFieldViolation(status);
  if (!violation.has_value()) return std::nullopt;
  detail.emplace();
  detail->set_field(errors::ValidUtf8(violation->field));
  detail->set_value(errors::ValidUtf8(violation->value));
  return detail;
}

}  // namespace lossd::client
