// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/plot.h"

#include <gtest/gtest.h>

#include "examples/ngram_lm/progress.h"

namespace lossd::ngram_lm::plot_test {
namespace {

TEST(RenderPlotTest, Golden) {
  PlotData data;
  data.curve = {{0, 9}, {50, 4}, {100, 3}};
  data.marks = {{0, 9}, {100, 3.5}};
  data.reference = 7;
  data.reference_label = "unigram";
  PlotOptions options;
  options.width = 24;
  options.height = 5;
  options.title = "loss";
  options.x_label = "step";
  EXPECT_EQ(RenderPlot(data, options),
            "          loss\n"
            "    9.00 ┤o⠢⣀\n"
            "         │⠄ ⠄⠑⠦⣀⠄ ⠄ ⠄ ⠄ ⠄ ⠄ ⠄ ⠄ ⠄  unigram\n"
            "    6.00 ┤      ⠑⠢⣀\n"
            "         │         ⠑⠢⣀\n"
            "    3.00 ┤            ⠉⠉⠒⠒⠒⠒⠤⠤⠤⠤⣀o\n"
            "         └────────────────────────\n"
            "          0        step        100\n");
}

TEST(RenderPlotTest, OnePointAndEqualValues) {
  PlotData data;
  data.curve = {{3, 2}};
  PlotOptions options;
  options.width = 10;
  options.height = 1;
  EXPECT_EQ(RenderPlot(data, options),
            "    3.00 ┤⡀\n"
            "         └──────────\n"
            "          3        4\n");
}

TEST(FormatProgressTest, Golden) {
  ProgressState state;
  state.step = 120;
  state.loss = 5.432;
  state.tokens_per_second = 9812.3;
  state.left = absl::Seconds(93.2);
  EXPECT_EQ(FormatProgress(state),
            "step   120   loss 5.432   perplexity   228.6     9812 tokens/s   1:34 left");
}

}  // namespace
}  // namespace lossd::ngram_lm::plot_test
