// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/grpc_log.h"

#include <grpc/support/log.h>

#include "absl/strings/string_view.h"
#include "kernels/errors/text.h"
#include "server/log/line_budget.h"
#include "server/log/log.h"

namespace lossd::rpc {
namespace {

constexpr size_t kMaxMessageBytes = 500;

log::LogLevel LevelOf(gpr_log_severity severity) {
  switch (severity) {
    case GPR_LOG_SEVERITY_DEBUG:
      return log::LogLevel::kDebug;
    case GPR_LOG_SEVERITY_INFO:
      return log::LogLevel::kInfo;
    case GPR_LOG_SEVERITY_ERROR:
      break;
  }
  return log::LogLevel::kWarning;  // of a connection: the server goes on
}

void LogMessage(gpr_log_func_args* message) {
  static auto* const budget = new log::LineBudget(20);
  const std::optional<int64_t> left_out = budget->Take();
  if (!left_out.has_value()) return;
  log::Log(
      LevelOf(message->severity), "gRPC",
      {{"says", errors::Shortened(message->message, kMaxMessageBytes)}, {"messages_left_out", *left_out}});
}

}  // namespace

void LogGrpcMessages() { gpr_set_log_function(&LogMessage); }

}  // namespace lossd::rpc
