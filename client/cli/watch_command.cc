// watch
#include <sys/ioctl.h>
#include <unistd.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/http_fetch.h"
#include "client/cli/interrupt.h"
#include "client/cli/options.h"
#include "client/cli/watch_view.h"

namespace lossd::cli {
namespace {

struct Flags {
  double interval_seconds = 1;
  uint64_t count = 0;
  std::string http;
};

// The terminal's second screen without a cursor, until this goes.
class Screen {
 public:
  explicit Screen(const Context& context) : context_(context) { context_.Print("\033[?1049h\033[?25l"); }
  ~Screen() { context_.Print("\033[?25h\033[?1049l"); }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  // Draws over what is there, so that nothing flickers.
  void Show(const std::string& picture) const {
    context_.Print(absl::StrCat("\033[H", absl::StrReplaceAll(picture, {{"\n", "\033[K\n"}}), "\033[J"));
  }

  static size_t Width() {
    struct winsize size = {};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
    return size.ws_col;
  }

 private:
  const Context& context_;
};

WatchSample Look(const Context& context, const std::string& http, client::Client& client) {
  const absl::Duration timeout = context.timeout_seconds > 0 ? context.timeout() : absl::Seconds(3);
  WatchSample sample;
  const absl::StatusOr<v1::ServerDescription> server = client.GetServer(timeout);
  const absl::Time start = absl::Now();
  const absl::StatusOr<std::vector<v1::HeadDescription>> heads = client.ListHeads(timeout);
  sample.time = absl::Now();
  sample.round_trip_seconds = absl::ToDoubleSeconds(sample.time - start);
  sample.status = server.status();
  sample.status.Update(heads.status());
  if (!sample.status.ok()) return sample;
  sample.server = *server;
  sample.heads = *heads;
  if (http.empty()) return sample;
  const absl::StatusOr<std::string> metrics =
      HttpFetch(http, "/metrics", context.credentials, absl::Milliseconds(500));
  if (metrics.ok()) sample.metrics = ParseMetrics(*metrics);
  return sample;
}

nlohmann::ordered_json SampleJson(const WatchSample& sample, const WatchHistory& history) {
  nlohmann::ordered_json json;
  json["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", sample.time, absl::UTCTimeZone());
  if (!sample.status.ok()) {
    json["error"] = sample.status.message();
    return json;
  }
  json["server"] = ToJson(sample.server);
  json["rows_per_second"] = history.RowsPerSecond();
  json["round_trip_seconds"] = sample.round_trip_seconds;
  json["heads"] = nlohmann::ordered_json::array();
  for (const v1::HeadDescription& head : sample.heads) {
    json["heads"].push_back(ToJson(head));
    json["heads"].back()["rows_per_second"] = history.RowsPerSecond(head.spec().name());
  }
  return json;
}

absl::Status RunWatch(Context* context, const Flags& flags, client::Client& client) {
  Interrupt interrupt;
  std::unique_ptr<Screen> screen;
  if (!context->json && isatty(STDOUT_FILENO) != 0) screen = std::make_unique<Screen>(*context);
  const absl::StatusOr<std::string> http = context->HttpAddress(flags.http, &client);
  WatchHistory history;
  for (uint64_t i = 0; !interrupt.received() && (flags.count == 0 || i < flags.count); ++i) {
    if (i > 0) interrupt.Sleep(absl::Seconds(flags.interval_seconds));
    if (interrupt.received()) break;
    const WatchSample sample = Look(*context, http.value_or(""), client);
    history.Add(sample);
    if (screen != nullptr) {
      screen->Show(absl::StrCat(history.Render(context->server, Screen::Width()), "\nCtrl-C to leave\n"));
    } else if (context->json) {
      context->PrintJsonOfMany(SampleJson(sample, history));
    } else {
      context->Print(history.Line());
    }
  }
  return absl::OkStatus();
}

}  // namespace

void AddWatchCommand(CLI::App* app, Context* context) {
  CLI::App* watch = app->add_subcommand("watch", "Show what the server does, until Ctrl-C");
  watch->footer("Not on a terminal it prints a line per look; with --json a JSON object per line.");
  auto flags = std::make_shared<Flags>();
  watch->add_option("--interval", flags->interval_seconds, "Seconds between looks [1]")
      ->check(CLI::Range(0.05, 3600.0));
  watch->add_option("--count", flags->count, "Leave after so many looks; 0: never [0]");
  watch
      ->add_option("--http", flags->http,
                   "The server's HTTP address, for latencies [the context's, else where the server says]")
      ->type_name("HOST:PORT");
  SetClientAction(watch, context, [=](client::Client& client) { return RunWatch(context, *flags, client); });
}

}  // namespace lossd::cli
