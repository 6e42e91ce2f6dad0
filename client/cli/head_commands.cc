// SPDX-License-Identifier: Apache-2.0
// The commands heads, describe, create, delete, reset and shares.
#include "client/cli/head_commands.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cli/context.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/options.h"
#include "client/cli/tensors.h"
#include "kernels/errors/status_macros.h"

namespace lossd::cli {

// ---- shares: the balance ----

namespace {

constexpr double kWhole = 1000.0;  // the sum of the shares, but for rounding

double ClassesOf(absl::Span<const DeviceLoad> devices) {
  double classes = 0;
  for (const DeviceLoad& device : devices) classes += static_cast<double>(device.classes);
  return classes;
}

// The seconds that one class takes on the device. For a device without classes it is the mean over all
// devices.
double CostOf(const DeviceLoad& device, absl::Span<const DeviceLoad> all) {
  if (device.classes > 0 && device.head_seconds > 0) {
    return device.head_seconds / static_cast<double>(device.classes);
  }
  double seconds = 0;
  for (const DeviceLoad& each : all) seconds += each.head_seconds;
  return seconds / ClassesOf(all);
}

}  // namespace

std::vector<uint32_t> BalancedShares(absl::Span<const DeviceLoad> devices) {
  std::vector<size_t> order(devices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return devices[a].stage_seconds < devices[b].stage_seconds; });
  const double classes = ClassesOf(devices);
  // Only what exceeds the least stage_seconds is computed with. Otherwise the short time of a small head
  // would be lost in rounding.
  const double least = devices[order.front()].stage_seconds;
  const auto above = [&](const DeviceLoad& device) { return device.stage_seconds - least; };
  // Devices take part in ascending order of stage_seconds. The loop ends when the devices that take part
  // finish no later than the other work of the next device.
  double level = 0, rates = 0, done = 0;
  for (size_t n = 0; n < order.size(); ++n) {
    const DeviceLoad& device = devices[order[n]];
    const double rate = 1.0 / CostOf(device, devices);
    rates += rate;
    done += above(device) * rate;
    level = (classes + done) / rates;
    if (n + 1 == order.size() || level <= above(devices[order[n + 1]])) break;
  }
  std::vector<uint32_t> shares;
  for (const DeviceLoad& device : devices) {
    const double part = std::max(0.0, level - above(device)) / CostOf(device, devices) / classes;
    shares.push_back(static_cast<uint32_t>(std::lround(kWhole * part)));
  }
  return shares;
}

double SecondsWith(const DeviceLoad& device, absl::Span<const DeviceLoad> all, uint32_t share,
                   uint32_t whole) {
  return device.stage_seconds + ClassesOf(all) * share / whole * CostOf(device, all);
}

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
  LOSSD_TRY(const std::vector<v1::HeadDescription> heads, client.ListHeads(context->timeout()));
  if (!context->json) {
    context->Print(HeadsTable(heads, context->style()));
    return absl::OkStatus();
  }
  Json list = Json::array();
  for (const v1::HeadDescription& head : heads) list.push_back(ToJson(head));
  context->PrintJson({{"heads", list}});
  return absl::OkStatus();
}

absl::Status RunDelete(Context* context, const std::string& head, bool yes, client::Client& client) {
  if (!yes) {
    LOSSD_TRY(const v1::HeadDescription described, client.DescribeHead(head, context->timeout()));
    LOSSD_RETURN_IF_ERROR(Confirm(yes, absl::StrCat(WhatIsLost(described), ". Delete it?"), "not deleted"));
  }
  LOSSD_RETURN_IF_ERROR(client.DeleteHead(head, context->timeout()));
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
  v1::Residency residency = v1::RESIDENCY_UNSPECIFIED;
  std::string class_list;  // the path of a file; empty: none
  uint64_t full_vocab_size = 0;

  bool dry_run = false;
  client::IfExists if_exists = client::IfExists::kError;
  InitialValues values;

  absl::StatusOr<v1::CreateHeadRequest> ToRequest() const {
    v1::CreateHeadRequest request;
    v1::HeadSpec* spec = request.mutable_spec();
    if (!class_list.empty()) {
      LOSSD_TRY(const TensorData file, LoadTensor(class_list));
      LOSSD_TRY(const std::vector<int32_t> classes, ToInt32(file));
      spec->mutable_class_list()->Add(classes.begin(), classes.end());
    }
    spec->set_full_vocab_size(full_vocab_size);
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
    spec->set_residency(residency);
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
  CLI::Option* classes = create
                             ->add_option("--class-list", flags->class_list,
                                          "The head's classes, V numbers of a larger vocabulary, ascending")
                             ->type_name("FILE.npy|FILE.safetensors[:TENSOR]");
  create->add_option("--full-vocab", flags->full_vocab_size, "Of --class-list: size of the larger vocabulary")
      ->needs(classes);
  create->add_flag("--bias", flags->bias, "Add a bias [V]");
  create->add_flag("--class-weights", flags->class_weights, "Add class weights [V], initially 1");
  AddWord(create, "--norm", &flags->norm, Words<v1::Norm>(), "Norm before the classifier [none]");
  create->add_option("--norm-epsilon", flags->norm_epsilon, "[1e-5]");
  AddWord(create, "--compute-dtype", &flags->compute_dtype, Words<v1::DType>(),
          "Least precision of the matrix products [the backend's choice]");
  AddWord(create, "--optimizer-state", &flags->optimizer_state, Words<v1::OptimizerState>(),
          "Optimizer memory [adam]");
  create->add_flag("--frozen", flags->frozen, "No gradients of the head, no optimizer memory");
  AddWord(create, "--logits", &flags->logits, Words<v1::Logits>(),
          "Whether logits stay in memory until the gradients are computed, are computed again in little "
          "memory, or there are none: an embedding alone [stored]");
  AddWord(create, "--gradients", &flags->gradients, Words<v1::Gradients>(),
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
  AddWord(create, "--residency", &flags->residency, Words<v1::Residency>(),
          "Frozen heads: where the values live: on the device, or in host memory, from where they are copied "
          "when rows need them [device]");

  CLI::Option* dry_run = create->add_flag(
      "--dry-run", flags->dry_run, "Make nothing: print what the server would make, or why it would refuse");
  AddWord(create, "--if-exists", &flags->if_exists, IfExistsWords(),
          "If there is a head of this name with what was asked for: fail, keep it as it is, or reset all of "
          "it [error]")
      ->excludes(dry_run);
  AddInitialValues(create, &flags->values);
  SetClientAction(create, context, [=](client::Client& client) {
    LOSSD_TRY(const v1::CreateHeadRequest request, flags->ToRequest());
    return PrintHead(context, flags->dry_run
                                  ? client.PlanHead(request, context->timeout())
                                  : client.CreateHead(request, context->timeout(), flags->if_exists));
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
    LOSSD_TRY(const v1::HeadDescription head, client.DescribeHead(flags.head, context->timeout()));
    const std::string what =
        flags.all() ? absl::StrCat(WhatIsLost(head), ". Reset all of it?")
                    : absl::StrCat("head \"", Printable(flags.head), "\" is at step ",
                                   HumanCount(head.state().step()), ", and its optimizer has made ",
                                   HumanCount(head.updates()), " updates. Reset its optimizer?");
    LOSSD_RETURN_IF_ERROR(Confirm(yes, what, "not reset"));
  }
  LOSSD_TRY(const v1::ResetHeadResponse reset, client.ResetHead(flags.ToRequest(), context->timeout()));
  if (context->json) {
    context->PrintJson(ToJson(reset.head()));
  } else {
    context->Print(absl::StrCat("reset ", flags.all() ? "all" : "the optimizer", " of head \"", flags.head,
                                "\", step ", HumanCount(reset.head().state().step()), "\n"));
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
  AddWord(reset, "--scope", &flags->scope, Words<v1::ResetScope>(),
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

// ---- shares: the command ----

namespace {

struct SharesFlags {
  std::string head;
  std::string shares;  // "": none given
  bool balance = false, apply = false;
  double interval = 10;
  uint64_t rows = 0;
  std::vector<double> stage_seconds;
};

absl::StatusOr<std::vector<uint32_t>> ParseShares(const std::string& text) {
  std::vector<uint32_t> shares;
  if (text == "even") return shares;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    uint32_t share = 0;
    if (!absl::SimpleAtoi(part, &share)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shares must be whole numbers with commas between them, or even, got ", text));
    }
    shares.push_back(share);
  }
  return shares;
}

std::string SharesText(absl::Span<const uint32_t> shares) {
  return shares.empty() ? "even" : absl::StrJoin(shares, ",");
}

absl::Status SetTo(Context* context, const SharesFlags& flags, const std::vector<uint32_t>& shares,
                   client::Client& client) {
  v1::SetSharesRequest request;
  request.set_head(flags.head);
  request.mutable_shares()->Add(shares.begin(), shares.end());
  LOSSD_TRY(const v1::SetSharesResponse done, client.SetShares(request, context->timeout()));
  if (context->json) {
    context->PrintJson(ToJson(done.head()));
  } else {
    context->Print(absl::StrCat("shares of head \"", Printable(flags.head), "\" at step ",
                                HumanCount(done.head().state().step()), ": ", SharesText(shares), "\n"));
  }
  return absl::OkStatus();
}

// ---- shares: what is measured ----

absl::Status NotDivided(const SharesFlags& flags) {
  return absl::FailedPreconditionError(
      absl::StrCat("head ", flags.head, " is not split by vocabulary over several devices"));
}

// What each device did between two descriptions of the head, in seconds for flags.rows rows. If flags.rows is
// 0: for all rows that the device computed between them.
absl::StatusOr<std::vector<DeviceLoad>> LoadsBetween(const v1::HeadDescription& before,
                                                     const v1::HeadDescription& after,
                                                     const SharesFlags& flags) {
  const int count = after.devices_size();
  if (count == 0 || before.devices_size() != count) return NotDivided(flags);
  if (!flags.stage_seconds.empty() && flags.stage_seconds.size() != static_cast<size_t>(count)) {
    return absl::InvalidArgumentError(absl::StrCat("--stage-seconds must have one entry for each of ", count,
                                                   " devices, got ", flags.stage_seconds.size()));
  }
  std::vector<DeviceLoad> loads;
  bool exchanged = false, computed = false;
  for (int i = 0; i < count; ++i) {
    const v1::HeadDevice &from = before.devices(i), &to = after.devices(i);
    if (to.rows() <= from.rows()) {
      return absl::FailedPreconditionError(
          absl::StrCat("no rows were computed within ", flags.interval, " s: measure while a training runs"));
    }
    if (from.classes() != to.classes()) {
      return absl::AbortedError("the shares were changed meanwhile");
    }
    const double exchanging = to.exchange_seconds() - from.exchange_seconds();
    exchanged = exchanged || exchanging > 0;
    const double busy = to.busy_seconds() - from.busy_seconds();
    const double scale = flags.rows == 0
                             ? 1.0
                             : static_cast<double>(flags.rows) / static_cast<double>(to.rows() - from.rows());
    loads.push_back(
        {.classes = static_cast<int64_t>(to.classes()),
         .head_seconds = to.classes() == 0 ? 0.0 : std::max(0.0, busy - exchanging) * scale,
         .stage_seconds = flags.stage_seconds.empty() ? 0.0 : flags.stage_seconds[static_cast<size_t>(i)]});
    computed = computed || loads.back().head_seconds > 0;
  }
  if (!exchanged) {
    return absl::FailedPreconditionError(
        "the server does not say how long its devices wait for each other (lossd_rank_exchange_seconds_total "
        "may)");
  }
  if (!computed) {
    return absl::FailedPreconditionError(absl::StrCat("the devices were not busy with the head within ",
                                                      flags.interval, " s; give a longer --interval"));
  }
  return loads;
}

absl::Status RunBalance(Context* context, const SharesFlags& flags, client::Client& client) {
  LOSSD_TRY(const v1::HeadDescription before, client.DescribeHead(flags.head, context->timeout()));
  if (before.devices().empty()) return NotDivided(flags);
  absl::SleepFor(absl::Seconds(flags.interval));
  LOSSD_TRY(const v1::HeadDescription after, client.DescribeHead(flags.head, context->timeout()));
  LOSSD_TRY(const std::vector<DeviceLoad> loads, LoadsBetween(before, after, flags));
  const std::vector<uint32_t> shares = BalancedShares(loads);
  const uint32_t whole = std::accumulate(shares.begin(), shares.end(), 0u);
  if (context->json && !flags.apply) {
    Json json;
    json["shares"] = shares;
    for (size_t i = 0; i < shares.size(); ++i) {
      json["devices"].push_back({{"classes", loads[i].classes},
                                 {"head_seconds", loads[i].head_seconds},
                                 {"stage_seconds", loads[i].stage_seconds},
                                 {"seconds_then", SecondsWith(loads[i], loads, shares[i], whole)}});
    }
    context->PrintJson(json);
    return absl::OkStatus();
  }
  if (!context->json) {
    Table table({{"DEVICE"},
                 {"CLASSES", Align::kRight},
                 {"HEAD", Align::kRight},
                 {"STAGE", Align::kRight},
                 {"SHARE THEN", Align::kRight},
                 {"SECONDS THEN", Align::kRight}});
    for (size_t i = 0; i < shares.size(); ++i) {
      const DeviceLoad& load = loads[i];
      table.AddRow({Printable(after.devices(static_cast<int>(i)).device()),
                    HumanCount(static_cast<uint64_t>(load.classes)),
                    absl::StrFormat("%.4g s", load.head_seconds),
                    absl::StrFormat("%.4g s", load.stage_seconds), absl::StrCat(shares[i]),
                    absl::StrFormat("%.4g s", SecondsWith(load, loads, shares[i], whole))});
    }
    context->Print(table.ToString(context->style()));
  }
  if (flags.apply) return SetTo(context, flags, shares, client);
  context->Print(absl::StrCat("\nlossctl shares ", flags.head, " ", SharesText(shares), "\n"));
  return absl::OkStatus();
}

absl::Status RunShares(Context* context, const SharesFlags& flags, client::Client& client) {
  if (flags.balance) return RunBalance(context, flags, client);
  if (!flags.shares.empty()) {
    const absl::StatusOr<std::vector<uint32_t>> shares = ParseShares(flags.shares);
    return shares.ok() ? SetTo(context, flags, *shares, client) : shares.status();
  }
  LOSSD_TRY(const v1::HeadDescription head, client.DescribeHead(flags.head, context->timeout()));
  if (head.devices().empty()) return NotDivided(flags);
  if (context->json) {
    context->PrintJson({{"devices", ToJson(head)["devices"]}});
  } else {
    context->Print(DevicesTable(head, context->style()));
  }
  return absl::OkStatus();
}

}  // namespace

void AddSharesCommand(CLI::App* app, Context* context) {
  CLI::App* command = app->add_subcommand(
      "shares", "Show, change or balance how the devices of a server divide the classes of a head");
  auto flags = std::make_shared<SharesFlags>();
  AddHead(command, &flags->head);
  auto* const shares = command->add_option(
      "SHARES", flags->shares,
      "Of each device, relative to the others, e.g. 13,6,13,13; or even. Between two steps");
  auto* const balance =
      command
          ->add_flag(
              "--balance", flags->balance,
              "Measure what the devices take for their classes, and say which shares let them end together")
          ->excludes(shares);
  command->add_flag("--apply", flags->apply, "Set these shares")->needs(balance);
  command->add_option("--interval", flags->interval, "Seconds to measure; the training goes on meanwhile")
      ->needs(balance)
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  auto* const rows =
      command->add_option("--rows", flags->rows, "Of a microbatch, which --stage-seconds are of")
          ->needs(balance)
          ->check(CLI::PositiveNumber);
  command
      ->add_option("--stage-seconds", flags->stage_seconds,
                   "What each device does beside the head for a microbatch, e.g. its stage of the pipeline, "
                   "forward and "
                   "backward; with commas between them")
      ->delimiter(',')
      ->needs(rows)
      ->check(CLI::NonNegativeNumber);
  SetClientAction(command, context,
                  [=](client::Client& client) { return RunShares(context, *flags, client); });
}

}  // namespace lossd::cli
