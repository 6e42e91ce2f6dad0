// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/progress.h"

#include <unistd.h>

#include <cmath>

#include "absl/strings/str_format.h"
#include "kernels/clocks/clock.h"

namespace lossd::ngram_lm {

std::string FormatProgress(const ProgressState& state) {
  const int64_t seconds = absl::ToInt64Seconds(absl::Ceil(state.left, absl::Seconds(1)));
  return absl::StrFormat("step %5d   loss %.3f   perplexity %7.1f   %6.0f tokens/s   %d:%02d left",
                         state.step, state.loss, std::exp(state.loss), state.tokens_per_second, seconds / 60,
                         seconds % 60);
}

ProgressLine::ProgressLine(FILE* out)
    : out_(out), in_place_(isatty(fileno(out)) != 0), next_(absl::InfinitePast()) {}

void ProgressLine::Update(const ProgressState& state) {
  const absl::Time now = clocks::SteadyNow();
  if (now < next_) return;
  next_ = now + (in_place_ ? absl::Milliseconds(200) : absl::Seconds(10));
  const std::string line = FormatProgress(state);
  std::fputs((in_place_ ? "\r\033[K" + line : line + "\n").c_str(), out_);
  std::fflush(out_);
}

void ProgressLine::Print(const std::string& line) {
  Clear();
  absl::FPrintF(out_, "%s\n", line);
  std::fflush(out_);
}

void ProgressLine::Clear() {
  if (in_place_) absl::FPrintF(out_, "\r\033[K");
  std::fflush(out_);
}

}  // namespace lossd::ngram_lm
