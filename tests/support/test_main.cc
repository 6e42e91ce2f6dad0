// SPDX-License-Identifier: Apache-2.0
// The main function of every test program.
//
//   server_rpc_tests [--source=NAME] [GoogleTest's flags]
//
// --source runs only the tests whose code is in the file NAME.cc: most entries of ctest are one file of a program. A name
// without tests is an error. With --gtest_filter, --source has no effect: the filter names the tests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>

namespace {

constexpr std::string_view kFlag = "--source=";

// GoogleTest's filter for the tests of the file; empty if there are none.
std::string FilterOf(std::string_view source) {
  std::string filter;
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(t);
      if (std::filesystem::path(test.file()).stem() != source) continue;
      if (!filter.empty()) filter += ':';
      filter.append(suite.name()).append(".").append(test.name());
    }
  }
  return filter;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (!argument.starts_with(kFlag)) {
      std::fprintf(stderr, "unknown argument '%s'\n", argv[i]);
      return 2;
    }
    const std::string filter = FilterOf(argument.substr(kFlag.size()));
    if (filter.empty()) {
      std::fprintf(stderr, "no test of this program is in '%s.cc'\n", argv[i] + kFlag.size());
      return 2;
    }
    if (GTEST_FLAG_GET(filter) == "*") GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
