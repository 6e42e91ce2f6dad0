// SPDX-License-Identifier: Apache-2.0
// How lossctl connects to a server and prints, and its exit codes and error messages (context.h).
#include "client/cli/context.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cli/http.h"
#include "client/cpp/contexts.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::cli {

absl::Status Context::Settle() {
  if (settled_) return absl::OkStatus();
  const auto said = [](const std::string& flag) {
    return flag.empty() ? std::nullopt : std::make_optional(flag);
  };
  client::ServerArguments arguments{
      .server = said(flags.server), .ca = said(flags.ca), .cert = said(flags.cert), .key = said(flags.key)};
  if (flags.server.empty()) arguments.context = said(flags.context);
  LOSSD_TRY(client::ChosenServer chosen, client::ChooseServer(arguments, client::CurrentContext::kCounts));
  server = std::move(chosen.server);
  credentials = std::move(chosen.credentials);
  named_http = std::move(chosen.http);
  in_use = std::move(chosen.context);
  settled_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<client::Client>> Context::Connect() {
  client::ClientOptions options;
  options.channels = 1;
  return Connect(std::move(options));
}

absl::StatusOr<std::unique_ptr<client::Client>> Context::Connect(client::ClientOptions options) {
  LOSSD_RETURN_IF_ERROR(Settle());
  LOSSD_TRY(auto made, client::Credentials::Create(credentials));
  options.target = server;
  options.credentials = std::move(made);
  options.connect_timeout = absl::Seconds(5);
  options.wait_for_server = false;
  options.retry.max_attempts = attempts;
  options.expected_incarnation = incarnation;
  if (timeout_seconds > 0) {
    options.connect_timeout = timeout();
    options.call_timeout = options.transfer_timeout = options.loss_timeout = timeout();
  }
  return client::Client::Connect(options);
}

absl::StatusOr<std::string> Context::HttpAddress(const std::string& given) {
  LOSSD_RETURN_IF_ERROR(Settle());
  if (!given.empty()) return given;
  if (!named_http.empty()) return named_http;
  LOSSD_TRY(const auto client, Connect());
  LOSSD_TRY(const v1::ServerDescription said, client->GetServer(timeout()));
  return HttpAddressOf(said, server);
}

absl::StatusOr<std::string> Context::HttpAddress(const std::string& given,
                                                 const v1::ServerDescription& said) const {
  if (!given.empty()) return given;
  return named_http.empty() ? HttpAddressOf(said, server) : named_http;
}

absl::StatusOr<std::string> Context::ProbeAddress(const std::string& given) {
  LOSSD_RETURN_IF_ERROR(Settle());
  if (!given.empty()) return given;
  return named_http.empty() ? DefaultHttpAddress(server) : named_http;
}

void Context::Print(absl::string_view text) const {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if ((std::fflush(stdout) != 0 || !written) && write_error_ == 0) write_error_ = errno;
}

absl::Status Context::Printed() const {
  if (write_error_ == 0) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("cannot write to the standard output: ", std::generic_category().message(write_error_)));
}

void Context::PrintJson(const Json& document) const {
  Print(absl::StrCat(document.dump(2, ' ', false, Json::error_handler_t::replace), "\n"));
}

void Context::PrintJsonOfMany(const Json& document) const {
  Print(absl::StrCat(document.dump(-1, ' ', false, Json::error_handler_t::replace), "\n"));
}

bool ShowsProgress() { return isatty(STDERR_FILENO) != 0; }

namespace {

constexpr absl::string_view kUsagePayload = "lossctl/usage";

std::string Advice(const absl::Status& status, const std::optional<v1::ErrorDetail>& detail) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      if (detail.has_value() && detail->field() == client::kTargetField)
        return "--server or LOSSD_SERVER names it";
      return "";
    case absl::StatusCode::kUnavailable:
      if (detail.has_value() && detail->field() == client::kTargetField) {
        return "start one with `lossd`, or name another with --server HOST:PORT or LOSSD_SERVER";
      }
      if (detail.has_value() && detail->field() == kHttpField) return "";  // the message is complete
      return "try again later; `lossctl health` says whether the server serves";
    case absl::StatusCode::kNotFound:
      if (detail.has_value() && absl::EndsWith(detail->field(), "head"))
        return "`lossctl heads` lists the heads";
      if (detail.has_value() && absl::EndsWith(detail->field(), "checkpoint"))
        return "`lossctl checkpoints` lists the checkpoints";
      return "";
    case absl::StatusCode::kAborted:
      if (client::RestartOf(status).has_value() || client::IsStepDiscarded(status)) return "";
      return "something has changed meanwhile: try again, or start the step again if its gradients are gone";
    case absl::StatusCode::kDeadlineExceeded:
      return "give it more time with --timeout SECONDS";
    default:
      return "";
  }
}

// Adds the unit to an error of a server that names none: "workspace_bytes must be >= 0, got 99999999" becomes
// "... got 99999999 bytes (95.4 MiB)", because the name of the field says that the number is bytes.
std::string WithUnitOfField(std::string message, const std::optional<v1::ErrorDetail>& detail) {
  if (!detail.has_value() || !absl::EndsWith(detail->field(), "_bytes")) return message;
  if (!absl::EndsWith(message, absl::StrCat("got ", detail->value()))) return message;
  return WithUnits(absl::StrCat(message, " bytes"));
}

Json ErrorJson(const absl::Status& status, const std::optional<v1::ErrorDetail>& detail) {
  Json error;
  error["code"] = absl::StatusCodeToString(status.code());
  error["message"] = std::string(status.message());
  error["exit_code"] = static_cast<int>(ExitCodeOf(status));
  if (const auto restart = client::RestartOf(status); restart.has_value()) {
    error["restarted"] = {{"incarnation_before", HumanIncarnation(restart->before)},
                          {"incarnation", HumanIncarnation(restart->now)}};
  }
  if (client::IsStepDiscarded(status)) error["step_discarded"] = true;
  if (detail.has_value()) {
    if (!detail->field().empty()) error["field"] = detail->field();
    if (!detail->value().empty()) error["value"] = detail->value();
    if (detail->has_current_step()) error["current_step"] = detail->current_step();
    if (detail->missing_size() > 0) {
      error["missing"] = std::vector<std::string>(detail->missing().begin(), detail->missing().end());
    }
    if (detail->incarnation() != 0) error["incarnation"] = HumanIncarnation(detail->incarnation());
  }
  return {{"error", error}};
}

}  // namespace

absl::Status UsageError(absl::string_view message, absl::string_view help) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kUsagePayload, absl::Cord(help));
  return status;
}

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.GetPayload(kUsagePayload).has_value()) return kExitUsage;
  if (client::RestartOf(status).has_value()) return kExitRestarted;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kExitRefused;
    default:
      return kExitFailed;
  }
}

std::string WithUnits(absl::string_view message) {
  constexpr absl::string_view kBytes = " bytes";
  std::string text;
  for (size_t at = message.find(kBytes); at != absl::string_view::npos; at = message.find(kBytes)) {
    const absl::string_view before = message.substr(0, at);
    const size_t begin = before.find_last_not_of("0123456789") + 1;  // 0 if it is all digits
    double bytes = 0;
    const bool is_count = begin < at && absl::SimpleAtod(before.substr(begin), &bytes) &&
                          bytes >= errors::kManyBytes && (begin == 0 || before[begin - 1] != '.');
    absl::StrAppend(&text, before, kBytes);
    message.remove_prefix(at + kBytes.size());
    if (is_count && !absl::StartsWith(message, " (")) absl::StrAppend(&text, " (", HumanBytes(bytes), ")");
  }
  return absl::StrCat(text, message);
}

std::string InTermsOfOptions(absl::string_view message) {
  constexpr std::pair<absl::string_view, absl::string_view> kNames[] = {
      {"options.target ", "the server's address "},
      {"options.credentials.ca ", "--ca (LOSSD_CA) "},
      {"options.credentials.cert ", "--cert (LOSSD_CERT) "},
      {"options.credentials.key ", "--key (LOSSD_KEY) "},
      {"options.credentials.token ", "the token (LOSSD_TOKEN) "},
      {"options.slice_bytes ", "--slice-bytes "},
      {"options.streams ", "--streams "},
      {"options.normalizer ", "--normalizer "},
      {"options.grad_output ", "--grad-output "},
      {"options.shared_memory_bytes ", "--shared-memory-bytes "}};
  for (const auto& [field, option] : kNames) {
    if (absl::ConsumePrefix(&message, field)) return absl::StrCat(option, message);
  }
  return std::string(message);
}

std::string ErrorText(const absl::Status& status, bool json, const Style& style) {
  const std::optional<v1::ErrorDetail> detail = client::ErrorDetailOf(status);
  if (json) {
    return absl::StrCat(ErrorJson(status, detail).dump(-1, ' ', false, Json::error_handler_t::replace), "\n");
  }
  std::string text =
      absl::StrCat(style.Paint(Tone::kBad, "lossctl:"), " ",
                   WithUnits(PrintableLines(WithUnitOfField(InTermsOfOptions(status.message()), detail))));
  const std::string advice = Advice(status, detail);
  if (!advice.empty()) absl::StrAppend(&text, absl::EndsWith(text, "?") ? " " : "; ", advice);
  absl::StrAppend(&text, "\n");
  if (const auto help = status.GetPayload(kUsagePayload); help.has_value()) {
    absl::StrAppend(&text, "`", std::string(*help), "` describes it.\n");
  }
  if (!detail.has_value()) return text;
  if (detail->has_current_step()) absl::StrAppend(&text, "  open step: ", detail->current_step(), "\n");
  for (const std::string& missing : detail->missing()) absl::StrAppend(&text, "  missing: ", missing, "\n");
  return text;
}

}  // namespace lossd::cli
