// SPDX-License-Identifier: Apache-2.0
// The commands heads, describe, create, delete and reset.
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/errors.h"
#include "client/cli/format.h"
#include "client/cli/json.h"
#include "client/cli/options.h"
#include "client/cli/value_checks.h"

namespace lossd::cli {

// ---- heads, describe, create, delete ----

namespace {

absl::Status PrintHead(Context* context, const absl::StatusOr<v1::HeadDescription>& head) {
  if (!head.ok()) return head.status();
  if (context->json) {
    context->PrintJson(ToJson(*head));
  } else {
    context->Print(HeadText(*head, context->style()));
  }
  return absl::OkStatus();
}

absl::Status RunHeads(Context* context, client::Client& client) {
  const absl::StatusOr<std::vector<v1::HeadDescription>> heads = client.ListHeads(context->timeout());
  if (!heads.ok()) return heads.status();
  if (!context->json) {
    context->Print(HeadsTable(*heads, context->style()));
    return absl::OkStatus();
  }
  Json list = Json::array();
  for (const v1::HeadDescription& head : *heads) list.push_back(ToJson(head));
  context->PrintJson(list);
  return absl::OkStatus();
}

absl::Status RunDelete(Context* context, const std::string& head, bool yes, client::Client& client) {
  if (!yes) {
    const absl::StatusOr<v1::HeadDescription> described = client.DescribeHead(head, context->timeout());
    if (!described.ok()) return described.status();
    absl::Status agreed = Confirm(yes, absl::StrCat(WhatIsLost(*described), ". Delete it?"), "not deleted");
    if (!agreed.ok()) return agreed;
  }
  absl::Status status = client.DeleteHead(head, context->timeout());
  if (!status.ok()) return status;
  if (context->json) {
    context->PrintJson({{"deleted", head}});
  } else {
    context->Print(absl::StrCat("deleted head \"", head, "\"\n"));
  }
  return absl::OkStatus();
}

const std::map<std::string, client::IfExists>& IfExistsWords() {
  static const auto* const words =
      new std::map<std::string, client::IfExists>{{"error", client::IfExists::kError},
                                                  {"keep", client::IfExists::kKeep},
                                                  {"reset", client::IfExists::kReset}};
  return *words;
}

struct CreateFlags {
  std::string name;
  uint64_t hidden_size = 0;
  uint64_t vocab_size = 0;
  bool bias = false;
  bool class_weights = false;
  v1::Norm norm = v1::NORM_NONE;
  std::optional<float> norm_epsilon;
  v1::DType compute_dtype = v1::DTYPE_UNSPECIFIED;
  v1::OptimizerState optimizer_state = v1::OPTIMIZER_STATE_ADAM;
  bool frozen = false;
  v1::Logits logits = v1::LOGITS_UNSPECIFIED;
  v1::Gradients gradients = v1::GRADIENTS_UNSPECIFIED;
  uint64_t workspace_bytes = 0;
  v1::Split split = v1::SPLIT_UNSPECIFIED;
  std::vector<uint32_t> shares;
  uint32_t replicas = 0;

  bool dry_run = false;
  client::IfExists if_exists = client::IfExists::kError;
  InitialValues values;

  v1::CreateHeadRequest ToRequest() const {
    v1::CreateHeadRequest request;
    v1::HeadSpec* spec = request.mutable_spec();
    spec->set_name(name);
    spec->set_hidden_size(hidden_size);
    spec->set_vocab_size(vocab_size);
    spec->set_bias(bias);
    spec->set_class_weights(class_weights);
    spec->set_norm(norm);
    if (norm_epsilon.has_value()) spec->set_norm_epsilon(*norm_epsilon);
    spec->set_compute_dtype(compute_dtype);
    spec->set_optimizer_state(optimizer_state);
    spec->set_frozen(frozen);
    spec->set_logits(logits);
    spec->set_gradients(gradients);
    spec->set_workspace_bytes(workspace_bytes);
    spec->set_split(split);
    spec->mutable_shares()->Add(shares.begin(), shares.end());
    spec->set_replicas(replicas);
    values.SetIn(&request);
    return request;
  }
};

void AddCreate(CLI::App* app, Context* context) {
  CLI::App* create = app->add_subcommand("create", "Make a head");
  auto flags = std::make_shared<CreateFlags>();
  create->add_option("NAME", flags->name, "Name of the new head")->required()->type_name("");
  create->add_option("--hidden", flags->hidden_size, "Hidden size D")->required();
  create->add_option("--vocab", flags->vocab_size, "Vocabulary size V")->required();
  create->add_flag("--bias", flags->bias, "Add a bias [V]");
  create->add_flag("--class-weights", flags->class_weights, "Add class weights [V], initially 1");
  AddWord(create, "--norm", &flags->norm, Norms(), "Norm before the classifier [none]");
  create->add_option("--norm-epsilon", flags->norm_epsilon, "[1e-5]");
  AddWord(create, "--compute-dtype", &flags->compute_dtype, DTypes(),
          "Least precision of the matrix products [the backend's choice]");
  AddWord(create, "--optimizer-state", &flags->optimizer_state, OptimizerStates(), "Optimizer memory [adam]");
  create->add_flag("--frozen", flags->frozen, "No gradients of the head, no optimizer memory");
  AddWord(create, "--logits", &flags->logits, LogitsWords(),
          "Whether logits stay in memory until the gradients are computed, or are computed again in little "
          "memory "
          "[stored]");
  AddWord(create, "--gradients", &flags->gradients, GradientsWords(),
          "How gradients are computed unless a request says otherwise [exact]");
  AddBytes(create, "--workspace-bytes", &flags->workspace_bytes,
           "Most workspace on the device [the server's --workspace_bytes; recomputed logits: at most 64MiB]");
  AddWord(
      create, "--split", &flags->split, Splits(),
      "Whether several devices of a server divide the rows or the classes of the head [any: by rows if every "
      "device has room for all classes]");
  create
      ->add_option("--shares", flags->shares,
                   "By vocabulary: how much of the classes each device has, relative to the others, e.g. "
                   "13,6,13,13; 0: none [all the same]")
      ->delimiter(',')
      ->type_name("SHARE,...");
  create->add_option("--replicas", flags->replicas,
                     "By vocabulary: copies of the head, each on as many of the devices, which divide its "
                     "classes; the copies divide the rows [1]");

  CLI::Option* dry_run = create->add_flag(
      "--dry-run", flags->dry_run, "Make nothing: print what the server would make, or why it would refuse");
  AddWord(create, "--if-exists", &flags->if_exists, IfExistsWords(),
          "If there is a head of this name with what was asked for: fail, keep it as it is, or reset all of "
          "it [error]")
      ->excludes(dry_run);
  AddInitialValues(create, &flags->values);
  SetClientAction(create, context, [=](client::Client& client) {
    return PrintHead(context, flags->dry_run ? client.PlanHead(flags->ToRequest(), context->timeout())
                                             : client.CreateHead(flags->ToRequest(), context->timeout(),
                                                                 flags->if_exists));
  });
}

}  // namespace

void AddHeadCommands(CLI::App* app, Context* context) {
  CLI::App* heads = app->add_subcommand("heads", "List the heads");
  SetClientAction(heads, context, [=](client::Client& client) { return RunHeads(context, client); });

  auto name = std::make_shared<std::string>();
  CLI::App* describe = app->add_subcommand("describe", "Describe a head");
  AddHead(describe, name.get());
  SetClientAction(describe, context, [=](client::Client& client) {
    return PrintHead(context, client.DescribeHead(*name, context->timeout()));
  });

  AddCreate(app, context);

  CLI::App* remove = app->add_subcommand("delete", "Delete a head and everything it holds");
  auto yes = std::make_shared<bool>(false);
  AddHead(remove, name.get());
  AddYes(remove, yes.get());
  SetAskingAction(remove, context, yes,
                  [=](client::Client& client) { return RunDelete(context, *name, *yes, client); });
}

// ---- reset ----

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
