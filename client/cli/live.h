// SPDX-License-Identifier: Apache-2.0
// Views that look at the server again and again (LiveView, RunLive), the terminal that they are drawn on
// (Terminal), and the flag that Ctrl-C sets for other long commands (Interrupt). A view is drawn over itself
// on a terminal, and printed again and again elsewhere.
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

// The terminal while a live view is on it: its second screen without a cursor, keys that come one by one, and
// the way back on every exit.
//
// At most one at a time. While it lives, SIGINT, SIGTERM, SIGHUP and SIGQUIT end Wait with kQuit; a second
// one ends the process as usual. Whatever ends the process, but SIGKILL, gives the terminal back first;
// stopping it (Ctrl-Z) does, too, and the screen comes back with it.
//
// Thread-compatible; Wake is thread-safe.
class Terminal {
 public:
  // Whether stdout is a terminal that understands escape sequences (TERM is neither empty nor "dumb").
  static bool Available();
  // Null if there is none, or the system has no descriptors left.
  static std::unique_ptr<Terminal> Open();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  struct Size {
    size_t columns = 80;
    size_t lines = 24;
  };
  Size size() const;

  // Draws the first lines of a picture over what is there, as many as fit, so that nothing flickers.
  void Show(const std::string& picture) const;

  enum class Event {
    kTime,    // `until` has come
    kQuit,    // a signal, or the terminal has gone
    kKey,     // a key was pressed
    kRedraw,  // the terminal has another size, or the process went on after a stop
    kWoken,
  };
  // The next event, `until` at the latest. `key` is set for kKey, for each key of several that were pressed
  // meanwhile; keys that send several bytes, such as arrows, are left out.
  Event Wait(absl::Time until, char* key);
  static void Wake();

 private:
  Terminal() = default;

  std::string keys_;  // pressed, and not told yet
};

// Where a picture goes.
struct Frame {
  size_t columns = 80;
  size_t lines = 24;
  Style style;
};

// What a live command shows: `watch`, `top`. Two classes implement it. RunLive calls it.
class LiveView {
 public:
  virtual ~LiveView() = default;
  // Asks the server. On a thread of its own, so that keys work while the server does not answer; the other
  // members are called meanwhile, but for Take.
  virtual void Look() = 0;
  // Makes what the last Look has found what the view shows. An error ends the view.
  virtual absl::Status Take() = 0;
  // Whether there is something to show; views that show rates need two looks.
  virtual bool ready() const { return true; }
  // For a terminal: lines ending in "\n", as wide as the frame or less. More lines than the frame has are
  // cut.
  virtual std::string Picture(const Frame& frame) const = 0;
  // For a pipe or a file: after each look, the lines or the document that it adds.
  virtual void Print() const = 0;
  // A key was pressed; true if the picture is another one now. "q" does not come here.
  virtual bool OnKey(char /*key*/) { return false; }
};

struct LiveFlags {
  double interval_seconds = 1;
  uint64_t count = 0;  // looks that show something; 0: until somebody ends it
};

// Until `q`, a signal, or as many looks as were asked for. Documents (Context::json) are printed on a
// terminal, too.
absl::Status RunLive(const Context& context, const LiveFlags& flags, LiveView* view);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_LIVE_H_
