// SPDX-License-Identifier: Apache-2.0
// The commands context list, use, add, remove and show.
#include <CLI/Error.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/contexts.h"
#include "client/cli/format.h"
#include "client/cli/json.h"
#include "client/cli/options.h"
#include "client/cpp/probe.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

struct ContextFlags {
  std::string name;
  std::string token_file, http;
  bool use = false, replace = false, none = false;
};

absl::StatusOr<std::string> File() {
  std::string path = ContextsPath();
  if (!path.empty()) return path;
  return absl::FailedPreconditionError(
      "there is no place for the file of contexts: none of LOSSD_CONFIG, XDG_CONFIG_HOME and HOME is set");
}

absl::Status Missing(const std::string& path, const std::string& name) {
  return errors::WithViolation(absl::NotFoundError(absl::StrCat("there is no context \"", name, "\" in ",
                                                                path, "; `lossctl context list` lists them")),
                               {"context", "must be one that was added", name});
}

Json ContextJson(const std::string& name, const NamedServer& server) {
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

std::string Proof(const NamedServer& server) {
  if (!server.cert.empty() && !server.token_file.empty()) return "certificate, token";
  if (!server.cert.empty()) return "certificate";
  return server.token_file.empty() ? "none" : "token";
}

absl::Status RunListContexts(const Context& context) {
  const absl::StatusOr<std::string> path = File();
  if (!path.ok()) return path.status();
  const absl::StatusOr<Contexts> contexts = ReadContexts(*path);
  if (!contexts.ok()) return contexts.status();
  if (context.json) {
    Json list = Json::array();
    for (const auto& [name, server] : contexts->by_name) list.push_back(ContextJson(name, server));
    context.PrintJson({{"file", *path}, {"current", contexts->current}, {"contexts", list}});
    return absl::OkStatus();
  }
  if (contexts->by_name.empty()) {
    context.Print(absl::StrCat("no contexts in ", *path,
                               "; add one with `lossctl context add NAME --server HOST:PORT`\n"));
    return absl::OkStatus();
  }
  const Style style = context.style();
  std::vector<Column> columns = {{"CURRENT"}, {"NAME"}, {"SERVER"}, {"TLS"}, {"SHOWS"}};
  if (style.wide) columns.insert(columns.end(), {{"CA"}, {"CERT"}, {"KEY"}, {"TOKEN FILE"}, {"HTTP"}});
  Table table(std::move(columns));
  for (const auto& [name, server] : contexts->by_name) {
    std::vector<std::string> cells = {name == contexts->current ? "*" : "", name, server.server,
                                      server.ca.empty() ? "no" : "yes", Proof(server)};
    if (style.wide) {
      cells.insert(cells.end(), {server.ca, server.cert, server.key, server.token_file, server.http});
    }
    table.AddRow(std::move(cells));
  }
  context.Print(table.ToString(style));
  return absl::OkStatus();
}

// What a command with these options and variables would use.
absl::Status RunShow(Context* context, const std::string& name) {
  if (!name.empty()) context->flags.context = name;
  if (absl::Status status = context->Settle(); !status.ok()) return status;
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

// Says what was done, to a person or a script.
void Report(const Context& context, const std::string& what, const std::string& name,
            const std::string& path) {
  if (context.json) return context.PrintJson({{what, name}, {"file", path}});
  context.Print(absl::StrCat(what, " context \"", name, "\"\n"));
}

absl::Status RunUse(const Context& context, const ContextFlags& flags) {
  const absl::StatusOr<std::string> path = File();
  if (!path.ok()) return path.status();
  const absl::Status status = ChangeContexts(*path, [&](Contexts* contexts) {
    if (!flags.none && contexts->by_name.count(flags.name) == 0) return Missing(*path, flags.name);
    contexts->current = flags.name;
    return absl::OkStatus();
  });
  if (status.ok()) Report(context, "using", flags.name, *path);
  return status;
}

absl::Status RunRemove(const Context& context, const ContextFlags& flags) {
  const absl::StatusOr<std::string> path = File();
  if (!path.ok()) return path.status();
  const absl::Status status = ChangeContexts(*path, [&](Contexts* contexts) {
    if (contexts->by_name.erase(flags.name) == 0) return Missing(*path, flags.name);
    if (contexts->current == flags.name) contexts->current.clear();
    return absl::OkStatus();
  });
  if (status.ok()) Report(context, "removed", flags.name, *path);
  return status;
}

// A path of the command line, for whoever reads the file from another folder.
absl::StatusOr<std::string> Absolute(const std::string& file) {
  if (file.empty()) return file;
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(file, error);
  if (error) return absl::InternalError(absl::StrCat(file, ": ", error.message()));
  return path.lexically_normal().string();
}

absl::StatusOr<NamedServer> MakeServer(const Context& context, const ContextFlags& flags) {
  NamedServer server{.server = context.flags.server, .http = flags.http};
  for (const auto& [file, member] :
       {std::pair(context.flags.ca, &NamedServer::ca), std::pair(context.flags.cert, &NamedServer::cert),
        std::pair(context.flags.key, &NamedServer::key),
        std::pair(flags.token_file, &NamedServer::token_file)}) {
    absl::StatusOr<std::string> path = Absolute(file);
    if (!path.ok()) return path.status();
    server.*member = *std::move(path);
  }
  client::CredentialOptions credentials{.ca = server.ca, .cert = server.cert, .key = server.key};
  if (!server.token_file.empty()) {
    absl::StatusOr<std::string> token = ReadTokenFile(server.token_file);
    if (!token.ok()) return token.status();
    credentials.token = *std::move(token);
  }
  const auto usable = client::Credentials::Create(credentials);  // reads the files
  if (!usable.ok()) return usable.status();
  return server;
}

absl::Status RunAdd(const Context& context, const ContextFlags& flags) {
  const absl::StatusOr<std::string> path = File();
  if (!path.ok()) return path.status();
  if (absl::Status status = CheckContextName(flags.name); !status.ok()) return status;
  if (context.flags.server.empty()) {
    return errors::FieldError("--server", "be given: the address that the context stands for", "nothing");
  }
  if (const std::string problem = client::internal::TargetProblem(context.flags.server); !problem.empty()) {
    return errors::WithViolation(
        absl::InvalidArgumentError(absl::StrCat("--server is '", context.flags.server, "'; ", problem)),
        {"--server", "must be the address of a server", context.flags.server});
  }
  const absl::StatusOr<NamedServer> server = MakeServer(context, flags);
  if (!server.ok()) return server.status();
  const absl::Status status = ChangeContexts(*path, [&](Contexts* contexts) {
    const auto found = contexts->by_name.find(flags.name);
    if (found != contexts->by_name.end() && !flags.replace) {
      return errors::WithViolation(
          absl::AlreadyExistsError(absl::StrCat("there is a context \"", flags.name, "\" already, for ",
                                                found->second.server, "; --replace takes its place")),
          {"context", "must be new", flags.name});
    }
    contexts->by_name[flags.name] = *server;
    if (flags.use) contexts->current = flags.name;
    return absl::OkStatus();
  });
  if (status.ok()) Report(context, "added", flags.name, *path);
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
  // Not completed with the names that are in use.
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
