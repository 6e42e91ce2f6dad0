// SPDX-License-Identifier: Apache-2.0
// The page of one head, a part of StatusPage.
#include <algorithm>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "server/metrics/html.h"
#include "server/metrics/status_page.h"

namespace lossd::metrics {
namespace {

std::string LossText(const HeadMetrics::Step& step) {
  return step.loss.has_value() ? FormatNumber(*step.loss) : "-";
}

// Of sampled gradients the predicted relative error; of filtered ones the probability that was left out.
std::string ErrorText(const HeadMetrics::Step& step) {
  const auto percent = [](double share) { return absl::StrCat(FormatNumber(share * 100), " %"); };
  if (step.gradient_error.has_value()) return percent(*step.gradient_error);
  return step.dropped_probability.has_value() ? absl::StrCat(percent(*step.dropped_probability), " dropped")
                                              : std::string("-");
}

// Of the last gradients: predicted if they were sampled, what was left out if they were filtered.
std::string GradientError(const engine::HeadSnapshot& head, const std::vector<HeadMetrics::Step>& steps) {
  if (head.gradient_error > 0) return absl::StrCat(FormatNumber(head.gradient_error * 100), " %");
  const std::string of_step = steps.empty() ? "-" : ErrorText(steps.front());
  if (of_step != "-") return of_step;
  return head.config.gradients == kernels::Gradients::kExact ? "exact" : "-";
}

std::string StepsTable(const std::vector<HeadMetrics::Step>& steps) {
  if (steps.empty()) return "<p>None since the server started.</p>\n";
  const absl::Time now = clocks::WallNow();
  std::string rows;
  for (const HeadMetrics::Step& step : steps) {
    rows += TableRow(
        {Grouped(static_cast<int64_t>(step.number)), FormatTime(clocks::OnTheWall(step.closed), now),
         LossText(step), FormatNumber(step.grad_norm), ErrorText(step), FormatNumber(step.learning_rate),
         Grouped(step.rows), step.seconds.has_value() ? FormatSeconds(*step.seconds) : std::string("-"),
         step.skipped ? "<span class=\"state warning\">skipped</span>" : "applied"});
  }
  return Table({"Step", "Time (UTC)", "Loss", "Gradient norm", "Error", "Learning rate", "Rows",
                "Since the last", "Result"},
               rows);
}

std::string SavesTable(const std::vector<SaveMetrics::Save>& saves) {
  if (saves.empty()) return "<p>None saved since the server started.</p>\n";
  const absl::Time now = clocks::WallNow();
  std::string rows;
  for (const SaveMetrics::Save& save : saves) {
    rows += TableRow({EscapeHtml(save.checkpoint), Grouped(static_cast<int64_t>(save.step)),
                      FormatTime(save.time, now), FormatBytes(static_cast<double>(save.bytes)),
                      FormatSeconds(save.seconds)});
  }
  return Table({"Checkpoint", "Step", "Time (UTC)", "Size", "Took"}, rows);
}

std::string CheckpointRow(const head::CheckpointInfo& info, absl::Time now) {
  if (!info.status.ok()) {
    return TableRow({EscapeHtml(info.name), "-", "-", "-", "-", "-",
                     absl::StrCat("<span class=\"state error\">damaged</span> <span class=\"text\">",
                                  EscapeHtml(info.status.message()), "</span>")});
  }
  const bool is_dated = info.saved_at > absl::UnixEpoch();
  return TableRow(
      {EscapeHtml(info.name), Grouped(static_cast<int64_t>(info.subject.step)),
       FormatBytes(static_cast<double>(info.bytes)),
       is_dated ? FormatTime(info.saved_at, now) : std::string("-"),
       is_dated ? FormatUptime(std::max(now - info.saved_at, absl::ZeroDuration())) : std::string("-"),
       info.subject.run.empty() ? std::string("-") : EscapeHtml(info.subject.run),
       info.automatic ? "the server" : "a client"});
}

std::string CheckpointsTable(const std::optional<absl::StatusOr<head::NewestCheckpoints>>& newest) {
  if (!newest.has_value()) return "<p>The directory is being read.</p>\n";
  if (!newest->ok()) {
    return absl::StrCat("<p>The directory cannot be read: ", EscapeHtml(newest->status().message()),
                        "</p>\n");
  }
  const head::NewestCheckpoints& list = **newest;
  if (list.checkpoints.empty()) return "<p>There are none.</p>\n";
  const absl::Time now = clocks::WallNow();
  std::string rows;
  for (const head::CheckpointInfo& info : list.checkpoints) rows += CheckpointRow(info, now);
  std::string more;
  if (list.left_out > 0 || list.and_more) {
    more = absl::StrCat("<p>And ", list.and_more ? "more than " : "",
                        Grouped(static_cast<int64_t>(list.left_out)), " older.</p>\n");
  }
  return absl::StrCat(Table({"Checkpoint", "Step", "Size", "Saved (UTC)", "Age", "Run", "Named by"}, rows),
                      more);
}

std::string ChoicesTable(const engine::HeadSnapshot& head) {
  std::string rows;
  const auto add = [&](absl::string_view of, const std::vector<kernels::Choice>& choices) {
    for (const kernels::Choice& choice : choices) {
      rows += TableRow(
          {EscapeHtml(choice.what), std::string(of),
           absl::StrCat("<span class=\"text\">", EscapeHtml(choice.choice), "</span>"),
           absl::StrCat("<span class=\"text\">", EscapeHtml(choice.reason), "</span>"),
           choice.workspace_bytes > 0 ? FormatBytes(static_cast<double>(choice.workspace_bytes)) : ""});
    }
  };
  add("head", head.choices);
  add("last chunk", head.last_chunk_choices);
  if (rows.empty()) return "<p>None: the backend has one way to compute this head.</p>\n";
  return Table({"What", "Of", "Choice", "Because", "Workspace"}, rows);
}

std::string PlannedTable(const kernels::MemoryBytes& memory) {
  const auto total = static_cast<double>(memory.Total());
  std::string rows;
  for (size_t i = 0; i < kernels::kMemoryKinds; ++i) {
    const auto held = static_cast<double>(memory.by_kind[i]);
    if (held == 0) continue;
    rows += TableRow({std::string(kernels::Name(static_cast<kernels::MemoryKind>(i))), Bar(held, total),
                      FormatBytes(held)});
  }
  rows += TableRow({"total", Bar(total, total), FormatBytes(total)});
  return Table({"Purpose", "", "Planned"}, rows);
}

}  // namespace

std::optional<std::string> StatusPage::RenderHead(absl::string_view name) const {
  const absl::StatusOr<engine::HeadSnapshot> head = engine_->Describe(name);
  if (!head.ok()) return std::nullopt;
  const std::vector<HeadMetrics::Step> steps = metrics_->heads().Steps(name);
  const std::string loss = steps.empty() ? "-" : LossText(steps.front());
  const std::string events = EventRows(metrics_->events(), name, kEventsShown);
  const auto fact = [](absl::string_view what, int64_t value) { return Fact(what, Grouped(value)); };
  return Document(
      absl::StrCat("lossd: ", name), name,
      absl::StrCat(
          "<header id=\"summary\"><p><a href=\"/\">lossd</a></p><h1>", EscapeHtml(name),
          head->tensors_status.ok() ? "" : " <span class=\"state error\">not usable</span>", "</h1>\n<p>",
          Grouped(head->config.vocab_size), " classes of ", Grouped(head->config.hidden_size),
          " values &middot; ", EscapeHtml(kernels::Name(head->compute_dtype)), " &middot; ",
          head->config.trainable ? "trained" : "frozen", " &middot; optimizer state ",
          EscapeHtml(kernels::Name(head->config.optimizer_state)), " &middot; gradients ",
          EscapeHtml(kernels::Name(head->config.gradients)), " &middot; logits ",
          EscapeHtml(kernels::Name(head->config.logits)), "</p>\n<div class=\"facts\">\n",
          fact("step", static_cast<int64_t>(head->state.step)), Fact("loss", loss),
          fact("rows in step", head->step_rows), fact("rows", head->total_rows),
          fact("open streams", head->open_streams), fact("queued slices", head->queued_slices),
          fact("rows a chunk", head->chunk_rows),
          Fact("gradient norm", steps.empty() ? "-" : FormatNumber(steps.front().grad_norm)),
          Fact("gradient error", GradientError(*head, steps)),
          Fact("memory", FormatBytes(static_cast<double>(head->memory.Total()))), "</div>\n",
          head->waits_for.empty() ? ""
                                  : absl::StrCat("<p>Waits for ", EscapeHtml(head->waits_for), ".</p>\n"),
          head->tensors_status.ok()
              ? ""
              : absl::StrCat("<p>", EscapeHtml(head->tensors_status.message()), "</p>\n"),
          "</header>\n<section id=\"charts\">\n", Chart("head-rows", "Rows per second"),
          Chart("head-loss", "Loss of the last step"), Chart("head-norm", "Gradient norm"),
          Chart("head-rate", "Learning rate"), "</section>\n<section id=\"steps\"><h2>Last steps</h2>\n",
          StepsTable(steps), "</section>\n<section id=\"checkpoints\"><h2>Checkpoints</h2>\n",
          options_.checkpoints == nullptr ? std::string() : CheckpointsTable(options_.checkpoints->Of(name)),
          "</section>\n<section id=\"saves\"><h2>Last saves</h2>\n",
          SavesTable(metrics_->saves().Saves(name)), "</section>\n<section id=\"choices\"><h2>Choices</h2>\n",
          ChoicesTable(*head), "</section>\n<section id=\"memory\"><h2>Memory</h2>\n",
          PlannedTable(head->memory), "</section>\n<section id=\"events\"><h2>Events</h2>\n",
          events.empty() ? "<p>None since the server started.</p>\n"
                         : Table({"Time (UTC)", "Level", "What", "Head", "Count"}, events),
          "</section>\n"));
}

std::string StatusPage::RenderNoHead(absl::string_view name) const {
  return Document(
      "lossd: no such head", "",
      absl::StrCat("<header id=\"summary\"><p><a href=\"/\">lossd</a></p><h1>No head ", EscapeHtml(name),
                   "</h1>\n<p>There is no head of this name, or no longer.</p></header>\n"));
}

}  // namespace lossd::metrics
