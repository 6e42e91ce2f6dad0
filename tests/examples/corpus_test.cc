// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/corpus.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace lossd::ngram_lm::corpus_test {
namespace {

TEST(StripPodTest, RemovesCommandsAndKeepsTheirText) {
  EXPECT_EQ(StripPod("=encoding utf8\n\n=head1 NAME\n\nperl - a language\n\n=over 4\n\n=item "
                     "*\n\nOne\n\n=back\n\n=cut\n"),
            "NAME\n\nperl - a language\n\n*\n\nOne\n\n");
}

TEST(StripPodTest, RemovesFormattingCodes) {
  EXPECT_EQ(StripPod("Use B<I<bold>> and C<< $x->y >> here."), "Use bold and $x->y here.\n\n");
  EXPECT_EQ(StripPod("See L<the manual|perlop/Quotes> and L<perlre>."), "See the manual and perlre.\n\n");
  EXPECT_EQ(StripPod("X<index entry>a E<lt> b E<gt> c E<0xE9>E<228>Z<>!"), "a < b > c \xC3\xA9\xC3\xA4!\n\n");
}

TEST(StripPodTest, KeepsVerbatimParagraphs) {
  EXPECT_EQ(StripPod("Text\n\n    print C<$x> if B<1;\n\nMore"),
            "Text\n\n    print C<$x> if B<1;\n\nMore\n\n");
}

TEST(StripPodTest, SkipsBlocksForOtherFormats) {
  EXPECT_EQ(StripPod("=begin html\n\n<b>no</b>\n\n=end html\n\nyes\n\n=for comment no\n\nalso"),
            "yes\n\nalso\n\n");
}

TEST(StripPodTest, SurvivesBrokenMarkup) {
  EXPECT_EQ(StripPod("C<never closed"), "never closed\n\n");
  EXPECT_EQ(StripPod("="), "");
  EXPECT_EQ(StripPod(""), "");
  EXPECT_EQ(StripPod("C<"), "");
}

TEST(SplitBlocksTest, KeepsEveryByteAndHoldsOutItsShare) {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "line " + std::to_string(i) + "\n";
  const TextSplit split = SplitBlocks({text}, 1000, 10);
  EXPECT_EQ(split.train.size() + split.held_out.size(), text.size());
  const double share = static_cast<double>(split.held_out.size()) / static_cast<double>(text.size());
  EXPECT_NEAR(share, 0.1, 0.01);
  EXPECT_EQ(split.train.back(), '\n');
  EXPECT_EQ(split.held_out.back(), '\n');
  EXPECT_EQ(split.held_out.substr(0, 5), "line ");
}

TEST(SplitBlocksTest, ShortTextIsAllTraining) {
  const TextSplit split = SplitBlocks({"one", "two"}, 100);
  EXPECT_EQ(split.train, "one\ntwo");
  EXPECT_EQ(split.held_out, "");
}

TEST(SplitBlocksTest, BlocksShrinkWithTheText) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += "a line of text\n";
  const TextSplit split = SplitBlocks({text});
  const double share = static_cast<double>(split.held_out.size()) / static_cast<double>(text.size());
  EXPECT_NEAR(share, 0.05, 0.02);
  EXPECT_TRUE(SplitBlocks({}).train.empty());
}

TEST(LoadTest, ReadsAFileAndReportsMissingOnes) {
  const std::string path = testing::TempDir() + "/corpus_test.pod";
  std::ofstream(path) << "=head1 A\n\nC<b>\n";
  const auto file = LoadFile(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*file, "=head1 A\n\nC<b>\n");
  const auto pages = LoadPerlManual(path);
  ASSERT_TRUE(pages.ok()) << pages.status();
  ASSERT_EQ(pages->size(), 1);
  EXPECT_EQ((*pages)[0], "A\n\nb\n\n");
  EXPECT_EQ(LoadFile(path + ".missing").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(LoadPerlManual(path + ".missing").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace lossd::ngram_lm::corpus_test
