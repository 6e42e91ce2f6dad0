// SPDX-License-Identifier: Apache-2.0
// The commands health, server and metrics.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/http.h"
#include "client/cli/json.h"
#include "client/cli/options.h"
#include "client/cli/value_checks.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

absl::string_view HealthName(client::Health health) {
  switch (health) {
    case client::Health::kServing:
      return "serving";
    case client::Health::kNotServing:
      return "not serving";
    case client::Health::kUnknownService:
      return "unknown service";
  }
  return "unknown";
}

absl::Status RunHealth(Context* context, const std::string& service, client::Client& client) {
  const absl::StatusOr<client::Health> health = client.monitoring().CheckHealth(service, context->timeout());
  if (!health.ok()) return health.status();
  context->bad_news = *health != client::Health::kServing;
  if (context->json) {
    context->PrintJson({{"server", context->server}, {"service", service}, {"health", HealthName(*health)}});
  } else {
    const Tone tone = context->bad_news ? Tone::kBad : Tone::kGood;
    context->Print(
        absl::StrCat(context->server, ": ", context->style().Paint(tone, HealthName(*health)), "\n"));
  }
  return absl::OkStatus();
}

// Exit code 1, and what the server says, unless it is live, or ready.
absl::Status RunProbe(Context* context, const std::string& probe, const std::string& http) {
  const absl::Duration timeout = context->timeout_seconds > 0 ? context->timeout() : absl::Seconds(5);
  const absl::StatusOr<std::string> address = context->ProbeAddress(http);
  if (!address.ok()) return address.status();
  const absl::StatusOr<HttpAnswer> answer = HttpProbe(*address, absl::StrCat("/", probe, "z"), timeout);
  if (!answer.ok()) return answer.status();
  context->bad_news = answer->status != 200;
  const std::string says(absl::StripAsciiWhitespace(answer->body));
  if (context->json) {
    context->PrintJson({{"http", *address}, {"probe", probe}, {"status", answer->status}, {"says", says}});
  } else {
    context->Print(absl::StrCat(
        *address, ": ", answer->status == 200 ? probe : absl::StrCat("not ", probe, ": ", says), "\n"));
  }
  return absl::OkStatus();
}

absl::Status RunServer(Context* context, client::Client& client) {
  const absl::StatusOr<v1::ServerDescription> server = client.GetServer(context->timeout());
  if (!server.ok()) return server.status();
  if (context->json) {
    context->PrintJson(ToJson(*server));
  } else {
    context->Print(ServerText(*server, context->server, context->style()));
  }
  return absl::OkStatus();
}

Json SamplesJson(const std::vector<MetricSample>& samples, const std::regex& filter) {
  Json result = Json::array();
  for (const MetricSample& sample : samples) {
    if (!std::regex_search(sample.name, filter)) continue;
    result.push_back({{"name", sample.name}, {"labels", sample.labels}, {"value", sample.value}});
  }
  return result;
}

absl::Status RunMetrics(Context* context, const std::string& http, const std::string& filter) {
  std::regex pattern;
  try {
    pattern = std::regex(filter);
  } catch (const std::regex_error&) {
    return errors::WithViolation(
        absl::InvalidArgumentError(absl::StrCat("--filter: \"", filter, "\" is not a regular expression")),
        {"--filter", "must be a regular expression", filter});
  }
  const absl::Duration timeout = context->timeout_seconds > 0 ? context->timeout() : absl::Seconds(5);
  const absl::StatusOr<std::string> address = context->HttpAddress(http);
  if (!address.ok()) return address.status();
  const absl::StatusOr<std::string> text = HttpFetch(*address, "/metrics", context->credentials, timeout);
  if (!text.ok()) return text.status();
  if (context->json) {
    context->PrintJson(SamplesJson(ParseMetrics(*text), pattern));
    return absl::OkStatus();
  }
  std::string lines;
  const std::vector<std::string> all = absl::StrSplit(*text, '\n', absl::SkipEmpty());
  for (const std::string& line : all) {
    if (filter.empty() || std::regex_search(line, pattern)) absl::StrAppend(&lines, line, "\n");
  }
  context->Print(lines);
  return absl::OkStatus();
}

}  // namespace

void AddServerCommands(CLI::App* app, Context* context) {
  CLI::App* health =
      app->add_subcommand("health", "Say whether the server serves; exit code 1 if it does not");
  auto service = std::make_shared<std::string>();
  health->add_option("SERVICE", *service, "e.g. lossd.v1.LossService; default: the server as a whole")
      ->type_name("");
  auto probe = std::make_shared<std::string>();
  auto probed = std::make_shared<std::string>();
  health->add_option("--probe", *probe, "Ask /livez or /readyz over HTTP instead, as probes of containers do")
      ->type_name("live|ready")
      ->check(Rule("be live or ready", [](const auto& text) { return text == "live" || text == "ready"; }))
      ->excludes("SERVICE");
  AddHttp(health, probed.get(),
          "The HTTP address for --probe [the context's, else the server's host, port 7071]")
      ->envname("LOSSD_PROBE");
  const auto ask = [=](client::Client& client) { return RunHealth(context, *service, client); };
  health->callback([=] {
    context->action = [=]() -> absl::Status {
      return probe->empty() ? WithClient(context, ask) : RunProbe(context, *probe, *probed);
    };
  });

  CLI::App* server = app->add_subcommand("server", "Say what the server is, has and allows");
  SetClientAction(server, context, [=](client::Client& client) { return RunServer(context, client); });

  CLI::App* metrics = app->add_subcommand("metrics", "Print the server's metrics");
  auto http = std::make_shared<std::string>();
  auto filter = std::make_shared<std::string>();
  AddHttp(metrics, http.get());
  metrics->add_option("--filter", *filter, "Only lines (with --json: metrics) that match")
      ->type_name("REGEX");
  metrics->callback([=] { context->action = [=] { return RunMetrics(context, *http, *filter); }; });
}

}  // namespace lossd::cli
