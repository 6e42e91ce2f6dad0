// SPDX-License-Identifier: Apache-2.0
// How lossctl prints: documents, wide tables, colours. The commands' own words are lossctl_test.cc's.
#include <gmock/gmock.h>

#include "tests/client/cli/lossctl_fixture.h"

namespace lossd::cli::lossctl_output_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kEscape = '\033';

using LossctlOutputTest = LossctlTest;

// Every command that prints, with arguments that work on a new head, in an order that works.
const char* const kCommands[] = {"health",
                                 "server",
                                 "heads",
                                 "describe head",
                                 "create other --hidden 4 --vocab 10",
                                 "loss head --random 5 --accumulate",
                                 "grad-norm head",
                                 "step head --lr 0.1",
                                 "zero-grad head",
                                 "read head weight",
                                 "save head",
                                 "checkpoints",
                                 "checkpoints rm head/old --yes",
                                 "reset head --scope optimizer --yes",
                                 "bench head --microbatches 1 --rows 4",
                                 "watch --count 1",
                                 "top --count 1 --interval 0.05",
                                 "context list",
                                 "context show",
                                 "delete other --yes"};

TEST_F(LossctlOutputTest, EveryCommandPrintsYamlThatSaysWhatItsJsonSays) {
  if (std::system("python3 -c 'import yaml' 2>/dev/null") != 0) GTEST_SKIP() << "no python3-yaml";
  for (const char* command : kCommands) {
    SCOPED_TRACE(command);
    const Outcome outcome = Run(absl::StrCat("-o yaml ", command));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, Not(StartsWith("{")));
    std::ofstream(folder_.File("yaml")) << outcome.out;
    const std::string convert = absl::StrCat(
        "python3 -c 'import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))[0]))' <",
        folder_.File("yaml"), " >", folder_.File("json"));
    ASSERT_EQ(std::system(convert.c_str()), 0) << outcome.out;
    const auto yaml = nlohmann::json::parse(Read(folder_.File("json")));
    EXPECT_TRUE(yaml.is_object() || yaml.is_array()) << yaml;
  }
  const Outcome yaml = Run("-o yaml describe head");
  EXPECT_THAT(yaml.out, StartsWith("name: head\nhidden_size: 4\nvocab_size: 10\nbias: true\n"));
  EXPECT_THAT(yaml.out, HasSubstr("norm_epsilon: 1.0e-05\n"));
}

TEST_F(LossctlOutputTest, JsonIsTheSameByEitherOption) {
  for (const char* command : {"heads", "server", "describe head"}) {
    const Outcome json = Run(absl::StrCat("--json ", command));
    EXPECT_EQ(json.out, Run(absl::StrCat(command, " -o json")).out);
    EXPECT_EQ(json.out, Run(absl::StrCat(command, " --output=json")).out);
    EXPECT_FALSE(nlohmann::json::parse(json.out, nullptr, false).is_discarded());
  }
  EXPECT_EQ(Run("--json -o yaml heads").exit_code, 2);
  EXPECT_EQ(Run("-o xml heads").exit_code, 2);
}

TEST_F(LossctlOutputTest, WideTablesHaveMoreColumns) {
  const std::string usual = Run("heads").out, wide = Run("-o wide heads").out;
  EXPECT_EQ(Run("-o table heads").out, usual);
  EXPECT_THAT(usual, Not(HasSubstr("OPTIMIZER")));
  EXPECT_THAT(wide,
              HasSubstr("MEMORY  OPTIMIZER  LOGITS  GRADIENTS  UPDATES  RETAINED  CHUNK ROWS  INCARNATION"));
  EXPECT_THAT(Run("-o wide server").out, HasSubstr("\nHTTP "));
  EXPECT_THAT(Run("-o wide describe head").out, HasSubstr("\nweights version "));
}

TEST_F(LossctlOutputTest, ColoursAreForTerminalsAndForThoseWhoAsk) {
  EXPECT_THAT(Run("server").out, Not(HasSubstr(std::string(1, kEscape))));
  EXPECT_THAT(Run("--color=always server").out, HasSubstr("\033[32mserving\033[0m"));
  EXPECT_THAT(Run("--color=always describe none").err, StartsWith("\033[1;31mlossctl:\033[0m "));
  EXPECT_THAT(Run("describe none").err, StartsWith("lossctl: "));
  EXPECT_THAT(Run("--color=always --json heads").out, Not(HasSubstr(std::string(1, kEscape))));
  EXPECT_EQ(Run("--color=sometimes heads").exit_code, 2);
}

TEST_F(LossctlOutputTest, ATerminalHasColoursUnlessTheEnvironmentSaysNo) {
  if (std::system("script -qec true /dev/null >/dev/null 2>&1 </dev/null") != 0) {
    GTEST_SKIP() << "no script(1), or no pseudo-terminal";
  }
  const auto on_terminal = [this](const std::string& environment, const std::string& options) {
    const std::string command = absl::StrCat("env -u NO_COLOR ", environment, " " LOSSCTL_PATH " --server ",
                                             server_.target(), " ", options, " server");
    EXPECT_EQ(std::system(absl::StrCat("script -qec '", command, "' ", folder_.File("typescript"),
                                       " >/dev/null </dev/null")
                              .c_str()),
              0);
    return Read(folder_.File("typescript"));
  };
  const std::string escape = "\033[32mserving";
  EXPECT_THAT(on_terminal("TERM=xterm", ""), HasSubstr(escape));
  EXPECT_THAT(on_terminal("TERM=xterm NO_COLOR=1", ""), Not(HasSubstr(escape)));
  EXPECT_THAT(on_terminal("TERM=xterm NO_COLOR=", ""), HasSubstr(escape));
  EXPECT_THAT(on_terminal("TERM=dumb", ""), Not(HasSubstr(escape)));
  EXPECT_THAT(on_terminal("TERM=xterm", "--color=never"), Not(HasSubstr(escape)));
  EXPECT_THAT(on_terminal("TERM=dumb NO_COLOR=1", "--color=always"), HasSubstr(escape));
}

}  // namespace
}  // namespace lossd::cli::lossctl_output_test
