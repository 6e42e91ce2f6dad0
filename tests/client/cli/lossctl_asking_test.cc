// SPDX-License-Identifier: Apache-2.0
// Commands that throw something away: they ask on a terminal, and want --yes in scripts.
#include <gmock/gmock.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/str_split.h"
#include "tests/client/cli/lossctl_fixture.h"

namespace lossd::cli::lossctl_asking_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class LossctlAskingTest : public LossctlTest {
 protected:
  // The same on a terminal, where somebody types `answer`. What stands on the terminal is `out`.
  Outcome RunOnTerminal(const std::string& arguments, const std::string& answer) {
    int terminal = -1;
    const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
    if (child == 0) {
      setenv("LOSSD_SERVER", server_.target().c_str(), 1);
      std::vector<std::string> words = absl::StrSplit(absl::StrCat(LOSSCTL_PATH " ", arguments), ' ');
      std::vector<char*> argv;
      for (std::string& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      execv(argv[0], argv.data());
      _exit(127);
    }
    Outcome outcome;
    bool answered = false;
    char buffer[4096];
    for (ssize_t count = 0; (count = read(terminal, buffer, sizeof(buffer))) > 0;) {
      outcome.out.append(buffer, static_cast<size_t>(count));
      if (!answered && outcome.out.find("[y/N] ") != std::string::npos) {
        answered = true;
        EXPECT_EQ(write(terminal, answer.data(), answer.size()), static_cast<ssize_t>(answer.size()));
      }
    }
    int status = 0;
    waitpid(child, &status, 0);
    close(terminal);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return outcome;
  }
  bool HeadIsThere() { return Run("describe head").exit_code == 0; }
};

TEST_F(LossctlAskingTest, ScriptsNeedYes) {
  std::ofstream(folder_.File("yes")) << "y\n";
  for (const char* arguments : {"delete head", "reset head --scope all", "reset head --scope=optimizer",
                                "checkpoints rm head/old", "checkpoints rm head/old head/older"}) {
    const Outcome outcome = Run(absl::StrCat(arguments, " </dev/null"));
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("--yes"), HasSubstr("stdin is no terminal"))) << arguments;
    EXPECT_EQ(Run(absl::StrCat("--json ", arguments, " </dev/null")).exit_code, 2);
    EXPECT_EQ(Run(absl::StrCat(arguments, " <yes")).exit_code, 2) << "what a file says is no answer";
  }
  EXPECT_TRUE(HeadIsThere());
  EXPECT_EQ(server_.deletions(), 0u);
  EXPECT_EQ(Run("checkpoints rm head/old --yes </dev/null").out, "removed head/old (3.00 MiB)\n");
  EXPECT_EQ(Run("delete head -y </dev/null").out, "deleted head \"head\"\n");
  EXPECT_FALSE(HeadIsThere());
  EXPECT_EQ(Run("delete head --yes </dev/null").exit_code, 4);
}

TEST_F(LossctlAskingTest, TerminalsAreAsked) {
  for (const char* answer : {"n\n", "\n", "yess\n", "\x04", "Y es\n"}) {
    const Outcome outcome = RunOnTerminal("delete head", answer);
    EXPECT_EQ(outcome.exit_code, 1) << answer;
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("head \"head\" is at step 0: no checkpoint known. Delete it? [y/N]"),
                      HasSubstr("not deleted")));
    EXPECT_TRUE(HeadIsThere()) << answer;
  }
  ASSERT_EQ(Run("step head --lr 0.1").exit_code, 0);
  ASSERT_EQ(Run("loss head --random 5 --accumulate").exit_code, 0);
  EXPECT_THAT(RunOnTerminal("delete head", "n\n").out,
              HasSubstr("at step 1: no checkpoint known, and 5 rows in the open"));
  const Outcome missing = RunOnTerminal("delete nothing", "y\n");
  EXPECT_EQ(missing.exit_code, 4);
  EXPECT_THAT(missing.out, Not(HasSubstr("[y/N]")));
  EXPECT_EQ(RunOnTerminal("delete head", " YES \n").exit_code, 0);
  EXPECT_FALSE(HeadIsThere());
}

TEST_F(LossctlAskingTest, SaysHowManyStepsAreLost) {
  ASSERT_EQ(Run("save head --name best").exit_code, 0);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Run("step head --lr 0.1").exit_code, 0);
  EXPECT_THAT(RunOnTerminal("delete head", "n\n").out,
              HasSubstr("at step 3: 3 steps since checkpoint head/best. Delete"));
  EXPECT_THAT(RunOnTerminal("load head/best", "n\n").out,
              HasSubstr("at step 3: 3 steps since checkpoint head/best. Load head/best over it?"));
  EXPECT_EQ(Run("load head/best </dev/null").exit_code, 0);
  EXPECT_THAT(RunOnTerminal("reset head --scope=all", "n\n").out, HasSubstr("Reset all of it? [y/N]"));
  EXPECT_THAT(RunOnTerminal("reset head --scope=optimizer", "n\n").out,
              AllOf(HasSubstr("has made 3 updates. Reset its optimizer?"), HasSubstr("not reset")));
  ASSERT_EQ(Run("save head --name last").exit_code, 0);
  EXPECT_EQ(RunOnTerminal("load head/last", "").exit_code, 0) << "nothing is lost, so nothing is asked";
}

TEST_F(LossctlAskingTest, RemovesCheckpoints) {
  EXPECT_THAT(RunOnTerminal("checkpoints rm head/a head/b", "n\n").out,
              AllOf(HasSubstr("Remove 2 checkpoints: head/a, head/b? [y/N]"), HasSubstr("not removed")));
  EXPECT_EQ(server_.deletions(), 0u);
  EXPECT_EQ(RunOnTerminal("checkpoints rm head/a", "y\n").exit_code, 0);
  EXPECT_EQ(server_.deletions(), 1u);
  // The rest goes on.
  const Outcome some = Run("checkpoints rm --yes head/b head/missing head/c head/b");
  EXPECT_EQ(some.exit_code, 4);
  EXPECT_EQ(some.out, "removed head/b (3.00 MiB)\nremoved head/c (3.00 MiB)\n");
  EXPECT_THAT(some.err, HasSubstr("no such checkpoint"));
  EXPECT_EQ(server_.deletions(), 3u);
  const auto json = Json("checkpoints rm head/d --yes");
  EXPECT_EQ(json["removed"][0]["checkpoint"], "head/d");
  EXPECT_EQ(json["removed"][0]["bytes"], 3 << 20);
  EXPECT_EQ(Run("checkpoints rm --yes").exit_code, 2);
  EXPECT_EQ(Run("checkpoints rm head --yes").exit_code, 2);
  // Lists as before.
  EXPECT_THAT(Run("checkpoints head").out, HasSubstr("head/step-0000000007"));
  EXPECT_EQ(Run("checkpoints head other").exit_code, 2);
}

TEST_F(LossctlAskingTest, ResetsHeads) {
  ASSERT_EQ(Run("step head --lr 0.1").exit_code, 0);
  EXPECT_EQ(Run("reset head --scope=optimizer --yes").out, "reset the optimizer of head \"head\", step 1\n");
  EXPECT_EQ(Json("reset head --scope=all --yes")["step"], 0);
  for (const char* arguments :
       {"reset head --yes", "reset head --scope=some --yes", "reset --scope=all --yes",
        "reset head --scope=optimizer --zeros --yes", "reset head --scope=optimizer --seed 0 --yes",
        "reset head --scope=all --zeros --seed 1 --yes"}) {
    EXPECT_EQ(Run(arguments).exit_code, 2) << arguments;
  }
  EXPECT_EQ(Run("reset nothing --scope=all --yes").exit_code, 4);
}

TEST_F(LossctlAskingTest, CreateSaysWhatHappensToAHeadThatExists) {
  ASSERT_EQ(Run("create other --hidden 3 --vocab 5").exit_code, 0);
  ASSERT_EQ(Run("step other --lr 0.1").exit_code, 0);
  EXPECT_EQ(Run("create other --hidden 3 --vocab 5").exit_code, 4);
  EXPECT_EQ(Run("create other --hidden 3 --vocab 5 --if-exists=error").exit_code, 4);
  EXPECT_EQ(Json("create other --hidden 3 --vocab 5 --if-exists=keep")["step"], 1);
  const Outcome different = Run("create other --hidden 4 --vocab 5 --bias --norm rmsnorm --if-exists=keep");
  EXPECT_EQ(different.exit_code, 4);
  EXPECT_THAT(different.err,
              AllOf(HasSubstr("hidden_size 3 instead of 4"), HasSubstr("bias false instead of true"),
                    HasSubstr("norm NORM_NONE instead of NORM_RMSNORM")));
  EXPECT_EQ(Run("create other --hidden 4 --vocab 5 --if-exists=reset").exit_code, 4);
  EXPECT_EQ(Json("describe other")["step"], 1);
  EXPECT_EQ(Json("create other --hidden 3 --vocab 5 --if-exists=reset")["step"], 0);
  EXPECT_EQ(Json("create another --hidden 3 --vocab 5 --if-exists=reset")["step"], 0);
  EXPECT_EQ(Run("create other --hidden 3 --vocab 5 --if-exists=maybe").exit_code, 2);
  EXPECT_EQ(Run("create other --hidden 3 --vocab 5 --if-exists=keep --dry-run").exit_code, 2);
}

}  // namespace
}  // namespace lossd::cli::lossctl_asking_test
