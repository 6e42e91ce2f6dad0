// SPDX-License-Identifier: Apache-2.0
// watch
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/http_fetch.h"
#include "client/cli/live.h"
#include "client/cli/options.h"
#include "client/cli/watch_view.h"
#include "kernels/clocks/clock.h"

namespace lossd::cli {
namespace {

class Watch final : public LiveView {
 public:
  Watch(const Context* context, std::string http, client::Client& client)
      : context_(*context), http_(std::move(http)), client_(client) {}

  void Look() override {
    const absl::Duration timeout = context_.timeout_seconds > 0 ? context_.timeout() : absl::Seconds(3);
    found_ = WatchSample();
    const absl::StatusOr<v1::ServerDescription> server = client_.GetServer(timeout);
    const absl::Time start = clocks::SteadyNow();
    const absl::StatusOr<std::vector<v1::HeadDescription>> heads = client_.ListHeads(timeout);
    found_.time = clocks::SteadyNow();
    found_.round_trip_seconds = absl::ToDoubleSeconds(found_.time - start);
    found_.status = server.status();
    found_.status.Update(heads.status());
    if (!found_.status.ok()) return;
    found_.server = *server;
    found_.heads = *heads;
    const absl::StatusOr<std::string> address = context_.HttpAddress(http_, *server);
    const absl::StatusOr<std::string> metrics =
        address.ok() ? HttpFetch(*address, "/metrics", context_.credentials, absl::Seconds(1)) : address;
    if (metrics.ok()) {
      found_.metrics = ParseMetrics(*metrics);
    } else {
      found_.why_no_metrics = std::string(metrics.status().message());
    }
  }
  absl::Status Take() override {
    history_.Add(std::move(found_));
    return absl::OkStatus();
  }
  std::string Picture(const Frame& frame) const override {
    Frame above = frame;
    above.lines -= std::min<size_t>(frame.lines, 1);
    return absl::StrCat(history_.Render(context_.server, above), frame.style.Paint(Tone::kFaint, "q: leave"),
                        "\n");
  }
  void Print() const override {
    if (context_.json) return context_.PrintJsonOfMany(history_.Json());
    context_.Print(history_.Line());
  }

 private:
  const Context& context_;
  const std::string http_;  // empty: not given
  client::Client& client_;
  WatchSample found_;  // by Look, for Take
  WatchHistory history_;
};

}  // namespace

void AddWatchCommand(CLI::App* app, Context* context) {
  CLI::App* watch = app->add_subcommand("watch", "Show what the server does, until q");
  watch->footer("Not on a terminal it prints a line per look; with -o json or yaml a document per look.");
  auto flags = std::make_shared<LiveFlags>();
  auto http = std::make_shared<std::string>();
  AddLiveOptions(watch, flags.get());
  AddHttp(watch, http.get(),
          "The server's HTTP address, for losses, latencies and the device [the context's, else where the "
          "server says]");
  SetClientAction(watch, context, [=](client::Client& client) {
    Watch view(context, *http, client);
    return RunLive(*context, *flags, &view);
  });
}

}  // namespace lossd::cli
