// SPDX-License-Identifier: Apache-2.0
// `lossctl context`, and which server and credentials a command uses.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>

#include "tests/client/cli/lossctl_fixture.h"

namespace lossd::cli::lossctl_contexts_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class LossctlContextsTest : public LossctlTest {
 protected:
  // Without LOSSD_SERVER; `environment` like "LOSSD_TOKEN=x".
  Outcome Lossctl(const std::string& arguments, const std::string& environment = "") {
    const std::string out = folder_.File("out"), err = folder_.File("err");
    const std::string command =
        absl::StrCat("cd ", folder_.path(), " && env -u LOSSD_SERVER -u LOSSD_CONTEXT LOSSD_CONFIG=", File(),
                     " ", environment, " " LOSSCTL_PATH " ", arguments, " >", out, " 2>", err);
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, Read(out), Read(err)};
  }
  nlohmann::json Show(const std::string& options, const std::string& environment = "") {
    const Outcome outcome = Lossctl(options + " --json context show", environment);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out, nullptr, false);
  }
  static std::string Normal(const std::string& path) {
    return std::filesystem::path(path).lexically_normal();
  }
  std::string File() const { return folder_.File("config/contexts.json"); }
  void Add(const std::string& name, const std::string& options) {
    const Outcome outcome = Lossctl(absl::StrCat("context add ", name, " ", options));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  }
  void WriteToken(int mode) {
    std::ofstream(folder_.File("token")) << "0123456789abcdef\n";
    ASSERT_EQ(chmod(folder_.File("token").c_str(), static_cast<mode_t>(mode)), 0);
  }
};

TEST_F(LossctlContextsTest, ContextsAreAddedListedUsedAndRemoved) {
  EXPECT_THAT(Lossctl("context list").out, HasSubstr("no contexts in "));
  WriteToken(0600);
  Add("lab", "--server gpu-7:7070 --http gpu-7:7171 --token-file token");
  Add("here", absl::StrCat("--server ", server_.target(), " --use"));
  EXPECT_EQ(Lossctl("context list").out,
            absl::StrCat("CURRENT  NAME  SERVER", std::string(server_.target().size() - 6, ' '),
                         "  TLS  SHOWS\n*        here  ", server_.target(),
                         "  no   none\n         lab   gpu-7:7070",
                         std::string(server_.target().size() - 10, ' '), "  no   token\n"));
  EXPECT_THAT(Lossctl("context list -o wide").out, HasSubstr(Normal(folder_.File("token"))));
  const auto list = nlohmann::json::parse(Lossctl("context list -o json").out);
  EXPECT_EQ(list["current"], "here");
  EXPECT_EQ(list["contexts"][1]["token_file"], Normal(folder_.File("token"))) << "paths are absolute";
  EXPECT_EQ(Lossctl("health").out, absl::StrCat(server_.target(), ": serving\n"));
  EXPECT_EQ(Lossctl("context use lab").out, "using context \"lab\"\n");
  EXPECT_EQ(Show("")["server"], "gpu-7:7070");
  EXPECT_EQ(Lossctl("context remove lab").exit_code, 0);
  EXPECT_EQ(Show("")["server"], "127.0.0.1:7070") << "none is the current one";
  EXPECT_EQ(Lossctl("context use here").exit_code, 0);
  EXPECT_EQ(Lossctl("context use --none").exit_code, 0);
  EXPECT_EQ(Show("")["context"], "");
  struct stat file = {};
  ASSERT_EQ(stat(File().c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, 0600);
}

TEST_F(LossctlContextsTest, MistakesChangeNothing) {
  Add("lab", "--server gpu-7:7070");
  const std::string before = Read(File());
  for (const auto& [arguments, says] :
       {std::pair("context add lab --server x:1", "already, for gpu-7:7070; --replace"),
        {"context add other", "--server must be given"},
        {"context add other --server foo", "--server is 'foo'; it has no port"},
        {"context add .x --server x:1", "context must have 1 to 64 characters"},
        {"context add other --server http://x", "write the address without"},
        {"context add other --server x:1 --ca none.pem", "none.pem"},
        {"context add other --server x:1 --cert a", "is not given"},
        {"context add other --server x:1 --token-file none", "none cannot be read"},
        {"context use other", "there is no context \"other\""},
        {"context remove other", "there is no context \"other\""}}) {
    const Outcome outcome = Lossctl(arguments);
    EXPECT_EQ(outcome.exit_code, 4) << arguments << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(says)) << arguments;
    EXPECT_EQ(Read(File()), before) << arguments;
  }
  EXPECT_EQ(Lossctl("context use").exit_code, 2);
  EXPECT_EQ(Lossctl("context").exit_code, 2);
  EXPECT_EQ(Lossctl("--context lab --server x:1 health").exit_code, 2);
  EXPECT_EQ(Lossctl("context add lab --server x:1 --replace").exit_code, 0);
  EXPECT_EQ(Show("--context lab")["server"], "x:1");
}

TEST_F(LossctlContextsTest, FlagsGoBeforeTheEnvironmentAndThatBeforeContexts) {
  Add("lab", "--server lab:1 --use");
  Add("other", "--server other:1");
  EXPECT_EQ(Show("")["server"], "lab:1");
  EXPECT_EQ(Show("", "LOSSD_CONTEXT=other")["server"], "other:1");
  EXPECT_EQ(Show("", "LOSSD_CONTEXT=other LOSSD_SERVER=environment:1")["server"], "environment:1");
  EXPECT_EQ(Show("--context lab", "LOSSD_CONTEXT=other LOSSD_SERVER=environment:1")["server"], "lab:1");
  EXPECT_EQ(Show("--server flag:1", "LOSSD_CONTEXT=other LOSSD_SERVER=environment:1")["server"], "flag:1");
  EXPECT_EQ(Show("--context lab")["context"], "lab");
  EXPECT_EQ(Show("--server flag:1")["context"], "");
  const Outcome unknown = Lossctl("--context none health");
  EXPECT_EQ(unknown.exit_code, 4);
  EXPECT_THAT(unknown.err, HasSubstr("there is no context \"none\" in " + File() + "; it has lab, other"));
}

TEST_F(LossctlContextsTest, CredentialsGoToTheirOwnServerOnly) {
  std::filesystem::create_directories(folder_.File("config"));
  std::ofstream(File()) << R"({"current": "lab", "contexts": {"lab": {"server": "lab:1", "ca": "ca.pem",
      "cert": "me.pem", "key": "me.key", "token_file": "../token"}}})";
  WriteToken(0600);
  const auto lab = Show("");
  EXPECT_EQ(lab["ca"], folder_.File("config/ca.pem")) << "relative to the file";
  EXPECT_EQ(lab["cert"], folder_.File("config/me.pem"));
  EXPECT_EQ(lab["token"], true);
  for (const auto& other : {Show("--server other:1"), Show("", "LOSSD_SERVER=other:1")}) {
    EXPECT_EQ(other["ca"], "");
    EXPECT_EQ(other["cert"], "");
    EXPECT_EQ(other["token"], false);
  }
  const auto mixed = Show("--ca flag.pem", "LOSSD_CA=variable.pem LOSSD_CERT=c LOSSD_KEY=k");
  EXPECT_EQ(mixed["ca"], "flag.pem");
  EXPECT_EQ(mixed["cert"], "c");
  EXPECT_EQ(mixed["key"], "k");
  EXPECT_EQ(mixed["server"], "lab:1");
}

TEST_F(LossctlContextsTest, ATokenThatOthersCanReadIsRefused) {
  WriteToken(0600);
  Add("here", absl::StrCat("--server ", server_.target(), " --token-file token --use"));
  EXPECT_EQ(Lossctl("health").exit_code, 0);
  WriteToken(0644);
  const Outcome refused = Lossctl("health");
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_THAT(refused.err, HasSubstr("token has the mode 0644, so others can read it; `chmod 600 "));
  EXPECT_THAT(refused.err, Not(HasSubstr("0123456789abcdef")));
  EXPECT_EQ(Lossctl("health", "LOSSD_TOKEN=fedcba9876543210").exit_code, 0) << "the file is not needed";
  EXPECT_EQ(Lossctl("context list").exit_code, 0);
}

TEST_F(LossctlContextsTest, AFileThatIsNotInOrderIsNamedWithItsLine) {
  std::filesystem::create_directories(folder_.File("config"));
  std::ofstream(File()) << "{\"contexts\": {\n  \"lab\": {\n    \"sever\": \"x:1\"}}}";
  const Outcome outcome = Lossctl("health");
  EXPECT_EQ(outcome.exit_code, 4);
  EXPECT_THAT(outcome.err, HasSubstr(File() + ":3: contexts.lab.sever must be one of server, ca"));
  EXPECT_EQ(Lossctl("--server 127.0.0.1:1 health").exit_code, 3)
      << "a command that does not need it does not read it";
}

TEST_F(LossctlContextsTest, NamesAreCompleted) {
  Add("lab", "--server gpu-7:7070");
  Add("lob", "--server gpu-8:7070");
  EXPECT_EQ(Lossctl("__complete --context l").out, "lab\nlob\n");
  EXPECT_EQ(Lossctl("__complete context use la").out, "lab\n");
  EXPECT_THAT(Lossctl("__complete context ''").out, HasSubstr("remove\t"));
  EXPECT_THAT(Lossctl("__complete -o ''").out, ::testing::AllOf(HasSubstr("yaml"), HasSubstr("wide")));
  EXPECT_THAT(Lossctl("context remov lab").err, HasSubstr("Did you mean remove?"));
}

}  // namespace
}  // namespace lossd::cli::lossctl_contexts_test
