// SPDX-License-Identifier: Apache-2.0
// The terminal while a live view is on it: its second screen without a cursor, keys that come one by one, and
// the way back on every exit.
#ifndef LOSSD_CLIENT_CLI_TERMINAL_H_
#define LOSSD_CLIENT_CLI_TERMINAL_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/time/time.h"

namespace lossd::cli {

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

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_TERMINAL_H_
