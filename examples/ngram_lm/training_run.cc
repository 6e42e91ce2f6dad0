// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/training_run.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/clocks/clock.h"

namespace lossd::ngram_lm {

// ---- ProgressLine ----

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

// ---- Plots ----

namespace {

constexpr int kLabelWidth = 8;

// A value range and the dots it is drawn on.
struct Scale {
  double low = 0;
  double high = 1;
  int dots = 1;

  int At(double value) const {
    return std::clamp(static_cast<int>(std::lround((value - low) / (high - low) * (dots - 1))), 0, dots - 1);
  }
};

Scale ScaleOf(double low, double high, int dots) {
  if (high <= low) high = low + 1;
  return {low, high, dots};
}

// A grid of characters, each with dots or a letter in it.
class Canvas {
 public:
  Canvas(int width, int height) : width_(width), height_(height), cells_(Size()), letters_(Size()) {}

  // Dots count from the lower left.
  void Dot(int x, int y) {
    static constexpr uint8_t kBits[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    const int row = height_ * 4 - 1 - y;
    cells_[row / 4 * width_ + x / 2] |= kBits[row % 4][x % 2];
  }

  void Letter(int x, int y, char letter) { letters_[(height_ * 4 - 1 - y) / 4 * width_ + x / 2] = letter; }

  void Line(int x0, int y0, int x1, int y1) {
    const int steps = std::max({std::abs(x1 - x0), std::abs(y1 - y0), 1});
    for (int i = 0; i <= steps; ++i) {
      const double part = static_cast<double>(i) / steps;
      Dot(static_cast<int>(std::lround(x0 + part * (x1 - x0))),
          static_cast<int>(std::lround(y0 + part * (y1 - y0))));
    }
  }

  std::string Row(int row) const {
    std::string line;
    for (int i = row * width_; i < (row + 1) * width_; ++i) {
      if (letters_[i] != 0) {
        line.push_back(letters_[i]);
      } else if (cells_[i] == 0) {
        line.push_back(' ');
      } else {
        AppendBraille(cells_[i], &line);
      }
    }
    return line;
  }

 private:
  // U+2800 plus the dots, as UTF-8.
  static void AppendBraille(uint8_t dots, std::string* out) {
    out->push_back('\xE2');
    out->push_back(static_cast<char>(0xA0 | (dots >> 6)));
    out->push_back(static_cast<char>(0x80 | (dots & 0x3F)));
  }

  size_t Size() const { return static_cast<size_t>(width_) * static_cast<size_t>(height_); }

  const int width_;
  const int height_;
  std::vector<uint8_t> cells_;
  std::vector<char> letters_;
};

void Extend(const std::vector<Point>& points, double Point::*member, double* low, double* high) {
  for (const Point& point : points) {
    *low = std::min(*low, point.*member);
    *high = std::max(*high, point.*member);
  }
}

Scale XScale(const PlotData& data, const PlotOptions& options) {
  double low = data.curve[0].x, high = low;
  Extend(data.curve, &Point::x, &low, &high);
  Extend(data.marks, &Point::x, &low, &high);
  return ScaleOf(low, high, options.width * 2);
}

Scale YScale(const PlotData& data, const PlotOptions& options) {
  double low = data.curve[0].y, high = low;
  Extend(data.curve, &Point::y, &low, &high);
  Extend(data.marks, &Point::y, &low, &high);
  if (!data.reference_label.empty()) {
    low = std::min(low, data.reference);
    high = std::max(high, data.reference);
  }
  return ScaleOf(low, high, options.height * 4);
}

Canvas Draw(const PlotData& data, const PlotOptions& options, const Scale& x, const Scale& y) {
  Canvas canvas(options.width, options.height);
  if (!data.reference_label.empty()) {
    for (int dot = 0; dot < x.dots; dot += 4) canvas.Dot(dot, y.At(data.reference));
  }
  for (size_t i = 0; i < data.curve.size(); ++i) {
    const Point& from = data.curve[i == 0 ? 0 : i - 1];
    canvas.Line(x.At(from.x), y.At(from.y), x.At(data.curve[i].x), y.At(data.curve[i].y));
  }
  for (const Point& mark : data.marks) canvas.Letter(x.At(mark.x), y.At(mark.y), 'o');
  return canvas;
}

// The label beside a line of the plot: at the top, in the middle, at the bottom.
std::string AxisLabel(int row, int height, const Scale& y) {
  const bool labelled = row == 0 || row == height - 1 || row == height / 2;
  if (!labelled) return absl::StrCat(std::string(kLabelWidth, ' '), " │");
  const double part = height == 1 ? 1 : 1 - static_cast<double>(row) / (height - 1);
  return absl::StrFormat("%*.2f ┤", kLabelWidth, y.low + part * (y.high - y.low));
}

std::string XAxis(const PlotOptions& options, const Scale& x) {
  std::string axis = absl::StrCat(std::string(kLabelWidth, ' '), " └");
  for (int i = 0; i < options.width; ++i) absl::StrAppend(&axis, "─");
  const std::string left = absl::StrFormat("%.0f", x.low);
  const std::string right = absl::StrFormat("%.0f", x.high);
  const int room = options.width - static_cast<int>(left.size() + right.size());
  const int gap = std::max(room - static_cast<int>(options.x_label.size()), 2);
  absl::StrAppend(&axis, "\n", std::string(kLabelWidth + 2, ' '), left, std::string(gap / 2, ' '),
                  options.x_label, std::string(gap - gap / 2, ' '), right, "\n");
  return axis;
}

}  // namespace

std::string RenderPlot(const PlotData& data, const PlotOptions& options) {
  const Scale x = XScale(data, options);
  const Scale y = YScale(data, options);
  const Canvas canvas = Draw(data, options, x, y);
  const int reference_row = options.height - 1 - y.At(data.reference) / 4;
  std::string plot;
  if (!options.title.empty()) absl::StrAppend(&plot, std::string(kLabelWidth + 2, ' '), options.title, "\n");
  for (int row = 0; row < options.height; ++row) {
    std::string line = absl::StrCat(AxisLabel(row, options.height, y), canvas.Row(row));
    const bool referred = !data.reference_label.empty() && row == reference_row;
    if (referred) absl::StrAppend(&line, " ", data.reference_label);
    absl::StrAppend(&plot, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  absl::StrAppend(&plot, XAxis(options, x));
  return plot;
}

// ---- RunTraining ----

namespace {

// How much of the training is over.
class Clock {
 public:
  Clock(const RunOptions& options, int64_t first_step)
      : options_(options), first_step_(first_step), start_(clocks::SteadyNow()) {}

  absl::Duration Elapsed() const { return clocks::SteadyNow() - start_; }

  // In [0, 1].
  double Done(int64_t step) const {
    if (options_.steps > 0) return static_cast<double>(step) / static_cast<double>(options_.steps);
    return std::min(1.0, absl::FDivDuration(Elapsed(), options_.time));
  }

  absl::Duration Left(int64_t step) const {
    if (options_.steps == 0) return std::max(options_.time - Elapsed(), absl::ZeroDuration());
    if (step == first_step_) return absl::ZeroDuration();
    return Elapsed() * (options_.steps - step) / (step - first_step_);
  }

 private:
  const RunOptions& options_;
  const int64_t first_step_;
  const absl::Time start_;
};

// The running mean of the loss, and the points of its curve.
class LossCurve {
 public:
  void Add(int64_t step, double loss) {
    ++count_;
    mean_ += (loss - mean_) / static_cast<double>(std::min<int64_t>(count_, kSteps));
    points_.push_back({static_cast<double>(step), mean_});
  }
  double mean() const { return mean_; }
  std::vector<Point> Take() { return std::move(points_); }

 private:
  static constexpr int64_t kSteps = 10;
  int64_t count_ = 0;
  double mean_ = 0;
  std::vector<Point> points_;
};

}  // namespace

double RateMultiplier(double done) {
  constexpr double kWarmUp = 0.03;
  constexpr double kLast = 0.05;
  if (done < kWarmUp) return (done + 0.003) / (kWarmUp + 0.003);
  const double cosine = 0.5 + 0.5 * std::cos(std::numbers::pi * (done - kWarmUp) / (1 - kWarmUp));
  return kLast + (1 - kLast) * cosine;
}

absl::StatusOr<RunResult> RunTraining(const RunOptions& options, absl::Span<const int32_t> held_out,
                                      Trainer* trainer, FILE* out, const StepObserver& on_step) {
  ProgressLine progress(out);
  const Clock clock(options, trainer->steps());
  LossCurve curve;
  RunResult result;
  result.steps = trainer->steps();
  double next_evaluation = 0;
  while (clock.Done(result.steps) < 1) {
    const double done = clock.Done(result.steps);
    if (done >= next_evaluation) {
      const absl::StatusOr<double> loss = trainer->Evaluate(held_out, options.evaluation_tokens);
      if (!loss.ok()) return loss.status();
      result.held_out.push_back({static_cast<double>(result.steps), *loss});
      progress.Print(absl::StrFormat("step %5d   held-out loss %.3f   perplexity %.1f", result.steps, *loss,
                                     std::exp(*loss)));
      next_evaluation = done + 1.0 / options.evaluations;
    }
    const double rate = RateMultiplier(done);
    const absl::StatusOr<double> loss =
        trainer->Step(static_cast<float>(rate) * options.learning_rate, rate * options.head_learning_rate);
    if (!loss.ok()) return loss.status();
    ++result.steps;
    result.tokens += trainer->tokens_per_step();
    curve.Add(result.steps, *loss);
    if (on_step != nullptr) {
      if (absl::Status status = on_step(result.steps, *loss); !status.ok()) return status;
    }
    const double tokens_per_second =
        static_cast<double>(result.tokens) / absl::ToDoubleSeconds(clock.Elapsed());
    progress.Update({result.steps, curve.mean(), tokens_per_second, clock.Left(result.steps)});
  }
  progress.Clear();
  result.train = curve.Take();
  result.elapsed = clock.Elapsed();
  return result;
}

}  // namespace lossd::ngram_lm
