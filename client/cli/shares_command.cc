// SPDX-License-Identifier: Apache-2.0
// The command shares.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/json.h"
#include "client/cli/options.h"
#include "client/cli/share_balance.h"

namespace lossd::cli {
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
  const absl::StatusOr<v1::SetSharesResponse> done = client.SetShares(request, context->timeout());
  if (!done.ok()) return done.status();
  if (context->json) {
    context->PrintJson(ToJson(done->head()));
  } else {
    context->Print(absl::StrCat("shares of head \"", Printable(flags.head), "\" at step ",
                                HumanCount(done->head().state().step()), ": ", SharesText(shares), "\n"));
  }
  return absl::OkStatus();
}

// ---- The balance ----

absl::Status NotDivided(const SharesFlags& flags) {
  return absl::FailedPreconditionError(
      absl::StrCat("head ", flags.head, " is not split by vocabulary over several devices"));
}

// What each device did between two looks, for so many rows; 0: for all that it computed.
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
  bool exchanged = false;
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
  }
  if (!exchanged) {
    return absl::FailedPreconditionError(
        "the server does not say how long its devices wait for each other (lossd_rank_exchange_seconds_total "
        "may)");
  }
  return loads;
}

absl::Status RunBalance(Context* context, const SharesFlags& flags, client::Client& client) {
  const absl::StatusOr<v1::HeadDescription> before = client.DescribeHead(flags.head, context->timeout());
  if (!before.ok()) return before.status();
  if (before->devices().empty()) return NotDivided(flags);
  absl::SleepFor(absl::Seconds(flags.interval));
  const absl::StatusOr<v1::HeadDescription> after = client.DescribeHead(flags.head, context->timeout());
  if (!after.ok()) return after.status();
  const absl::StatusOr<std::vector<DeviceLoad>> loads = LoadsBetween(*before, *after, flags);
  if (!loads.ok()) return loads.status();
  const std::vector<uint32_t> shares = BalancedShares(*loads);
  const uint32_t whole = std::accumulate(shares.begin(), shares.end(), 0u);
  if (context->json && !flags.apply) {
    Json json;
    json["shares"] = shares;
    for (size_t i = 0; i < shares.size(); ++i) {
      json["devices"].push_back({{"classes", (*loads)[i].classes},
                                 {"head_seconds", (*loads)[i].head_seconds},
                                 {"stage_seconds", (*loads)[i].stage_seconds},
                                 {"seconds_then", SecondsWith((*loads)[i], *loads, shares[i], whole)}});
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
      const DeviceLoad& load = (*loads)[i];
      table.AddRow({Printable(after->devices(static_cast<int>(i)).device()),
                    HumanCount(static_cast<uint64_t>(load.classes)),
                    absl::StrFormat("%.4g s", load.head_seconds),
                    absl::StrFormat("%.4g s", load.stage_seconds), absl::StrCat(shares[i]),
                    absl::StrFormat("%.4g s", SecondsWith(load, *loads, shares[i], whole))});
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
  const absl::StatusOr<v1::HeadDescription> head = client.DescribeHead(flags.head, context->timeout());
  if (!head.ok()) return head.status();
  if (head->devices().empty()) return NotDivided(flags);
  if (context->json) {
    context->PrintJson(ToJson(*head)["devices"]);
  } else {
    context->Print(DevicesTable(*head, context->style()));
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
