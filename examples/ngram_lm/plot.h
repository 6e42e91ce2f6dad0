// SPDX-License-Identifier: Apache-2.0
// Curves in a terminal, drawn with braille characters (two by four dots each).
#ifndef LOSSD_EXAMPLES_NGRAM_LM_PLOT_H_
#define LOSSD_EXAMPLES_NGRAM_LM_PLOT_H_

#include <string>
#include <vector>

namespace lossd::ngram_lm {

struct Point {
  double x = 0;
  double y = 0;
};

struct PlotOptions {
  int width = 64;   // characters, without axis and labels
  int height = 14;  // lines, without axis and labels
  std::string title;
  std::string x_label;
};

struct PlotData {
  std::vector<Point> curve;  // joined by lines; at least one point
  std::vector<Point> marks;  // single points, drawn as 'o'
  double reference = 0;      // a dotted level, drawn if reference_label is not empty
  std::string reference_label;
};

// The plot as UTF-8 lines, each ending with a newline. All coordinates must be finite. Thread-safe.
std::string RenderPlot(const PlotData& data, const PlotOptions& options);

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_PLOT_H_
