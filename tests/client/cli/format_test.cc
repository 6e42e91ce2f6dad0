// SPDX-License-Identifier: Apache-2.0
#include "client/cli/format.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lossd::cli::format_test {
namespace {

TEST(FormatTest, NamesOfASeriesStayDifferent) {
  EXPECT_EQ(TruncatedName("short", 5), "short");
  EXPECT_EQ(TruncatedName("experiment-with-seed-17", 12), "experi…ed-17");
  EXPECT_EQ(TruncatedName("äöüäöüäöü", 5), "äö…öü");
  EXPECT_EQ(TruncatedName("abcdef", 2), "a…");
  EXPECT_EQ(TruncatedName("abcdef", 0), "");
}

TEST(FormatTest, Bytes) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1.00 KiB");
  EXPECT_EQ(HumanBytes(10.0 * 1024), "10.0 KiB");
  EXPECT_EQ(HumanBytes(1.5 * 1024 * 1024 * 1024), "1.50 GiB");
  EXPECT_EQ(HumanBytes(123.0 * 1024 * 1024), "123 MiB");
}

TEST(FormatTest, Counts) {
  EXPECT_EQ(HumanCount(0), "0");
  EXPECT_EQ(HumanCount(999), "999");
  EXPECT_EQ(HumanCount(1000), "1,000");
  EXPECT_EQ(HumanCount(1234567), "1,234,567");
  EXPECT_EQ(HumanCount(~uint64_t{0}), "18,446,744,073,709,551,615");
}

TEST(FormatTest, RatesAndTimes) {
  EXPECT_EQ(HumanRate(0), "0.00");
  EXPECT_EQ(HumanRate(12.34), "12.3");
  EXPECT_EQ(HumanRate(4560), "4.56 k");
  EXPECT_EQ(HumanRate(7.891e6), "7.89 M");
  EXPECT_EQ(HumanSeconds(0), "0 s");
  EXPECT_EQ(HumanSeconds(12.3e-6), "12.3 us");
  EXPECT_EQ(HumanSeconds(4.56e-3), "4.56 ms");
  EXPECT_EQ(HumanSeconds(59.94), "59.9 s");
  EXPECT_EQ(HumanSeconds(184), "3m 04s");
  EXPECT_EQ(HumanSeconds(7384), "2h 03m 04s");
  EXPECT_EQ(HumanSeconds(90061), "1d 01h 01m");
  EXPECT_EQ(HumanIncarnation(255), "00000000000000ff");
}

TEST(FormatTest, Sparklines) {
  EXPECT_EQ(Sparkline({}), "");
  EXPECT_EQ(Sparkline({0, 0}), "▁▁");
  EXPECT_EQ(Sparkline({0, 50, 100}), "▁▅█");
  EXPECT_EQ(DisplayWidth("▁▅█"), 3u);
  EXPECT_EQ(DisplayWidth("\033[1;31mred\033[0m"), 3u);
}

TEST(FormatTest, TablesAlign) {
  Table table({{"NAME"}, {"ROWS", Align::kRight}, {"NOTE"}});
  table.AddRow({"a", "1", "first"});
  table.AddRow({"longer", "1,000,000", ""});
  EXPECT_EQ(table.ToString(),
            "NAME         ROWS  NOTE\n"
            "a               1  first\n"
            "longer  1,000,000\n");
}

TEST(FormatTest, TrendlinesGoFromTheSmallestToTheLargest) {
  EXPECT_EQ(Trendline({}), "");
  EXPECT_EQ(Trendline({2.5, 2.5}), "▁▁");
  EXPECT_EQ(Trendline({2, std::nan(""), 3, 2.5}), "▁x█▅");
  EXPECT_EQ(Last({1, 2, 3}, 2).size(), 2u);
  EXPECT_EQ(Last({1, 2, 3}, 9).size(), 3u);
  EXPECT_EQ(Bar(0.5, 4), "██░░");
  EXPECT_EQ(Bar(7, 2), "██");
}

TEST(FormatTest, LinesAreCutToTheTerminal) {
  EXPECT_EQ(Truncated("short", 5), "short");
  EXPECT_EQ(Truncated("longer", 5), "long…");
  EXPECT_EQ(Truncated("▁▂▃▄", 3), "▁▂…");
  EXPECT_EQ(Truncated("\033[31mred\033[0m", 2), "\033[31mr…\033[0m");
  EXPECT_EQ(Truncated("x", 0), "");
  EXPECT_EQ(Printable("a\033[2Jb\nc\xc2\x9b"
                      "d ä"),
            "a?[2Jb?c?d ä");
  EXPECT_EQ(PrintableLines("a\nb\r"), "a\nb?");
}

TEST(FormatTest, ColumnsGoByRank) {
  Table table({{"NAME"}, {"FIRST", Align::kLeft, 2}, {"SECOND", Align::kLeft, 1}});
  table.AddRow({"a", "b", "c"});
  EXPECT_EQ(table.Width(), 19u);
  EXPECT_EQ(table.ToString({}, 19), "NAME  FIRST  SECOND\na     b      c\n");
  EXPECT_EQ(table.ToString({}, 18), "NAME  SECOND\na     c\n");
  EXPECT_EQ(table.ToString({}, 5), "NAME\na\n");
  EXPECT_EQ(table.ToString({}, 3), "NA…\na\n");
  EXPECT_EQ(table.ToString({.color = true}, 5), "\033[1mNAME\033[0m\na\n");
}

TEST(FormatTest, FieldsAlign) {
  FieldList fields;
  fields.Add("a", "1");
  fields.Add("much longer", "2");
  EXPECT_EQ(fields.ToString(),
            "a            1\n"
            "much longer  2\n");
}

}  // namespace
}  // namespace lossd::cli::format_test
