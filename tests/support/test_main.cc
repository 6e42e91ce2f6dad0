// SPDX-License-Identifier: Apache-2.0
// The main function of every test program.
//
//   rpc_tests [--source=NAME] [GoogleTest's flags]
//   rpc_tests --list-sources
//
// --source runs only the tests whose code is in the file NAME.cc, and of these the ones that --gtest_filter
// names: most entries of ctest are one file of a program. No such test is an error. --list-sources prints the
// names of all files that have tests.
#include <fnmatch.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <string_view>

namespace {

constexpr std::string_view kSource = "--source=";

void ForEachTest(const std::function<void(const std::string& name, const std::string& source)>& visit) {
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(t);
      visit(std::string(suite.name()) + "." + test.name(), std::filesystem::path(test.file()).stem());
    }
  }
}

// Whether one of the patterns, which ':' separates, has the name.
bool Matches(const std::string& name, std::string_view patterns) {
  while (!patterns.empty()) {
    const size_t end = patterns.find(':');
    if (fnmatch(std::string(patterns.substr(0, end)).c_str(), name.c_str(), FNM_NOESCAPE) == 0) return true;
    patterns = end == std::string_view::npos ? "" : patterns.substr(end + 1);
  }
  return false;
}

// GoogleTest's filter for what both the file and the filter have; empty if nothing is left.
std::string FilterOf(std::string_view source, const std::string& filter) {
  const size_t minus = filter.find('-');
  const std::string wanted = minus == 0 ? "*" : filter.substr(0, minus);
  const std::string unwanted = minus == std::string::npos ? "" : filter.substr(minus + 1);
  std::string found;
  ForEachTest([&](const std::string& name, const std::string& file) {
    if (file != source || !Matches(name, wanted) || Matches(name, unwanted)) return;
    found.append(found.empty() ? "" : ":").append(name);
  });
  return found;
}

void ListSources() {
  std::set<std::string> sources;
  ForEachTest([&](const std::string&, const std::string& file) { sources.insert(file); });
  for (const std::string& source : sources) std::printf("%s\n", source.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--list-sources") {
      ListSources();
      return 0;
    }
    if (!argument.starts_with(kSource)) {
      std::fprintf(stderr, "unknown argument '%s'\n", argv[i]);
      return 2;
    }
    const std::string filter = FilterOf(argument.substr(kSource.size()), GTEST_FLAG_GET(filter));
    if (filter.empty()) {
      std::fprintf(stderr, "no test of '%s.cc' matches\n", argv[i] + kSource.size());
      return 2;
    }
    GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
