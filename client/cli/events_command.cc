// SPDX-License-Identifier: Apache-2.0
// events
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/cli/events_text.h"
#include "client/cli/http_fetch.h"
#include "client/cli/interrupt.h"
#include "client/cli/options.h"

namespace lossd::cli {
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

}  // namespace lossd::cli
