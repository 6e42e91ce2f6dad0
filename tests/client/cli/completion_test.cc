// SPDX-License-Identifier: Apache-2.0
// Tests of what lossctl knows about its own command line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/client/fake_server.h"
#include "tests/support/temp_folder.h"

// ---- Completion ----
// What lossctl says of unfinished and of misspelt words: the binary, against the fake server.

namespace lossd::cli::completion_test {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

class CompletionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    server_.AddHead("lm_head", 4, 10);
    server_.AddHead("lm_head.2", 4, 10);
    server_.AddHead("other", 4, 10);
  }

  // What a shell command prints, with lossctl on the path and the fake server as the default one.
  std::string Shell(const std::string& command) {
    const std::string out = folder_.File("out"), script = folder_.File("script");
    std::ofstream(script) << command << "\n";
    const std::string path = absl::StrCat("PATH=$(dirname " LOSSCTL_PATH "):$PATH");
    const int status = std::system(
        absl::StrCat(path, " LOSSD_SERVER=", server_.target(), " bash ", script, " >", out, " 2>&1").c_str());
    exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::ifstream file(out);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  bool Installed(const std::string& program) {
    Shell(absl::StrCat("command -v ", program));
    return exit_code_ == 0;
  }
  // The words, without descriptions, that may take the place of the last one.
  std::vector<std::string> Words(const std::string& words) {
    std::vector<std::string> found;
    for (absl::string_view line :
         absl::StrSplit(Shell("lossctl __complete " + words), '\n', absl::SkipEmpty())) {
      found.emplace_back(line.substr(0, line.find('\t')));
    }
    return found;
  }

  int exit_code_ = -1;
  test::TempFolder folder_;
  fake::FakeServer server_;
};

TEST_F(CompletionTest, Commands) {
  EXPECT_THAT(Words("''"), IsSupersetOf({"heads", "bench", "completion"}));
  EXPECT_THAT(Words("''"), Not(Contains(StartsWith("_"))));
  EXPECT_THAT(Words("be"), ElementsAre("bench"));
  EXPECT_THAT(Words("--json --server x:1 he"), UnorderedElementsAre("health", "heads"));
  EXPECT_THAT(Words("zzz"), IsEmpty());
}

TEST_F(CompletionTest, OptionsOfTheCommandAndTheGlobalOnes) {
  EXPECT_THAT(Words("bench lm_head --in-f"), ElementsAre("--in-flight"));
  EXPECT_THAT(Words("bench lm_head --"), IsSupersetOf({"--rows", "--json", "--server"}));
  EXPECT_THAT(Words("heads --"), Not(Contains("--rows")));
}

TEST_F(CompletionTest, ValuesOfOptions) {
  EXPECT_THAT(Words("bench lm_head --data ''"), UnorderedElementsAre("random", "real"));
  EXPECT_THAT(Words("create x --norm r"), ElementsAre("rmsnorm"));
  EXPECT_THAT(Words("--ca ''"), ElementsAre(":file"));
  EXPECT_THAT(Words("bench lm_head --rows ''"), IsEmpty());
}

TEST_F(CompletionTest, LiveViewsAndFormats) {
  EXPECT_THAT(Words("to"), ElementsAre("top"));
  EXPECT_THAT(Words("top --"),
              IsSupersetOf({"--sort", "--all", "--interval", "--count", "--context", "--color", "--output"}));
  EXPECT_THAT(Words("top --sort ''"), UnorderedElementsAre("bytes", "rows", "staging", "wait"));
  EXPECT_THAT(Words("watch --output ''"), UnorderedElementsAre("json", "table", "wide"));
  EXPECT_THAT(Words("heads --color n"), ElementsAre("never"));
  EXPECT_THAT(Words("context ''"), UnorderedElementsAre("add", "list", "remove", "show", "use"));
  EXPECT_THAT(Words("context add lab --token-file ''"), ElementsAre(":file"));
}

TEST_F(CompletionTest, HeadsOfTheServer) {
  EXPECT_THAT(Words("describe ''"), UnorderedElementsAre("lm_head", "lm_head.2", "other"));
  EXPECT_THAT(Words("bench --rows 4 lm"), Each(StartsWith("lm_head")));
  EXPECT_THAT(Words("bench --rows 4 lm"), Not(IsEmpty()));
  EXPECT_THAT(Words(absl::StrCat("--server ", server_.target(), " delete o")), ElementsAre("other"));
  EXPECT_THAT(Words("checkpoints ''"), UnorderedElementsAre("lm_head", "lm_head.2", "other", "rm"));
  EXPECT_THAT(Words("checkpoints rm ''"), UnorderedElementsAre("head/step-0000000007", "head/damaged"));
  EXPECT_THAT(Words("checkpoints rm head/damaged --yes head/s"), ElementsAre("head/step-0000000007"));
  EXPECT_THAT(Words("--server 127.0.0.1:1 delete o"), IsEmpty());  // nothing is there
  EXPECT_EQ(exit_code_, 0);
}

TEST_F(CompletionTest, BashCompletes) {
  const auto reply = [this](const std::string& words, int at) {
    return Shell(absl::StrCat("source <(lossctl completion bash)\nCOMP_WORDS=(", words, ")\nCOMP_CWORD=", at,
                              "\n_lossctl\nprintf '%s\\n' \"${COMPREPLY[@]}\""));
  };
  EXPECT_EQ(reply("lossctl de", 1), "describe\ndelete\n");
  EXPECT_EQ(reply("lossctl describe ''", 2), "lm_head\nlm_head.2\nother\n");
  EXPECT_THAT(reply(absl::StrCat("lossctl --ca ", folder_.path(), "/scr"), 2), HasSubstr("/script"));
  EXPECT_THAT(Shell("lossctl completion csh"),
              HasSubstr("SHELL must be one of bash, fish, zsh, got \"csh\""));
  EXPECT_EQ(exit_code_, 2);
}

// What is written is typed into an interactive zsh, with a tab behind it; then the line is printed.
TEST_F(CompletionTest, ZshCompletes) {
  if (!Installed("zsh")) GTEST_SKIP() << "zsh is not installed";
  const std::string typed = folder_.File("typed.zsh"), line = folder_.File("line");
  std::ofstream(typed) << R"(
zmodload zsh/zpty
zpty -b shell zsh -f -i
zpty -w shell "PS1=; autoload -Uz compinit; compinit -u -D; source <(lossctl completion zsh); PS1='is''ready> '"
zpty -r shell output '*isready> '
zpty -n -w shell "$1"$'\t'  # Tab completes; then Control-A and Control-E, begin and end of the line
zpty -n -w shell $'\x01print -r -- "\x05" >'"$2"$'; echo is\'\'done\n'
zpty -r shell output '*isdone*'
)";
  const auto after_tab = [&](const std::string& words) {
    const std::string said =
        Shell(absl::StrCat("cd ", folder_.path(), " && timeout 120 zsh -f ", typed, " '", words, "' ", line));
    EXPECT_EQ(exit_code_, 0) << said;
    std::ifstream file(line);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    std::filesystem::remove(line);
    return std::string(absl::StripAsciiWhitespace(text));
  };
  EXPECT_EQ(after_tab("lossctl descr"), "lossctl describe");
  EXPECT_EQ(after_tab("lossctl describe o"), "lossctl describe other");
  EXPECT_EQ(after_tab("lossctl describe l"), "lossctl describe lm_head");  // as far as two heads agree
  EXPECT_EQ(after_tab("lossctl top --sort wa"), "lossctl top --sort wait");
  EXPECT_EQ(after_tab("lossctl bench lm_head --in-f"), "lossctl bench lm_head --in-flight");
  EXPECT_EQ(after_tab("lossctl describe zzz"), "lossctl describe zzz");
  EXPECT_EQ(after_tab("lossctl --ca typ"), "lossctl --ca typed.zsh");
}

TEST_F(CompletionTest, FishCompletes) {
  if (!Installed("fish")) GTEST_SKIP() << "fish is not installed";
  const auto offered = [this](const std::string& words) {
    return Shell(absl::StrCat("cd ", folder_.path(), " && HOME=", folder_.path(),
                              " fish --no-config -c 'lossctl completion fish | source; complete -C \"", words,
                              "\"'"));
  };
  EXPECT_THAT(offered("lossctl descr"), MatchesRegex("describe\t[^\n]+\n"));
  EXPECT_EQ(offered("lossctl describe "), "lm_head\nlm_head.2\nother\n");
  EXPECT_EQ(offered("lossctl describe o"), "other\n");
  EXPECT_EQ(offered("lossctl top --sort wa"), "wait\n");
  EXPECT_THAT(offered("lossctl bench lm_head --in-f"), StartsWith("--in-flight\t"));
  EXPECT_EQ(offered("lossctl describe zzz"), "");
  EXPECT_EQ(offered("lossctl --ca scr"), "script\n");
}

TEST_F(CompletionTest, AMisspeltWord) {
  EXPECT_THAT(Shell("lossctl descirbe lm_head"), HasSubstr("Did you mean describe?"));
  EXPECT_EQ(exit_code_, 2);
  EXPECT_THAT(Shell("lossctl bench lm_head --chanels 3"), HasSubstr("Did you mean --channels?"));
  EXPECT_THAT(Shell("lossctl --timout=3 heads"), HasSubstr("Did you mean --timeout?"));
  EXPECT_THAT(Shell("lossctl create x --dtype fp32"), HasSubstr("Did you mean --compute-dtype?"));
  EXPECT_THAT(Shell("lossctl context ad"), HasSubstr("Did you mean add?"));
  EXPECT_THAT(Shell("lossctl xyzzy"), Not(HasSubstr("Did you mean")));
  EXPECT_THAT(Shell("lossctl bench lm_head --rows"), Not(HasSubstr("Did you mean")));  // a value is missing
}

}  // namespace
}  // namespace lossd::cli::completion_test
