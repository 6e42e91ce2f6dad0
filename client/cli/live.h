// SPDX-License-Identifier: Apache-2.0
// Views that look at the server again and again: drawn over themselves on a terminal, printed one after the
// other elsewhere.
#ifndef LOSSD_CLIENT_CLI_LIVE_H_
#define LOSSD_CLIENT_CLI_LIVE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cli/context.h"
#include "client/cli/style.h"

namespace lossd::cli {

// Where a picture goes.
struct Frame {
  size_t columns = 80;
  size_t lines = 24;
  Style style;
};

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
