// SPDX-License-Identifier: Apache-2.0
#include "client/cli/live.h"

#include <atomic>
#include <future>
#include <memory>

#include "client/cli/interrupt.h"
#include "client/cli/terminal.h"
#include "kernels/clocks/clock.h"

namespace lossd::cli {
namespace {

absl::Status PrintAll(const Context& context, const LiveFlags& flags, LiveView* view) {
  Interrupt interrupt;
  for (uint64_t shown = 0; !interrupt.received();) {
    view->Look();
    if (absl::Status status = view->Take(); !status.ok()) return status;
    if (view->ready()) {
      view->Print();
      if (absl::Status status = context.Printed(); !status.ok()) return status;
      if (++shown == flags.count) break;
    }
    interrupt.Sleep(absl::Seconds(flags.interval_seconds));
  }
  return absl::OkStatus();
}

class Screen {
 public:
  Screen(const Context& context, const LiveFlags& flags, LiveView* view, std::unique_ptr<Terminal> terminal)
      : context_(context), flags_(flags), view_(view), terminal_(std::move(terminal)) {}

  // The first look is over.
  absl::Status Run() {
    Draw();
    uint64_t shown = view_->ready() ? 1 : 0;
    while (flags_.count == 0 || shown < flags_.count) {
      char key = 0;
      switch (terminal_->Wait(looking_ ? absl::InfiniteFuture() : next_, &key)) {
        case Terminal::Event::kQuit:
          return absl::OkStatus();
        case Terminal::Event::kKey:
          if (key == 'q' || key == 'Q') return absl::OkStatus();
          if (view_->OnKey(key)) Draw();
          break;
        case Terminal::Event::kRedraw:
          Draw();
          break;
        case Terminal::Event::kTime:
          if (!looking_) Look();
          break;
        case Terminal::Event::kWoken:
          if (!looking_ || !found_) break;
          looking_ = false;
          look_.get();
          if (absl::Status status = view_->Take(); !status.ok()) return status;
          if (view_->ready()) ++shown;
          Draw();
          break;
      }
    }
    return absl::OkStatus();
  }

 private:
  void Look() {
    looking_ = true;
    found_ = false;
    next_ = clocks::SteadyNow() + absl::Seconds(flags_.interval_seconds);
    look_ = std::async(std::launch::async, [this] {
      view_->Look();
      found_ = true;
      Terminal::Wake();
    });
  }

  void Draw() const {
    const Terminal::Size size = terminal_->size();
    terminal_->Show(view_->Picture(
        {.columns = size.columns, .lines = size.lines, .style = {.color = context_.ColorsOn(1)}}));
  }

  const Context& context_;
  const LiveFlags& flags_;
  LiveView* const view_;
  bool looking_ = false;
  std::atomic<bool> found_{false};
  absl::Time next_ = clocks::SteadyNow() + absl::Seconds(flags_.interval_seconds);
  std::future<void> look_;  // waited for when the terminal is as it was
  const std::unique_ptr<Terminal> terminal_;
};

}  // namespace

absl::Status RunLive(const Context& context, const LiveFlags& flags, LiveView* view) {
  if (context.json || !Terminal::Available()) return PrintAll(context, flags, view);
  view->Look();
  if (absl::Status status = view->Take(); !status.ok()) return status;
  std::unique_ptr<Terminal> terminal = Terminal::Open();
  if (terminal == nullptr) return PrintAll(context, flags, view);
  return Screen(context, flags, view, std::move(terminal)).Run();
}

}  // namespace lossd::cli
