// SPDX-License-Identifier: Apache-2.0
// trace
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/cli/http_fetch.h"
#include "client/cli/interrupt.h"
#include "client/cli/options.h"
#include "client/cli/value_checks.h"

namespace lossd::cli {
namespace {

struct TraceFlags {
  std::string http;
  double seconds = 2;
};

absl::Status RunTrace(Context* context, const TraceFlags& flags) {
  const absl::Duration timeout = context->timeout_seconds > 0 ? context->timeout() : absl::Seconds(30);
  const absl::StatusOr<std::string> address = context->HttpAddress(flags.http);
  if (!address.ok()) return address.status();
  const absl::StatusOr<std::string> started =
      HttpPost(*address, absl::StrCat("/trace?seconds=", flags.seconds), context->credentials, timeout);
  if (!started.ok()) return started.status();
  const auto answer = nlohmann::json::parse(*started, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object() || !answer.contains("recording") || !answer["recording"].is_number_unsigned()) {
    return absl::InternalError("the server's answer names no recording");
  }
  const Interrupt interrupt;
  interrupt.Sleep(absl::Seconds(flags.seconds) + absl::Milliseconds(50));
  if (interrupt.received()) return absl::CancelledError("interrupted; the server drops the trace by itself");
  const absl::StatusOr<std::string> trace =
      HttpPost(*address, absl::StrCat("/trace.json?recording=", answer["recording"].get<uint64_t>()),
               context->credentials, timeout);
  if (!trace.ok()) return trace.status();
  context->Print(*trace);
  return absl::OkStatus();
}

}  // namespace

void AddTraceCommand(CLI::App* app, Context* context) {
  CLI::App* trace = app->add_subcommand("trace", "Record what becomes of slices and chunks, for Perfetto");
  trace->footer(
      "Prints Chrome's Trace Event Format: lossctl trace --seconds 2 > trace.json, then open it in "
      "https://ui.perfetto.dev or chrome://tracing. Needs the role admin on a server that asks.");
  auto flags = std::make_shared<TraceFlags>();
  trace->add_option("--seconds", flags->seconds, "How long to record, 0.01 to 30 [2]")
      ->check(NumberFromTo(0.01, 30));
  AddHttp(trace, &flags->http);
  trace->callback([=] { context->action = [=] { return RunTrace(context, *flags); }; });
}

}  // namespace lossd::cli
