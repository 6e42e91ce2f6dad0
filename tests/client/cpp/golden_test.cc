// SPDX-License-Identifier: Apache-2.0
// Every golden case of tests/client/golden, which the Python client runs too
// (tests/client/python/test_golden.py).
#include "tests/client/cpp/golden.h"

#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"

namespace lossd::client::golden::golden_test {
namespace {

using Run = void (*)(const json&);

const std::map<std::string, Run>& Runs() {
  static const std::map<std::string, Run> runs{
      {"plan", RunPlan},
      {"plan in a region", RunRegionPlan},
      {"sizes of regions", RunRegionSizes},
      {"wire", RunWire},
      {"decode", RunDecode},
      {"stream answers", RunStreamAnswers},
      {"tensor answers", RunTensorAnswers},
      {"statuses", RunStatuses},
      {"incarnations", RunIncarnations},
      {"waits", RunWaits},
      {"connections", RunConnections},
      {"repeats", RunRepeats},
      {"targets", RunTargets},
      {"listeners", RunListeners},
  };
  return runs;
}

// By name; all files of the folder but its README.
std::map<std::string, json> Files() {
  std::map<std::string, json> files;
  for (const auto& entry : std::filesystem::directory_iterator(LOSSD_GOLDEN_FOLDER)) {
    const std::string name = entry.path().filename();
    if (name != "README.md") files[name] = json::parse(std::ifstream(entry.path()));
  }
  return files;
}

struct Case {
  std::string kind;
  json content;

  // What a failing case shows of itself.
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.kind << ": " << c.content.dump(); }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const auto& [name, file] : Files()) {
    for (const json& c : file.at("cases")) cases.push_back({file.at("kind"), c});
  }
  return cases;
}

std::string TestName(const ::testing::TestParamInfo<Case>& info) {
  std::string name = absl::StrCat(info.param.kind, "_", info.param.content.at("name").get<std::string>());
  for (char& letter : name) {
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '_';
  }
  return absl::StrCat(name, "_", info.index);
}

TEST(GoldenFilesTest, EveryFileHasAKindOfItsOwnThatIsKnown) {
  std::multiset<std::string> found, known;
  for (const auto& [kind, run] : Runs()) known.insert(kind);
  for (const auto& [name, file] : Files()) {
    found.insert(file.at("kind").get<std::string>());
    EXPECT_EQ(file.size(), 2u) << name << ": members besides kind and cases";
    EXPECT_FALSE(file.at("cases").empty()) << name;
    std::set<std::string> names;
    for (const json& c : file.at("cases")) {
      EXPECT_TRUE(names.insert(c.at("name").get<std::string>()).second)
          << name << ": two cases " << c["name"];
    }
  }
  EXPECT_EQ(found, known);
}

class GoldenTest : public ::testing::TestWithParam<Case> {};

TEST_P(GoldenTest, Case) {
  const auto run = Runs().find(GetParam().kind);
  ASSERT_NE(run, Runs().end()) << "no test knows how to run cases of kind " << GetParam().kind;
  SCOPED_TRACE(GetParam().content.at("name"));
  try {
    run->second(GetParam().content);
  } catch (const std::exception& error) {
    FAIL() << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenTest, ::testing::ValuesIn(Cases()), TestName);

}  // namespace

}  // namespace lossd::client::golden::golden_test
