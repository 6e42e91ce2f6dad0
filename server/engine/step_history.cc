// SPDX-License-Identifier: Apache-2.0
#include "server/engine/step_history.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace lossd::engine {
namespace {

// "3 seconds ago".
std::string Ago(absl::Time then, absl::Time now) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(now - then));
  const auto text = [](int64_t count, absl::string_view unit) {
    return absl::StrCat(count, " ", unit, count == 1 ? "" : "s", " ago");
  };
  if (seconds < 120) return text(seconds, "second");
  if (seconds < 120 * 60) return text(seconds / 60, "minute");
  if (seconds < 48 * 3600) return text(seconds / 3600, "hour");
  return text(seconds / (24 * 3600), "day");
}

// With a space before it; "" if the time is not known.
std::string AgoIfKnown(int64_t unix_seconds, absl::Time now) {
  return unix_seconds == 0 ? "" : absl::StrCat(" ", Ago(absl::FromUnixSeconds(unix_seconds), now));
}

}  // namespace

void StepHistory::OnApplied(absl::string_view run, absl::Time now) {
  history_.run = std::string(run);
  history_.applied_unix_seconds = absl::ToUnixSeconds(now);
  applied_here_ = true;
  open_run_.reset();
}

void StepHistory::OnLoaded(uint64_t origin, const head::History& loaded) { Replace(origin, loaded); }

void StepHistory::OnReset(uint64_t origin, absl::Time now) {
  Replace(origin, {});
  reset_at_ = now;
}

void StepHistory::Replace(uint64_t origin, head::History history) {
  origin_ = origin;
  history_ = std::move(history);
  applied_here_ = false;
  reset_at_.reset();
  open_run_.reset();
}

void StepHistory::OnSaved(uint64_t origin, absl::string_view checkpoint, uint64_t step, absl::Time saved_at) {
  if (origin != origin_) return;
  history_.checkpoint = std::string(checkpoint);
  history_.checkpoint_step = step;
  history_.checkpoint_unix_seconds = absl::ToUnixSeconds(saved_at);
  history_.loaded = false;
}

std::string StepHistory::WhyNotOpen(const NamedStep& named, uint64_t open, absl::Time now) const {
  std::vector<std::string> parts;
  const std::string& run = history_.run;
  if (applied_here_) {
    const std::string when =
        absl::StrCat("applied step ", open - 1, AgoIfKnown(history_.applied_unix_seconds, now));
    if (run.empty()) {
      parts.push_back(absl::StrCat("a program that names no run ", when));
    } else if (run == named.run) {
      parts.push_back(absl::StrCat("this run, ", run, ", ", when));
    } else {
      parts.push_back(absl::StrCat("another program trains this head: run ", run, " ", when));
    }
  }
  if (!open_run().empty() && open_run() != named.run) {
    parts.push_back(absl::StrCat(parts.empty() ? "another program trains this head: " : "", "run ",
                                 open_run(), " has rows in the open step"));
  }
  const bool behind = named.step > open || !applied_here_;
  if (behind && history_.loaded) {
    const std::string saved = AgoIfKnown(history_.checkpoint_unix_seconds, now);
    parts.push_back(absl::StrCat("this head came back from a checkpoint: the server loaded ",
                                 history_.checkpoint, " of step ", history_.checkpoint_step,
                                 saved.empty() ? "" : ", saved", saved,
                                 run.empty() || applied_here_ ? "" : absl::StrCat(", trained by run ", run)));
  }
  if (behind && reset_at_.has_value()) {
    parts.push_back(absl::StrCat("the head was reset ", Ago(*reset_at_, now)));
  }
  if (parts.empty()) parts.emplace_back("no step was applied to this head since it was created");
  return absl::StrJoin(parts, "; ");
}

}  // namespace lossd::engine
