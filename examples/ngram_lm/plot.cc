// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/plot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::ngram_lm {
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

}  // namespace lossd::ngram_lm
