// SPDX-License-Identifier: Apache-2.0
// Views that ask the server again and again and show its answers (LiveView, RunLive), the terminal on which
// they are drawn (Terminal), and a flag that Ctrl-C sets for other long commands (Interrupt). On a terminal
// each picture replaces the one before; elsewhere lines are printed one after the other.
//
// Thread-compatible except where a class says more.
#ifndef LOSSD_CLIENT_CLI_LIVE_H_
#define LOSSD_CLIENT_CLI_LIVE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cli/context.h"
#include "client/cli/format.h"

namespace lossd::cli {

// Turns Ctrl-C and SIGTERM into a flag, so that long commands end in order. While an Interrupt lives, these
// signals only set the flag; a second one ends the process as usual. At most one at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // Thread-safe.
  bool received() const;
  // Sleeps for `duration` or until a signal comes.
  void Sleep(absl::Duration duration) const;
};

// The terminal while a live view is on it: it shows its alternate screen without a cursor and delivers keys
// one by one. Every exit restores it.
//
// There is at most one Terminal at a time. While it lives, SIGINT, SIGTERM, SIGHUP and SIGQUIT make Wait
// return kQuit; a second signal ends the process as usual. Before the process ends for any reason except
// SIGKILL, the terminal is restored. It is also restored while the process is stopped (Ctrl-Z).
//
// Thread-compatible; Wake is thread-safe.
class Terminal {
 public:
  // Whether stdout is a terminal that understands escape sequences (TERM is neither empty nor "dumb").
  static bool Available();
  // Null if stdout is no such terminal, or if the system has no file descriptors left.
  static std::unique_ptr<Terminal> Open();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  struct Size {
    size_t columns = 80;
    size_t lines = 24;
  };
  Size size() const;

  // Draws as many lines of the picture as fit, from the first, over what is there, so that nothing flickers.
  void Show(const std::string& picture) const;

  enum class Event {
    kTime,    // `until` has come
    kQuit,    // a signal came, or the terminal was closed
    kKey,     // a key was pressed
    kRedraw,  // the terminal has another size, or the process continues after a stop
    kWoken,
  };
  // Returns the next event, kTime when `until` has come. kKey sets `key`; if several keys were pressed
  // meanwhile, each is an event. Keys that send several bytes, such as arrows, are left out.
  Event Wait(absl::Time until, char* key);
  static void Wake();

 private:
  Terminal() = default;

  std::string keys_;  // keys that were pressed and that Wait has not returned yet
};

// Where a picture is drawn: its size and style.
struct Frame {
  size_t columns = 80;
  size_t lines = 24;
  Style style;
};

// What a live command (`watch` or `top`) shows. RunLive calls it; each command has a class that implements
// it.
class LiveView {
 public:
  virtual ~LiveView() = default;
  // Asks the server. On a terminal, RunLive calls Look on a thread of its own, so that keys work while the
  // server does not answer. Meanwhile RunLive may call the other members, except Take.
  virtual void Look() = 0;
  // Makes the view show what the last Look has found. An error ends the view.
  virtual absl::Status Take() = 0;
  // Whether there is something to show. A view that shows rates needs two calls of Look.
  virtual bool ready() const { return true; }
  // The picture for a terminal: lines ending in "\n", not wider than the frame. Lines that the frame has no
  // room for are cut off.
  virtual std::string Picture(const Frame& frame) const = 0;
  // The output for a pipe or a file: after each Look, prints the lines or the JSON document of what it found.
  virtual void Print() const = 0;
  // A key was pressed. Returns true if the picture has changed. RunLive handles "q" itself.
  virtual bool OnKey(char /*key*/) { return false; }
};

struct LiveFlags {
  double interval_seconds = 1;
  uint64_t count = 0;  // how often something is shown; 0: until the user ends it
};

// Runs the view until `q`, a signal, or flags.count pictures. With --output json (Context::json) it prints
// JSON documents on a terminal, too.
absl::Status RunLive(const Context& context, const LiveFlags& flags, LiveView* view);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_LIVE_H_
