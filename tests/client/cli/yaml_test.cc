// SPDX-License-Identifier: Apache-2.0
#include "client/cli/yaml.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace lossd::cli::yaml_test {
namespace {

using Json = nlohmann::ordered_json;

TEST(YamlTest, ObjectsAndListsAreIndented) {
  const Json document = {{"name", "lm"},
                         {"memory", {{"weights", 5}, {"none", Json::object()}}},
                         {"rows", {1, 2}},
                         {"heads", {{{"name", "a"}, {"step", 1}}, {{"name", "b"}, {"step", nullptr}}}},
                         {"nested", {{1, 2}, Json::array()}},
                         {"draining", false}};
  EXPECT_EQ(ToYaml(document),
            "name: lm\n"
            "memory:\n"
            "  weights: 5\n"
            "  none: {}\n"
            "rows:\n"
            "  - 1\n"
            "  - 2\n"
            "heads:\n"
            "  - name: a\n"
            "    step: 1\n"
            "  - name: b\n"
            "    step: null\n"
            "nested:\n"
            "  -\n"
            "    - 1\n"
            "    - 2\n"
            "  - []\n"
            "draining: false\n");
  EXPECT_EQ(ToYaml(Json::array()), "[]\n");
}

TEST(YamlTest, WhatAParserCouldTakeForSomethingElseIsQuoted) {
  for (const char* text : {"true",  "No",  "y",   "OFF",  "null", "~",    "",     " x",
                           "x ",    "-",   "- x", "a: b", "a #b", "123",  "1e3",  "0123456789abcdef",
                           "12:30", "{",   "[a]", "*x",   "&x",   "!x",   "%x",   "@x",
                           "`x",    "a,b", "'",   "\"",   "\n",   "x\ty", ".inf", "=",
                           "<<",    "?"}) {
    const std::string yaml = ToYaml(text);
    EXPECT_EQ(yaml.front(), '"') << text;
    EXPECT_EQ(Json::parse(yaml), Json(text)) << text;
  }
  for (const char* text : {"lm_head", "fp32", "a/b-c.d", "AMD EPYC (2 cores)", "nothing"}) {
    EXPECT_EQ(ToYaml(text), std::string(text) + "\n");
  }
  EXPECT_EQ(ToYaml("a\x7f"
                   "b\u0085"),
            "\"a\\x7fb\\x85\"\n");
  EXPECT_EQ(ToYaml({{"no", 1}, {"a b", 2}}), "\"no\": 1\na b: 2\n");
}

TEST(YamlTest, NumbersStayNumbersInOldParsers) {
  EXPECT_EQ(ToYaml(1e-5), "1.0e-05\n");
  EXPECT_EQ(ToYaml(1.5e300), "1.5e+300\n");
  EXPECT_EQ(ToYaml(0.25), "0.25\n");
  EXPECT_EQ(ToYaml(18446744073709551615u), "18446744073709551615\n");
}

}  // namespace
}  // namespace lossd::cli::yaml_test
