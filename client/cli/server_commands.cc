// SPDX-License-Identifier: Apache-2.0
// The commands health, server, metrics and context.
#include <CLI/Error.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/context.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/http.h"
#include "client/cli/options.h"
#include "client/cpp/contexts.h"
#include "client/cpp/probe.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

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
  LOSSD_TRY(const client::Health health, client.monitoring().CheckHealth(service, context->timeout()));
  context->bad_news = health != client::Health::kServing;
  if (context->json) {
    context->PrintJson({{"server", context->server}, {"service", service}, {"health", HealthName(health)}});
  } else {
    const Tone tone = context->bad_news ? Tone::kBad : Tone::kGood;
    context->Print(
        absl::StrCat(context->server, ": ", context->style().Paint(tone, HealthName(health)), "\n"));
  }
  return absl::OkStatus();
}

// Asks the probe /livez or /readyz. Prints what the server says; exit code 1 unless the status is 200.
absl::Status RunProbe(Context* context, const std::string& probe, const std::string& http) {
  const absl::Duration timeout = context->timeout_seconds > 0 ? context->timeout() : absl::Seconds(5);
  LOSSD_TRY(const std::string address, context->ProbeAddress(http));
  LOSSD_TRY(const HttpAnswer answer, HttpProbe(address, absl::StrCat("/", probe, "z"), timeout));
  context->bad_news = answer.status != 200;
  const std::string says(absl::StripAsciiWhitespace(answer.body));
  if (context->json) {
    context->PrintJson({{"http", address}, {"probe", probe}, {"status", answer.status}, {"says", says}});
  } else {
    context->Print(absl::StrCat(
        address, ": ", answer.status == 200 ? probe : absl::StrCat("not ", probe, ": ", says), "\n"));
  }
  return absl::OkStatus();
}

absl::Status RunServer(Context* context, client::Client& client) {
  LOSSD_TRY(const v1::ServerDescription server, client.GetServer(context->timeout()));
  if (context->json) {
    context->PrintJson(ToJson(server));
  } else {
    context->Print(ServerText(server, context->server, context->style()));
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
  LOSSD_TRY(const std::string address, context->HttpAddress(http));
  LOSSD_TRY(const std::string text, HttpFetch(address, "/metrics", context->credentials, timeout));
  if (context->json) {
    context->PrintJson({{"samples", SamplesJson(ParseMetrics(text), pattern)}});
    return absl::OkStatus();
  }
  std::string lines;
  const std::vector<std::string> all = absl::StrSplit(text, '\n', absl::SkipEmpty());
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

// The commands context list, use, add, remove and show.

namespace {

struct ContextFlags {
  std::string name;
  std::string token_file, http;
  bool use = false, replace = false, none = false;
};

absl::StatusOr<std::string> File() {
  std::string path = client::ContextsPath();
  if (!path.empty()) return path;
  return absl::FailedPreconditionError(
      "there is no place for the file of contexts: none of LOSSD_CONFIG, XDG_CONFIG_HOME and HOME is set");
}

absl::Status Missing(const std::string& path, const std::string& name) {
  return errors::WithViolation(absl::NotFoundError(absl::StrCat("there is no context \"", name, "\" in ",
                                                                path, "; `lossctl context list` lists them")),
                               {"context", "must be one that was added", name});
}

Json ContextJson(const std::string& name, const client::NamedServer& server) {
  Json json = {{"name", name}, {"server", server.server}};
  const auto add = [&json](const char* field, const std::string& value) {
    if (!value.empty()) json[field] = value;
  };
  add("ca", server.ca);
  add("cert", server.cert);
  add("key", server.key);
  add("token_file", server.token_file);
  add("http", server.http);
  return json;
}

std::string Proof(const client::NamedServer& server) {
  if (!server.cert.empty() && !server.token_file.empty()) return "certificate, token";
  if (!server.cert.empty()) return "certificate";
  return server.token_file.empty() ? "none" : "token";
}

absl::Status RunListContexts(const Context& context) {
  LOSSD_TRY(const std::string path, File());
  LOSSD_TRY(const client::Contexts contexts, client::ReadContexts(path));
  if (context.json) {
    Json list = Json::array();
    for (const auto& [name, server] : contexts.by_name) list.push_back(ContextJson(name, server));
    context.PrintJson({{"file", path}, {"current", contexts.current}, {"contexts", list}});
    return absl::OkStatus();
  }
  if (contexts.by_name.empty()) {
    context.Print(absl::StrCat("no contexts in ", path,
                               "; add one with `lossctl context add NAME --server HOST:PORT`\n"));
    return absl::OkStatus();
  }
  const Style style = context.style();
  std::vector<Column> columns = {{"CURRENT"}, {"NAME"}, {"SERVER"}, {"TLS"}, {"SHOWS"}};
  if (style.wide) columns.insert(columns.end(), {{"CA"}, {"CERT"}, {"KEY"}, {"TOKEN FILE"}, {"HTTP"}});
  Table table(std::move(columns));
  for (const auto& [name, server] : contexts.by_name) {
    std::vector<std::string> cells = {name == contexts.current ? "*" : "", name, server.server,
                                      server.ca.empty() ? "no" : "yes", Proof(server)};
    if (style.wide) {
      cells.insert(cells.end(), {server.ca, server.cert, server.key, server.token_file, server.http});
    }
    table.AddRow(std::move(cells));
  }
  context.Print(table.ToString(style));
  return absl::OkStatus();
}

// Prints the server and the credentials that a command with these options and environment variables would
// use.
absl::Status RunShow(Context* context, const std::string& name) {
  if (!name.empty()) context->flags.context = name;
  LOSSD_RETURN_IF_ERROR(context->Settle());
  const client::CredentialOptions& credentials = context->credentials;
  if (context->json) {
    context->PrintJson({{"context", context->in_use},
                        {"server", context->server},
                        {"ca", credentials.ca},
                        {"cert", credentials.cert},
                        {"key", credentials.key},
                        {"token", !credentials.token.empty()},
                        {"http", context->named_http}});
    return absl::OkStatus();
  }
  const auto or_none = [](const std::string& text) { return text.empty() ? "none" : text; };
  FieldList fields;
  fields.Add("context", or_none(context->in_use));
  fields.Add("server", context->server);
  fields.Add("ca", or_none(credentials.ca));
  fields.Add("cert", or_none(credentials.cert));
  fields.Add("key", or_none(credentials.key));
  fields.Add("token", credentials.token.empty() ? "none" : "given");
  fields.Add("http", context->named_http.empty() ? "where the server says" : context->named_http);
  context->Print(fields.ToString());
  return absl::OkStatus();
}

// Says what was done, as text or as JSON.
void Report(const Context& context, const std::string& what, const std::string& name,
            const std::string& path) {
  if (context.json) return context.PrintJson({{what, name}, {"file", path}});
  context.Print(absl::StrCat(what, " context \"", name, "\"\n"));
}

absl::Status RunUse(const Context& context, const ContextFlags& flags) {
  LOSSD_TRY(const std::string path, File());
  const absl::Status status = client::ChangeContexts(path, [&](client::Contexts* contexts) {
    if (!flags.none && contexts->by_name.count(flags.name) == 0) return Missing(path, flags.name);
    contexts->current = flags.name;
    return absl::OkStatus();
  });
  if (status.ok()) Report(context, "using", flags.name, path);
  return status;
}

absl::Status RunRemove(const Context& context, const ContextFlags& flags) {
  LOSSD_TRY(const std::string path, File());
  const absl::Status status = client::ChangeContexts(path, [&](client::Contexts* contexts) {
    if (contexts->by_name.erase(flags.name) == 0) return Missing(path, flags.name);
    if (contexts->current == flags.name) contexts->current.clear();
    return absl::OkStatus();
  });
  if (status.ok()) Report(context, "removed", flags.name, path);
  return status;
}

// Makes a path of the command line absolute, because lossctl may read the file of contexts in another folder
// later.
absl::StatusOr<std::string> Absolute(const std::string& file) {
  if (file.empty()) return file;
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(file, error);
  if (error) return absl::InternalError(absl::StrCat(file, ": ", error.message()));
  return path.lexically_normal().string();
}

absl::StatusOr<client::NamedServer> MakeServer(const Context& context, const ContextFlags& flags) {
  client::NamedServer server{.server = context.flags.server, .http = flags.http};
  for (const auto& [file, member] : {std::pair(context.flags.ca, &client::NamedServer::ca),
                                     std::pair(context.flags.cert, &client::NamedServer::cert),
                                     std::pair(context.flags.key, &client::NamedServer::key),
                                     std::pair(flags.token_file, &client::NamedServer::token_file)}) {
    LOSSD_TRY(server.*member, Absolute(file));
  }
  client::CredentialOptions credentials{.ca = server.ca, .cert = server.cert, .key = server.key};
  if (!server.token_file.empty()) {
    LOSSD_TRY(credentials.token, client::ReadTokenFile(server.token_file));
  }
  const auto usable = client::Credentials::Create(credentials);  // checks the files by reading them
  if (!usable.ok()) return usable.status();
  return server;
}

absl::Status RunAdd(const Context& context, const ContextFlags& flags) {
  LOSSD_TRY(const std::string path, File());
  LOSSD_RETURN_IF_ERROR(client::CheckContextName(flags.name));
  if (context.flags.server.empty()) {
    return errors::FieldError("--server", "be given: the address that the context stands for", "nothing");
  }
  if (const std::string problem = client::internal::TargetProblem(context.flags.server); !problem.empty()) {
    return errors::WithViolation(
        absl::InvalidArgumentError(absl::StrCat("--server is '", context.flags.server, "'; ", problem)),
        {"--server", "must be the address of a server", context.flags.server});
  }
  LOSSD_TRY(const client::NamedServer server, MakeServer(context, flags));
  const absl::Status status = client::ChangeContexts(path, [&](client::Contexts* contexts) {
    const auto found = contexts->by_name.find(flags.name);
    if (found != contexts->by_name.end() && !flags.replace) {
      return errors::WithViolation(
          absl::AlreadyExistsError(absl::StrCat("there is a context \"", flags.name, "\" already, for ",
                                                found->second.server, "; --replace takes its place")),
          {"context", "must be new", flags.name});
    }
    contexts->by_name[flags.name] = server;
    if (flags.use) contexts->current = flags.name;
    return absl::OkStatus();
  });
  if (status.ok()) Report(context, "added", flags.name, path);
  return status;
}

template <typename Run>
void SetAction(CLI::App* command, Context* context, Run run) {
  command->callback([context, run] { context->action = run; });
}

CLI::Option* AddName(CLI::App* command, ContextFlags* flags, const char* description) {
  return command->add_option("CONTEXT", flags->name, description)->type_name("");
}

}  // namespace

void AddContextCommand(CLI::App* app, Context* context) {
  CLI::App* group = app->add_subcommand("context", "Keep servers with their certificates and tokens by name");
  group->require_subcommand(1);
  group->fallthrough();
  group->footer(
      "They are in the file that LOSSD_CONFIG names, else in lossd/contexts.json in XDG_CONFIG_HOME or "
      "~/.config.");
  auto flags = std::make_shared<ContextFlags>();

  CLI::App* list = group->add_subcommand("list", "List the contexts");
  SetAction(list, context, [=] { return RunListContexts(*context); });

  CLI::App* use = group->add_subcommand("use", "Make a context the current one");
  CLI::Option* used = AddName(use, flags.get(), "Its name");
  use->add_flag("--none", flags->none, "No context is the current one any more")->excludes(used);
  SetAction(use, context, [=] { return RunUse(*context, *flags); });
  use->parse_complete_callback([=] {
    if (flags->name.empty() && !flags->none) throw CLI::RequiredError("CONTEXT, or --none");
  });

  CLI::App* add =
      group->add_subcommand("add", "Add a context: --server, --ca, --cert and --key as for any command");
  // The empty type name keeps shells from completing NAME with the existing names.
  add->add_option("NAME", flags->name, "Its name")->required()->type_name("");
  add->add_option("--token-file", flags->token_file,
                  "A file whose one line is the token; only its owner may read it")
      ->type_name("FILE");
  AddHttp(add, &flags->http, "The server's HTTP address [where the server says]");
  add->add_flag("--use", flags->use, "Make it the current one");
  add->add_flag("--replace", flags->replace, "Take the place of one of that name");
  SetAction(add, context, [=] { return RunAdd(*context, *flags); });

  CLI::App* remove = group->add_subcommand("remove", "Remove a context; its files stay");
  AddName(remove, flags.get(), "Its name")->required();
  SetAction(remove, context, [=] { return RunRemove(*context, *flags); });

  CLI::App* show = group->add_subcommand("show", "Show which server and files a command would use");
  AddName(show, flags.get(), "Those of this context [those of options, environment and current context]");
  SetAction(show, context, [=] { return RunShow(context, flags->name); });
}

}  // namespace lossd::cli
