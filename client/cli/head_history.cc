// SPDX-License-Identifier: Apache-2.0
#include "client/cli/head_history.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/cli/format.h"

namespace lossd::cli {
namespace {

std::string Steps(uint64_t count) { return absl::StrCat(HumanCount(count), count == 1 ? " step" : " steps"); }

std::string CheckpointText(const v1::HeadHistory& history) {
  std::string text =
      absl::StrCat(history.loaded() ? "loaded from " : "saved as ", Printable(history.checkpoint()),
                   " (step ", HumanCount(history.checkpoint_step()), ")");
  if (history.checkpoint_unix_seconds() == 0) return text;
  return absl::StrCat(text, history.loaded() ? ", of " : " ", UtcText(history.checkpoint_unix_seconds()));
}

}  // namespace

std::string UtcText(int64_t unix_seconds) {
  if (unix_seconds == 0) return "";
  return absl::FormatTime("%Y-%m-%d %H:%M:%SZ", absl::FromUnixSeconds(unix_seconds), absl::UTCTimeZone());
}

std::string HistoryText(const v1::HeadHistory& history) {
  std::vector<std::string> parts;
  std::string last;
  if (!history.run().empty()) last = absl::StrCat("run ", Printable(history.run()));
  if (history.applied_unix_seconds() != 0) {
    absl::StrAppend(&last, last.empty() ? "" : ", ", "last step ", UtcText(history.applied_unix_seconds()));
  }
  if (!last.empty()) parts.push_back(std::move(last));
  if (!history.checkpoint().empty()) parts.push_back(CheckpointText(history));
  if (!history.open_run().empty() && history.open_run() != history.run()) {
    parts.push_back(absl::StrCat("rows of the open step from run ", Printable(history.open_run())));
  }
  return absl::StrJoin(parts, "; ");
}

nlohmann::ordered_json HistoryJson(const v1::HeadHistory& history) {
  return {{"run", history.run()},
          {"applied_unix_seconds", history.applied_unix_seconds()},
          {"checkpoint", history.checkpoint()},
          {"checkpoint_step", history.checkpoint_step()},
          {"checkpoint_unix_seconds", history.checkpoint_unix_seconds()},
          {"loaded", history.loaded()},
          {"open_run", history.open_run()}};
}

std::optional<uint64_t> StepsSinceSave(const v1::HeadDescription& head) {
  if (head.history().checkpoint().empty()) return std::nullopt;
  if (head.history().checkpoint_step() > head.state().step()) return std::nullopt;
  return head.state().step() - head.history().checkpoint_step();
}

std::string WhatIsLost(const v1::HeadDescription& head) {
  const std::optional<uint64_t> since = StepsSinceSave(head);
  std::string text = absl::StrCat("head \"", Printable(head.spec().name()), "\" is at step ",
                                  HumanCount(head.state().step()), ": ");
  if (since.has_value()) {
    absl::StrAppend(&text, Steps(*since), " since checkpoint ", Printable(head.history().checkpoint()));
  } else {
    text += "no checkpoint known";
  }
  if (head.step_rows() == 0) return text;
  return absl::StrCat(text, ", and ", HumanCount(head.step_rows()), " rows in the open step");
}

}  // namespace lossd::cli
