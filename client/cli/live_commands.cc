// SPDX-License-Identifier: Apache-2.0
// The commands events, top, trace and watch.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/http.h"
#include "client/cli/live.h"
#include "client/cli/options.h"
#include "client/cli/top_view.h"
#include "client/cli/value_checks.h"
#include "client/cli/watch_view.h"
#include "kernels/clocks/clock.h"

namespace lossd::cli {

// ---- events ----

namespace {

constexpr absl::Duration kPause = absl::Seconds(1);  // between looks

struct EventsFlags {
  std::string http;
  bool follow = false;
  uint64_t after = 0;
};

absl::StatusOr<Events> Fetch(const Context& context, const std::string& address, uint64_t after) {
  const absl::Duration timeout = context.timeout_seconds > 0 ? context.timeout() : absl::Seconds(5);
  const absl::StatusOr<std::string> text =
      HttpFetch(address, absl::StrCat("/events.json?after=", after), context.credentials, timeout);
  if (!text.ok()) return text.status();
  return ParseEvents(*text);
}

// With --json a line of JSON for each event.
void Print(const Context& context, const Events& events) {
  if (events.missed && !context.json) context.Print("earlier events are no longer there\n");
  for (const nlohmann::ordered_json& event : events.events) {
    if (context.json) {
      context.PrintJsonOfMany(event);
    } else {
      context.Print(absl::StrCat(EventLine(event), "\n"));
    }
  }
}

// A server that is being restarted is waited for; a fault of the request is not.
bool MayComeBack(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

absl::Status RunEvents(Context* context, const EventsFlags& flags) {
  const absl::StatusOr<std::string> address = context->HttpAddress(flags.http);
  if (!address.ok()) return address.status();
  absl::StatusOr<Events> events = Fetch(*context, *address, flags.after);
  if (!events.ok()) return events.status();
  Print(*context, *events);
  if (!flags.follow) return absl::OkStatus();
  Interrupt interrupt;
  std::string incarnation = events->incarnation;
  uint64_t seen = events->last_id;
  while (true) {
    interrupt.Sleep(kPause);
    if (interrupt.received() || !context->Printed().ok()) return absl::OkStatus();
    events = Fetch(*context, *address, seen);
    // Another server counts from 1 again.
    if (events.ok() && events->incarnation != incarnation) {
      incarnation = events->incarnation;
      events = Fetch(*context, *address, 0);
    }
    if (!events.ok() && MayComeBack(events.status())) continue;
    if (!events.ok()) return events.status();
    Print(*context, *events);
    seen = events->last_id;
  }
}

}  // namespace

void AddEventsCommand(CLI::App* app, Context* context) {
  CLI::App* events = app->add_subcommand("events", "Print what has happened on the server");
  events->footer("With --json an object a line. --follow waits for a server that is gone.");
  auto flags = std::make_shared<EventsFlags>();
  events->add_flag("--follow", flags->follow, "Go on with what happens, until Ctrl-C");
  events->add_option("--after", flags->after, "Only events whose id is larger [0]");
  AddHttp(events, &flags->http);
  events->callback([=] { context->action = [=] { return RunEvents(context, *flags); }; });
}

// ---- top ----

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
      "Not on a terminal it prints the tables per look; with -o json a document per look. Rates are "
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

// ---- trace ----

namespace {

struct TraceFlags {
  std::string http;
  double seconds = 2;
};

absl::Status RunTrace(Context* context, const TraceFlags& flags) {
  const absl::Duration timeout = context->timeout_seconds > 0 ? context->timeout() : absl::Seconds(30);
  const absl::StatusOr<std::string> address = context->HttpAddress(flags.http);
  if (!address.ok()) return address.status();
  const absl::StatusOr<std::string> started =
      HttpPost(*address, absl::StrCat("/trace?seconds=", flags.seconds), context->credentials, timeout);
  if (!started.ok()) return started.status();
  const auto answer = nlohmann::json::parse(*started, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object() || !answer.contains("recording") || !answer["recording"].is_number_unsigned()) {
    return absl::InternalError("the server's answer names no recording");
  }
  const Interrupt interrupt;
  interrupt.Sleep(absl::Seconds(flags.seconds) + absl::Milliseconds(50));
  if (interrupt.received()) return absl::CancelledError("interrupted; the server drops the trace by itself");
  const absl::StatusOr<std::string> trace =
      HttpPost(*address, absl::StrCat("/trace.json?recording=", answer["recording"].get<uint64_t>()),
               context->credentials, timeout);
  if (!trace.ok()) return trace.status();
  context->Print(*trace);
  return absl::OkStatus();
}

}  // namespace

void AddTraceCommand(CLI::App* app, Context* context) {
  CLI::App* trace = app->add_subcommand("trace", "Record what becomes of slices and chunks, for Perfetto");
  trace->footer(
      "Prints Chrome's Trace Event Format: lossctl trace --seconds 2 > trace.json, then open it in "
      "https://ui.perfetto.dev or chrome://tracing. Needs the role admin on a server that asks.");
  auto flags = std::make_shared<TraceFlags>();
  trace->add_option("--seconds", flags->seconds, "How long to record, 0.01 to 30 [2]")
      ->check(NumberFromTo(0.01, 30));
  AddHttp(trace, &flags->http);
  trace->callback([=] { context->action = [=] { return RunTrace(context, *flags); }; });
}

// ---- watch ----

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
  watch->footer("Not on a terminal it prints a line per look; with -o json a document per look.");
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
