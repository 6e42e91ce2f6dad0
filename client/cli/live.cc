// SPDX-License-Identifier: Apache-2.0
// The terminal, its signal handlers, and the loop of live views (live.h).
#include "client/cli/live.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <future>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"

namespace lossd::cli {

// ---- Interrupt ----

namespace {

std::atomic<bool> g_received{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void Install(int signal, void (*handler)(int), int flags) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

}  // namespace

Interrupt::Interrupt() {
  g_received = false;
  for (int signal : {SIGINT, SIGTERM}) {
    Install(
        signal, [](int) { g_received = true; }, SA_RESETHAND);
  }
}

Interrupt::~Interrupt() {
  for (int signal : {SIGINT, SIGTERM}) Install(signal, SIG_DFL, 0);
}

bool Interrupt::received() const { return g_received; }

void Interrupt::Sleep(absl::Duration duration) const {
  const absl::Time end = clocks::SteadyNow() + duration;
  while (!received() && clocks::SteadyNow() < end)
    absl::SleepFor(std::min(end - clocks::SteadyNow(), absl::Milliseconds(50)));
}

// ---- Terminal ----

namespace {

constexpr absl::string_view kEnter = "\033[?1049h\033[?25l";  // second screen, no cursor
constexpr absl::string_view kLeave = "\033[0m\033[?25h\033[?1049l";

constexpr int kEndings[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
constexpr int kCrashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

// The state that the signal handlers use. The handlers only call what POSIX allows in a handler.
struct Global {
  std::atomic<bool> entered{false};
  std::atomic<bool> quit{false};
  std::atomic<bool> redraw{false};
  bool has_keys = false;  // stdin is the terminal, and `usual` is the state that it had
  termios usual = {};
  int wakes[2] = {-1, -1};  // a pipe
};
Global g;  // NOLINT: handlers have no other way to get at it

void Put(absl::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR && errno != EAGAIN) {
      return;
    }
  }
}

void Poke() {
  const char byte = 0;
  const int error = errno;
  if (write(g.wakes[1], &byte, 1) < 0) {
    // The pipe is full, so the reader wakes up anyway.
  }
  errno = error;
}

void Enter() {
  if (g.has_keys) {
    termios keys = g.usual;
    keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);  // signals of keys stay
    keys.c_cc[VMIN] = 1;
    keys.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSANOW, &keys);
  }
  Put(kEnter);
  g.entered = true;
}

void Leave() {
  if (!g.entered.exchange(false)) return;
  Put(kLeave);
  if (g.has_keys) tcsetattr(STDIN_FILENO, TCSANOW, &g.usual);
}

void Handle(int signal, void (*handler)(int), int flags = 0) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

// Ends the process by the signal's default action. It takes effect when the calling handler has returned or
// unblocks the signal.
void DieOf(int signal) {
  Leave();
  Handle(signal, SIG_DFL);
  raise(signal);
}

void OnEnding(int signal) {
  if (g.quit.exchange(true)) return DieOf(signal);
  Poke();
}

void OnStop(int signal) {
  const int error = errno;
  Leave();
  Handle(signal, SIG_DFL);
  sigset_t only;
  sigset_t before;
  sigemptyset(&only);
  sigaddset(&only, signal);
  raise(signal);
  sigprocmask(SIG_UNBLOCK, &only, &before);  // the process stops here until SIGCONT
  sigprocmask(SIG_SETMASK, &before, nullptr);
  Handle(signal, OnStop);
  Enter();
  g.redraw = true;
  Poke();
  errno = error;
}

void OnResize(int) {
  g.redraw = true;
  Poke();
}

void Drain(int descriptor) {
  char bytes[64];
  while (read(descriptor, bytes, sizeof bytes) == static_cast<ssize_t>(sizeof bytes)) {
  }
}

// The keys among the bytes that a terminal has sent. Arrows and similar keys are ESC [ numbers letter, or ESC
// O letter; Alt with a key is ESC and the key.
std::string KeysOf(absl::string_view sent) {
  std::string keys;
  for (size_t i = 0; i < sent.size(); ++i) {
    if (sent[i] != '\033') {
      keys.push_back(sent[i]);
      continue;
    }
    const char kind = ++i < sent.size() ? sent[i] : '\0';
    if (kind == 'O') ++i;
    if (kind != '[') continue;
    do {
      ++i;
    } while (i < sent.size() && (sent[i] < '@' || sent[i] > '~'));
  }
  return keys;
}

}  // namespace

bool Terminal::Available() {
  const std::string name = client::EnvironmentVariable("TERM");
  return isatty(STDOUT_FILENO) != 0 && !name.empty() && name != "dumb";
}

std::unique_ptr<Terminal> Terminal::Open() {
  if (!Available()) return nullptr;
  // The pipe stays open after the Terminal is gone, because a Look that still runs may call Wake.
  if (g.wakes[0] < 0 && pipe2(g.wakes, O_CLOEXEC | O_NONBLOCK) != 0) return nullptr;
  g.quit = false;
  g.redraw = false;
  // A process in the background must not read or change the terminal, which would stop the process.
  g.has_keys = isatty(STDIN_FILENO) != 0 && tcgetpgrp(STDIN_FILENO) == getpgrp() &&
               tcgetattr(STDIN_FILENO, &g.usual) == 0;
  for (int signal : kEndings) Handle(signal, OnEnding);
  for (int signal : kCrashes) Handle(signal, DieOf);
  Handle(SIGTSTP, OnStop);
  Handle(SIGWINCH, OnResize);
  static const bool at_exit = std::atexit(Leave) == 0;
  static_cast<void>(at_exit);
  Enter();
  return std::unique_ptr<Terminal>(new Terminal());
}

Terminal::~Terminal() {
  Leave();
  for (int signal : kEndings) Handle(signal, SIG_DFL);
  for (int signal : kCrashes) Handle(signal, SIG_DFL);
  Handle(SIGTSTP, SIG_DFL);
  Handle(SIGWINCH, SIG_DFL);
}

Terminal::Size Terminal::size() const {
  struct winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return {};
  return {.columns = size.ws_col == 0 ? 80u : size.ws_col, .lines = size.ws_row == 0 ? 24u : size.ws_row};
}

void Terminal::Show(const std::string& picture) const {
  std::string out = "\033[H";
  size_t left = size().lines;
  for (const absl::string_view line : absl::StrSplit(picture, '\n')) {
    if (left-- == 0) break;
    // Clears the line before it writes: clearing after a full line (EL) would erase its last column.
    absl::StrAppend(&out, "\033[K", line, left > 0 ? "\r\n" : "");
  }
  Put(absl::StrCat(out, "\033[J"));
}

Terminal::Event Terminal::Wait(absl::Time until, char* key) {
  while (true) {
    if (g.quit) return Event::kQuit;
    if (g.redraw.exchange(false)) return Event::kRedraw;
    if (!keys_.empty()) {
      *key = keys_.front();
      keys_.erase(keys_.begin());
      return Event::kKey;
    }
    const int64_t left =
        absl::ToInt64Milliseconds(absl::Ceil(until - clocks::SteadyNow(), absl::Milliseconds(1)));
    if (left <= 0) return Event::kTime;
    pollfd from[2] = {{.fd = g.wakes[0], .events = POLLIN, .revents = 0},
                      {.fd = g.has_keys ? STDIN_FILENO : -1, .events = POLLIN, .revents = 0}};
    if (poll(from, 2, static_cast<int>(std::min<int64_t>(left, 60'000))) <= 0) continue;
    if (from[0].revents != 0) {
      Drain(g.wakes[0]);
      if (g.quit || g.redraw) continue;
      return Event::kWoken;
    }
    char bytes[64];
    const ssize_t got = read(STDIN_FILENO, bytes, sizeof bytes);
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) return Event::kQuit;
    if (got > 0) keys_ = KeysOf(absl::string_view(bytes, static_cast<size_t>(got)));
  }
}

void Terminal::Wake() { Poke(); }

// ---- RunLive ----

namespace {

absl::Status PrintAll(const Context& context, const LiveFlags& flags, LiveView* view) {
  Interrupt interrupt;
  for (uint64_t shown = 0; !interrupt.received();) {
    view->Look();
    LOSSD_RETURN_IF_ERROR(view->Take());
    if (view->ready()) {
      view->Print();
      LOSSD_RETURN_IF_ERROR(context.Printed());
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

  // The caller has waited for the first Look.
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
          LOSSD_RETURN_IF_ERROR(view_->Take());
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
  std::future<void> look_;  // waits for the thread when it is destroyed, after terminal_ has been restored
  const std::unique_ptr<Terminal> terminal_;
};

}  // namespace

absl::Status RunLive(const Context& context, const LiveFlags& flags, LiveView* view) {
  if (context.json || !Terminal::Available()) return PrintAll(context, flags, view);
  view->Look();
  LOSSD_RETURN_IF_ERROR(view->Take());
  std::unique_ptr<Terminal> terminal = Terminal::Open();
  if (terminal == nullptr) return PrintAll(context, flags, view);
  return Screen(context, flags, view, std::move(terminal)).Run();
}

}  // namespace lossd::cli
