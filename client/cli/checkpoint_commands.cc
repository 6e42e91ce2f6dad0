// save, load
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/options.h"

namespace lossd::cli {
namespace {

absl::Status RunSave(Context* context, const std::string& head, const std::string& name,
                     client::Client& client) {
  const absl::StatusOr<v1::SaveCheckpointResponse> saved =
      client.SaveCheckpoint(head, name, context->timeout());
  if (!saved.ok()) return saved.status();
  if (context->json) {
    context->PrintJson({{"checkpoint", saved->checkpoint()},
                        {"incarnation", HumanIncarnation(saved->state().incarnation())},
                        {"step", saved->state().step()},
                        {"bytes", saved->bytes()},
                        {"seconds", saved->seconds()}});
    return absl::OkStatus();
  }
  context->Print(absl::StrCat("saved ", saved->checkpoint(), " (step ", HumanCount(saved->state().step()),
                              ", ", HumanBytes(static_cast<double>(saved->bytes())), ") in ",
                              HumanSeconds(saved->seconds()), "\n"));
  return absl::OkStatus();
}

absl::Status RunLoad(Context* context, const std::string& checkpoint, const std::string& head,
                     client::Client& client) {
  const absl::StatusOr<v1::HeadDescription> loaded =
      client.LoadCheckpoint(checkpoint, head, context->timeout());
  if (!loaded.ok()) return loaded.status();
  if (context->json) {
    context->PrintJson(ToJson(*loaded));
  } else {
    context->Print(absl::StrCat("loaded ", checkpoint, " into head \"", loaded->spec().name(), "\", step ",
                                HumanCount(loaded->state().step()), "\n"));
  }
  return absl::OkStatus();
}

}  // namespace

void AddCheckpointCommands(CLI::App* app, Context* context) {
  auto head = std::make_shared<std::string>();
  auto name = std::make_shared<std::string>();
  CLI::App* save = app->add_subcommand("save", "Write a checkpoint on the server");
  AddHead(save, head.get());
  save->add_option("--name", *name, "Name of the checkpoint [step-<number>]");
  SetClientAction(save, context,
                  [=](client::Client& client) { return RunSave(context, *head, *name, client); });

  CLI::App* load = app->add_subcommand("load", "Restore a head from a checkpoint");
  load->add_option("CHECKPOINT", *name, "As printed by save: <head>/<name>")->required()->type_name("");
  load->add_option("--head", *head, "The head to restore into or to make [the checkpoint's own]");
  SetClientAction(load, context,
                  [=](client::Client& client) { return RunLoad(context, *name, *head, client); });
}

}  // namespace lossd::cli
