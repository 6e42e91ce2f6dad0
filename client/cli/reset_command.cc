// SPDX-License-Identifier: Apache-2.0
// reset
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/confirm.h"
#include "client/cli/describe.h"
#include "client/cli/errors.h"
#include "client/cli/format.h"
#include "client/cli/head_history.h"
#include "client/cli/initial_values.h"
#include "client/cli/options.h"

namespace lossd::cli {
namespace {

const std::map<std::string, v1::ResetScope>& ResetScopes() {
  static const auto* const words = new std::map<std::string, v1::ResetScope>{
      {"all", v1::RESET_SCOPE_ALL}, {"optimizer", v1::RESET_SCOPE_OPTIMIZER}};
  return *words;
}

struct ResetFlags {
  std::string head;
  v1::ResetScope scope = v1::RESET_SCOPE_UNSPECIFIED;
  InitialValues values;

  bool all() const { return scope == v1::RESET_SCOPE_ALL; }
  v1::ResetHeadRequest ToRequest() const {
    v1::ResetHeadRequest request;
    request.set_head(head);
    request.set_scope(scope);
    if (all()) values.SetIn(&request);
    return request;
  }
};

absl::Status RunReset(Context* context, const ResetFlags& flags, bool yes, client::Client& client) {
  if (!yes) {
    const absl::StatusOr<v1::HeadDescription> head = client.DescribeHead(flags.head, context->timeout());
    if (!head.ok()) return head.status();
    const std::string what =
        flags.all() ? absl::StrCat(WhatIsLost(*head), ". Reset all of it?")
                    : absl::StrCat("head \"", Printable(flags.head), "\" is at step ",
                                   HumanCount(head->state().step()), ", and its optimizer has made ",
                                   HumanCount(head->updates()), " updates. Reset its optimizer?");
    if (absl::Status agreed = Confirm(yes, what, "not reset"); !agreed.ok()) return agreed;
  }
  const absl::StatusOr<v1::ResetHeadResponse> reset = client.ResetHead(flags.ToRequest(), context->timeout());
  if (!reset.ok()) return reset.status();
  if (context->json) {
    context->PrintJson(ToJson(reset->head()));
  } else {
    context->Print(absl::StrCat("reset ", flags.all() ? "all" : "the optimizer", " of head \"", flags.head,
                                "\", step ", HumanCount(reset->head().state().step()), "\n"));
  }
  return absl::OkStatus();
}

}  // namespace

void AddResetCommand(CLI::App* app, Context* context) {
  CLI::App* reset =
      app->add_subcommand("reset", "Make a head, or its optimizer alone, as it was when it was made");
  auto flags = std::make_shared<ResetFlags>();
  auto yes = std::make_shared<bool>(false);
  AddHead(reset, &flags->head);
  AddWord(reset, "--scope", &flags->scope, ResetScopes(),
          "optimizer: moments and count of updates alone; all: besides, values and step")
      ->required();
  AddYes(reset, yes.get());
  AddInitialValues(reset, &flags->values);
  reset->parse_complete_callback([=] {
    if (flags->scope == v1::RESET_SCOPE_OPTIMIZER && flags->values.given()) {
      throw CLI::ValidationError("--scope", "must be all where initial values are given");
    }
  });
  SetAskingAction(reset, context, yes,
                  [=](client::Client& client) { return RunReset(context, *flags, *yes, client); });
}

}  // namespace lossd::cli
