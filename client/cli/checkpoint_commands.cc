// SPDX-License-Identifier: Apache-2.0
// The commands save, load, checkpoints and checkpoints rm.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

nlohmann::ordered_json InfoJson(const v1::CheckpointInfo& info) {
  if (!info.error().empty()) return {{"checkpoint", info.checkpoint()}, {"error", info.error()}};
  return {{"checkpoint", info.checkpoint()},
          {"step", info.step()},
          {"hidden_size", info.spec().hidden_size()},
          {"vocab_size", info.spec().vocab_size()},
          {"bytes", info.bytes()},
          {"saved_unix_seconds", info.saved_unix_seconds()},
          {"automatic", info.automatic()},
          {"run", info.run()},
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
  if (style.wide) columns.insert(columns.end(), {{"RUN"}, {"HIDDEN x VOCAB"}, {"INCARNATION"}});
  Table table(columns);
  for (const v1::CheckpointInfo& info : list->checkpoints()) {
    std::vector<std::string> cells = {info.checkpoint(), "", "", style.Paint(Tone::kBad, info.error())};
    if (info.error().empty()) {
      cells = {info.checkpoint(), HumanCount(info.step()), HumanBytes(static_cast<double>(info.bytes())),
               UtcText(info.saved_unix_seconds()), info.automatic() ? "server" : "client"};
      if (style.wide) {
        cells.insert(cells.end(),
                     {Printable(info.run()), Shape(info.spec()), HumanIncarnation(info.incarnation())});
      }
    }
    cells.resize(columns.size());
    table.AddRow(std::move(cells));
  }
  context->Print(table.ToString(style));
  if (list->left_out() > 0) context->Print(absl::StrCat("and ", HumanCount(list->left_out()), " more\n"));
  return absl::OkStatus();
}

// "lm/a, lm/b and 3 more"
std::string Named(const std::vector<std::string>& names) {
  constexpr size_t kMostNamed = 5;
  const size_t named = std::min(names.size(), kMostNamed);
  std::string text = absl::StrJoin(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(named), ", ");
  if (names.size() > named) absl::StrAppend(&text, " and ", HumanCount(names.size() - named), " more");
  return Printable(text);
}

// Removes all that it can; the first error counts.
absl::Status RunRemove(Context* context, const std::vector<std::string>& names, bool yes,
                       client::Client& client) {
  std::vector<std::string> once;
  for (const std::string& name : names) {
    if (std::find(once.begin(), once.end(), name) == once.end()) once.push_back(name);
  }
  const std::string question = absl::StrCat(
      "Remove ", once.size() == 1 ? "checkpoint " : absl::StrCat(HumanCount(once.size()), " checkpoints: "),
      Named(once), "?");
  if (absl::Status agreed = Confirm(yes, question, "not removed"); !agreed.ok()) return agreed;
  absl::Status first_error;
  nlohmann::ordered_json removed = nlohmann::ordered_json::array();
  for (const std::string& name : once) {
    const absl::StatusOr<v1::DeleteCheckpointResponse> deleted =
        client.DeleteCheckpoint(name, context->timeout());
    first_error.Update(deleted.status());
    if (!deleted.ok()) continue;
    removed.push_back({{"checkpoint", name}, {"bytes", deleted->bytes()}});
    if (!context->json) {
      context->Print(absl::StrCat("removed ", Printable(name), " (",
                                  HumanBytes(static_cast<double>(deleted->bytes())), ")\n"));
    }
  }
  if (context->json) context->PrintJson({{"removed", removed}});
  return first_error;
}

// Of a head that is there and has steps which no checkpoint has, on a terminal.
absl::Status AskBeforeLoad(Context* context, const std::string& checkpoint, const std::string& head,
                           client::Client& client) {
  if (!CanAsk()) return absl::OkStatus();
  const std::string name = head.empty() ? checkpoint.substr(0, checkpoint.find('/')) : head;
  const absl::StatusOr<v1::HeadDescription> there = client.DescribeHead(name, context->timeout());
  if (!there.ok()) return absl::OkStatus();  // the load makes it, or says what is wrong
  const std::optional<uint64_t> since = StepsSinceSave(*there);
  const bool is_saved = since.has_value() ? *since == 0 : there->state().step() == 0;
  if (is_saved && there->step_rows() == 0) return absl::OkStatus();
  return Confirm(false, absl::StrCat(WhatIsLost(*there), ". Load ", Printable(checkpoint), " over it?"),
                 "not loaded");
}

absl::Status RunLoad(Context* context, const std::string& checkpoint, const std::string& head, bool yes,
                     client::Client& client) {
  if (!yes) {
    if (absl::Status agreed = AskBeforeLoad(context, checkpoint, head, client); !agreed.ok()) return agreed;
  }
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
  auto yes = std::make_shared<bool>(false);
  const auto is_name = Rule("be HEAD/NAME, as `lossctl checkpoints` prints it", [](const std::string& text) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('/', 1));
    return !parts.first.empty() && !parts.second.empty();
  });
  CLI::App* load = app->add_subcommand("load", "Restore a head from a checkpoint");
  load->add_option("CHECKPOINT", *name, "As printed by save: HEAD/NAME")
      ->required()
      ->type_name("")
      ->check(is_name);
  load->add_flag("-y,--yes", *yes,
                 "On a terminal: do not ask where the head has steps that no checkpoint has");
  load->add_option("--head", *head, "The head to restore into or to make [the checkpoint's own]")
      ->check(NotEmpty());
  SetClientAction(load, context,
                  [=](client::Client& client) { return RunLoad(context, *name, *head, *yes, client); });

  CLI::App* list = app->add_subcommand("checkpoints", "List the checkpoints on the server, or remove some");
  list->add_option("HEAD", *head, "Of this head alone")->type_name("");
  list->fallthrough();
  auto names = std::make_shared<std::vector<std::string>>();
  CLI::App* remove = list->add_subcommand("rm", "Remove checkpoints");
  remove->add_option("CHECKPOINT", *names, "As printed by save: HEAD/NAME")
      ->required()
      ->type_name("")
      ->check(is_name);
  AddYes(remove, yes.get());
  SetAskingAction(remove, context, yes,
                  [=](client::Client& client) { return RunRemove(context, *names, *yes, client); });
  list->callback([=] {
    if (list->got_subcommand(remove)) return;
    context->action = [=] {
      return WithClient(context,
                        [=](client::Client& client) { return RunListCheckpoints(context, *head, client); });
    };
  });
}

}  // namespace lossd::cli
