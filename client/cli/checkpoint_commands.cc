// SPDX-License-Identifier: Apache-2.0
// save, load, checkpoints
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/options.h"
#include "client/cli/value_checks.h"

namespace lossd::cli {
namespace {

struct SaveFlags {
  std::string head;
  std::string name;
  std::optional<uint32_t> keep;
  bool cancel_with_call = false;

  v1::SaveCheckpointRequest ToRequest() const {
    v1::SaveCheckpointRequest request;
    request.set_head(head);
    request.set_name(name);
    if (keep.has_value()) request.set_keep(*keep);
    request.set_cancel_with_call(cancel_with_call);
    return request;
  }
};

// One line on stderr that is written over.
void ShowProgress(const v1::SaveProgress& progress) {
  const auto bytes = [](uint64_t count) { return HumanBytes(static_cast<double>(count)); };
  std::string text = "waiting for its turn";
  if (progress.total_bytes() > 0) {
    text = absl::StrCat("saving ", bytes(progress.written_bytes()), " of ", bytes(progress.total_bytes()),
                        progress.phase() == v1::SAVE_PHASE_READING ? ", steps wait" : ", steps go on");
  }
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
}

absl::Status RunSave(Context* context, const SaveFlags& flags, client::Client& client) {
  const bool shows_progress = ShowsProgress();
  const absl::StatusOr<v1::SaveCheckpointResponse> saved = client.SaveCheckpoint(
      flags.ToRequest(),
      [&](const v1::SaveProgress& progress) {
        if (shows_progress) ShowProgress(progress);
      },
      context->timeout());
  if (shows_progress) std::fputs("\r\033[K", stderr);
  if (!saved.ok()) return saved.status();
  if (context->json) {
    context->PrintJson(
        {{"checkpoint", saved->checkpoint()},
         {"incarnation", HumanIncarnation(saved->state().incarnation())},
         {"step", saved->state().step()},
         {"bytes", saved->bytes()},
         {"seconds", saved->seconds()},
         {"read_seconds", saved->read_seconds()},
         {"pruned", std::vector<std::string>(saved->pruned().begin(), saved->pruned().end())}});
    return absl::OkStatus();
  }
  context->Print(absl::StrCat("saved ", saved->checkpoint(), " (step ", HumanCount(saved->state().step()),
                              ", ", HumanBytes(static_cast<double>(saved->bytes())), ") in ",
                              HumanSeconds(saved->seconds()), "\n"));
  for (const std::string& pruned : saved->pruned()) context->Print(absl::StrCat("removed ", pruned, "\n"));
  return absl::OkStatus();
}

// In UTC.
std::string UtcText(int64_t unix_seconds) {
  if (unix_seconds == 0) return "";
  return absl::FormatTime("%Y-%m-%d %H:%M:%SZ", absl::FromUnixSeconds(unix_seconds), absl::UTCTimeZone());
}

nlohmann::ordered_json InfoJson(const v1::CheckpointInfo& info) {
  if (!info.error().empty()) return {{"checkpoint", info.checkpoint()}, {"error", info.error()}};
  return {{"checkpoint", info.checkpoint()},
          {"step", info.step()},
          {"hidden_size", info.spec().hidden_size()},
          {"vocab_size", info.spec().vocab_size()},
          {"bytes", info.bytes()},
          {"saved_unix_seconds", info.saved_unix_seconds()},
          {"automatic", info.automatic()},
          {"incarnation", HumanIncarnation(info.incarnation())}};
}

absl::Status RunListCheckpoints(Context* context, const std::string& head, client::Client& client) {
  const absl::StatusOr<v1::ListCheckpointsResponse> list = client.ListCheckpoints(head, context->timeout());
  if (!list.ok()) return list.status();
  if (context->json) {
    nlohmann::ordered_json checkpoints = nlohmann::ordered_json::array();
    for (const v1::CheckpointInfo& info : list->checkpoints()) checkpoints.push_back(InfoJson(info));
    context->PrintJson({{"checkpoints", checkpoints}, {"left_out", list->left_out()}});
    return absl::OkStatus();
  }
  if (list->checkpoints().empty() && list->left_out() == 0) {
    context->Print(head.empty() ? "no checkpoints on this server\n"
                                : absl::StrCat("no checkpoints of head \"", head, "\"\n"));
    return absl::OkStatus();
  }
  const Style style = context->style();
  std::vector<Column> columns = {
      {"CHECKPOINT"}, {"STEP", Align::kRight}, {"SIZE", Align::kRight}, {"SAVED"}, {"NAMED BY"}};
  if (style.wide) columns.insert(columns.end(), {{"HIDDEN x VOCAB"}, {"INCARNATION"}});
  Table table(columns);
  for (const v1::CheckpointInfo& info : list->checkpoints()) {
    std::vector<std::string> cells = {info.checkpoint(), "", "", style.Paint(Tone::kBad, info.error())};
    if (info.error().empty()) {
      cells = {info.checkpoint(), HumanCount(info.step()), HumanBytes(static_cast<double>(info.bytes())),
               UtcText(info.saved_unix_seconds()), info.automatic() ? "server" : "client"};
      if (style.wide) cells.insert(cells.end(), {Shape(info.spec()), HumanIncarnation(info.incarnation())});
    }
    cells.resize(columns.size());
    table.AddRow(std::move(cells));
  }
  context->Print(table.ToString(style));
  if (list->left_out() > 0) context->Print(absl::StrCat("and ", HumanCount(list->left_out()), " more\n"));
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
  auto flags = std::make_shared<SaveFlags>();
  CLI::App* save = app->add_subcommand("save", "Write a checkpoint on the server");
  AddHead(save, &flags->head);
  save->add_option("--name", flags->name, "Name of the checkpoint [step-<number>]")->check(NotEmpty());
  save->add_option("--keep", flags->keep,
                   "Afterwards keep so many checkpoints that the server named, 0: all [the server's "
                   "--keep_checkpoints]");
  save->add_flag("--cancel-with-call", flags->cancel_with_call,
                 "End the save when lossctl ends; else it goes on");
  SetClientAction(save, context, [=](client::Client& client) { return RunSave(context, *flags, client); });

  auto head = std::make_shared<std::string>();
  auto name = std::make_shared<std::string>();
  CLI::App* load = app->add_subcommand("load", "Restore a head from a checkpoint");
  load->add_option("CHECKPOINT", *name, "As printed by save: HEAD/NAME")
      ->required()
      ->type_name("")
      ->check(Rule("be HEAD/NAME, as `lossctl checkpoints` prints it", [](const std::string& text) {
        const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('/', 1));
        return !parts.first.empty() && !parts.second.empty();
      }));
  load->add_option("--head", *head, "The head to restore into or to make [the checkpoint's own]")
      ->check(NotEmpty());
  SetClientAction(load, context,
                  [=](client::Client& client) { return RunLoad(context, *name, *head, client); });

  CLI::App* list = app->add_subcommand("checkpoints", "List the checkpoints on the server");
  list->add_option("HEAD", *head, "Of this head alone")->type_name("");
  SetClientAction(list, context,
                  [=](client::Client& client) { return RunListCheckpoints(context, *head, client); });
}

}  // namespace lossd::cli
