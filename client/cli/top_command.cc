// SPDX-License-Identifier: Apache-2.0
// top
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/live.h"
#include "client/cli/options.h"
#include "client/cli/top_view.h"

namespace lossd::cli {
namespace {

class Top final : public LiveView {
 public:
  Top(const Context& context, TopOrder order, bool all, client::Client& client)
      : context_(context), client_(client), history_(order) {
    history_.set_all(all);
  }

  void Look() override {
    found_ = client_.monitoring().ListStreams(
        0, context_.timeout_seconds > 0 ? context_.timeout() : absl::Seconds(3));
  }
  absl::Status Take() override {
    if (absl::IsUnimplemented(found_.status())) {
      return absl::UnimplementedError(
          absl::StrCat("the server at ", context_.server, " is too old to say who uses it"));
    }
    // It will not answer later, either.
    if (absl::IsPermissionDenied(found_.status()) || absl::IsUnauthenticated(found_.status()))
      return found_.status();
    history_.Add(std::move(found_));
    found_ = absl::UnavailableError("no look yet");
    return absl::OkStatus();
  }
  bool ready() const override { return history_.ready(); }
  std::string Picture(const Frame& frame) const override {
    Frame above = frame;
    above.lines -= std::min<size_t>(frame.lines, 1);
    constexpr char kKeys[] = "q: leave  a: idle clients  order by r: rows  b: bytes  s: staging  w: wait";
    constexpr char kShortKeys[] = "q: leave  a: idle  order: r, b, s, w";
    const std::string keys = Truncated(frame.columns < sizeof(kKeys) - 1 ? kShortKeys : kKeys, frame.columns);
    return absl::StrCat(history_.Render(context_.server, above), frame.style.Paint(Tone::kFaint, keys), "\n");
  }
  void Print() const override {
    if (context_.json) return context_.PrintJsonOfMany(history_.Json());
    constexpr size_t kUnlimited = 100'000;
    context_.Print(
        absl::StrCat(history_.Render(context_.server,
                                     {.columns = kUnlimited, .lines = kUnlimited, .style = context_.style()}),
                     "\n"));
  }
  bool OnKey(char key) override {
    if (key == 'a') {
      history_.set_all(!history_.all());
      return true;
    }
    for (const auto& [name, order] : TopOrders()) {
      if (name.front() != key) continue;
      history_.set_order(order);
      return true;
    }
    return false;
  }

 private:
  const Context& context_;
  client::Client& client_;
  absl::StatusOr<v1::ListStreamsResponse> found_ =
      absl::UnavailableError("no look yet");  // by Look, for Take
  TopHistory history_;
};

}  // namespace

void AddTopCommand(CLI::App* app, Context* context) {
  CLI::App* top =
      app->add_subcommand("top", "Show which clients and streams take rows, bytes and memory, until q");
  top->footer(
      "Not on a terminal it prints the tables per look; with -o json or yaml a document per look. Rates are "
      "those between two looks.");
  auto flags = std::make_shared<LiveFlags>();
  auto order = std::make_shared<TopOrder>(TopOrder::kRows);
  auto all = std::make_shared<bool>(false);
  AddLiveOptions(top, flags.get());
  AddWord(top, "--sort", order.get(), TopOrders(), "What comes first: the most of it [rows]");
  top->add_flag("--all", *all, "Clients without a stream that have done nothing for a minute, too");
  SetClientAction(top, context, [=](client::Client& client) {
    Top view(*context, *order, *all, client);
    return RunLive(*context, *flags, &view);
  });
}

}  // namespace lossd::cli
