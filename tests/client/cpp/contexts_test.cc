// SPDX-License-Identifier: Apache-2.0
// Tests of named servers: their file, which contexts.json has cases of, and the server that a program means.
#include "client/cpp/contexts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/errors/field_error.h"
#include "tests/support/temp_folder.h"

namespace lossd::client::contexts_test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

Contexts FromJson(const json& wanted) {
  Contexts contexts{.current = wanted["current"]};
  for (const auto& [name, server] : wanted["contexts"].items()) {
    contexts.by_name[name] = {.server = server.value("server", ""),
                              .ca = server.value("ca", ""),
                              .cert = server.value("cert", ""),
                              .key = server.value("key", ""),
                              .token_file = server.value("token_file", ""),
                              .http = server.value("http", "")};
  }
  return contexts;
}

TEST(ContextsTest, FilesAreReadAsTheCasesSay) {
  std::ifstream file(LOSSD_CONTEXT_CASES);
  const json cases = json::parse(file)["cases"];
  ASSERT_GT(cases.size(), 20u);
  for (const json& each : cases) {
    SCOPED_TRACE(each["name"].get<std::string>());
    const auto contexts = ParseContexts(each["file"].get<std::string>(), "/f/contexts.json");
    if (each.contains("gives")) {
      ASSERT_TRUE(contexts.ok()) << contexts.status();
      EXPECT_EQ(*contexts, FromJson(each["gives"]));
      continue;
    }
    std::string says = absl::StrReplaceAll(each["fails"].get<std::string>(), {{"FILE", "/f/contexts.json"}});
    if (each.contains("line")) says = absl::StrCat("/f/contexts.json:", each["line"].get<int>(), ": ", says);
    EXPECT_TRUE(absl::IsInvalidArgument(contexts.status()));
    EXPECT_TRUE(absl::StartsWith(contexts.status().message(), says)) << contexts.status() << "\n" << says;
  }
}

TEST(ContextsTest, AnErrorNamesItsField) {
  const auto contexts = ParseContexts(R"({"contexts": {"lab": {"sever": "a:1"}}})", "f");
  const auto violation = errors::GetFieldViolation(contexts.status());
  ASSERT_TRUE(violation.has_value());
  EXPECT_EQ(violation->field, "contexts.lab.sever");
}

class ContextsFileTest : public ::testing::Test {
 protected:
  static absl::Status Add(const std::string& path, const std::string& name, const NamedServer& server) {
    return ChangeContexts(path, [&](Contexts* contexts) {
      contexts->by_name[name] = server;
      return absl::OkStatus();
    });
  }
  void Write(const std::string& name, const std::string& content, int mode) {
    std::ofstream(folder_.File(name)) << content;
    ASSERT_EQ(chmod(folder_.File(name).c_str(), static_cast<mode_t>(mode)), 0);
  }
  static int ModeOf(const std::string& path) {
    struct stat file = {};
    EXPECT_EQ(stat(path.c_str(), &file), 0) << path;
    return file.st_mode & 07777;
  }

  test::TempFolder folder_;
};

TEST_F(ContextsFileTest, AFileIsMadeForItsOwnerAloneAndReadBack) {
  const std::string path = folder_.File("a/b/contexts.json");
  EXPECT_EQ(*ReadContexts(path), Contexts());
  const NamedServer lab{.server = "gpu-7:7070", .ca = "/ca.pem", .http = "https://gpu-7:7071"};
  ASSERT_TRUE(Add(path, "lab", lab).ok());
  ASSERT_TRUE(Add(path, "here", {.server = "unix:/run/x"}).ok());
  EXPECT_EQ(ModeOf(path), 0600);
  EXPECT_EQ(ModeOf(folder_.File("a/b")), 0700);
  const auto contexts = ReadContexts(path);
  ASSERT_TRUE(contexts.ok()) << contexts.status();
  EXPECT_EQ(contexts->by_name.at("lab"), lab);
  EXPECT_EQ(contexts->by_name.size(), 2u);
  for (const auto& entry : std::filesystem::directory_iterator(folder_.File("a/b"))) {
    EXPECT_EQ(entry.path().filename(), "contexts.json") << "left over";
  }
}

TEST_F(ContextsFileTest, WhatCannotBeReadIsNotWritten) {
  const std::string path = folder_.File("contexts.json");
  ASSERT_TRUE(Add(path, "lab", {.server = "gpu-7:7070"}).ok());
  EXPECT_FALSE(Add(path, "no server", {.server = "x:1"}).ok());
  EXPECT_FALSE(Add(path, "bad", {.server = "http://x"}).ok());
  EXPECT_EQ(ChangeContexts(path, [](Contexts*) { return absl::AbortedError("no"); }).code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(ReadContexts(path)->by_name.size(), 1u);
  Write("contexts.json", "{", 0600);
  EXPECT_FALSE(Add(path, "lab", {.server = "gpu-7:7070"}).ok())
      << "a file that is not in order is not replaced";
}

TEST_F(ContextsFileTest, ChangesAtTheSameTimeAllCount) {
  const std::string path = folder_.File("contexts.json");
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] { EXPECT_TRUE(Add(path, absl::StrCat("c", i), {.server = "x:1"}).ok()); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ReadContexts(path)->by_name.size(), 8u);
}

TEST_F(ContextsFileTest, ALinkStaysALink) {
  Write("real.json", "{}", 0600);
  std::filesystem::create_symlink(folder_.File("real.json"), folder_.File("contexts.json"));
  ASSERT_TRUE(Add(folder_.File("contexts.json"), "lab", {.server = "x:1"}).ok());
  EXPECT_TRUE(std::filesystem::is_symlink(folder_.File("contexts.json")));
  EXPECT_EQ(ReadContexts(folder_.File("real.json"))->by_name.size(), 1u);
}

TEST_F(ContextsFileTest, AFileThatOthersMayChangeIsRefused) {
  Write("contexts.json", "{}", 0666);
  const auto contexts = ReadContexts(folder_.File("contexts.json"));
  EXPECT_TRUE(absl::IsPermissionDenied(contexts.status()));
  EXPECT_THAT(std::string(contexts.status().message()),
              HasSubstr("has the mode 0666, so others can change it; `chmod 600"));
}

TEST_F(ContextsFileTest, ATokenIsReadFromAFileThatNobodyElseMayRead) {
  Write("token", "0123456789abcdef\n", 0600);
  EXPECT_EQ(*ReadTokenFile(folder_.File("token")), "0123456789abcdef");
  for (const int mode : {0644, 0604, 0660}) {
    Write("token", "0123456789abcdef\n", mode);
    const auto token = ReadTokenFile(folder_.File("token"));
    EXPECT_TRUE(absl::IsPermissionDenied(token.status())) << mode;
    EXPECT_THAT(std::string(token.status().message()), HasSubstr("so others can read it"));
  }
  for (const char* content : {"", "two words", "zwölf", "one\ntwo"}) {
    Write("token", content, 0600);
    const auto token = ReadTokenFile(folder_.File("token"));
    EXPECT_TRUE(absl::IsInvalidArgument(token.status())) << content;
    if (*content == '\0') continue;
    EXPECT_THAT(std::string(token.status().message()), Not(HasSubstr(content)));
  }
  Write("token", std::string(2000, 'x'), 0600);
  EXPECT_TRUE(absl::IsInvalidArgument(ReadTokenFile(folder_.File("token")).status()));
  EXPECT_TRUE(absl::IsNotFound(ReadTokenFile(folder_.File("none")).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadTokenFile(folder_.path()).status())) << "a folder";
}

TEST(ContextsPathTest, PathsAreRelativeToTheFile) {
  EXPECT_EQ(PathBeside("/f/contexts.json", "ca.pem"), "/f/ca.pem");
  EXPECT_EQ(PathBeside("/f/contexts.json", "/ca.pem"), "/ca.pem");
  EXPECT_EQ(PathBeside("contexts.json", "ca.pem"), "ca.pem");
  EXPECT_EQ(PathBeside("/f/contexts.json", ""), "");
}

// ---- Which server is meant ----

class ChooseServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kVariables) ::unsetenv(name);
    ::setenv("LOSSD_CONFIG", folder_.File("contexts.json").c_str(), 1);
    std::ofstream(folder_.File("token")) << "0123456789abcdef\n";
    ASSERT_EQ(chmod(folder_.File("token").c_str(), 0600), 0);
    std::ofstream(folder_.File("contexts.json")) << R"({"current": "lab", "contexts": {
        "lab": {"server": "lab:1", "ca": "ca.pem", "cert": "me.pem", "key": "/k/me.key", "token_file": "token"},
        "other": {"server": "other:1", "http": "other:2"}}})";
  }
  void TearDown() override {
    for (const char* name : kVariables) ::unsetenv(name);
  }
  static ChosenServer Chosen(const ServerArguments& arguments,
                             CurrentContext current = CurrentContext::kIsIgnored) {
    const auto chosen = ChooseServer(arguments, current);
    EXPECT_TRUE(chosen.ok()) << chosen.status();
    return chosen.value_or(ChosenServer());
  }

  static constexpr const char* kVariables[] = {"LOSSD_CONFIG", "LOSSD_SERVER", "LOSSD_CONTEXT", "LOSSD_CA",
                                               "LOSSD_CERT",   "LOSSD_KEY",    "LOSSD_TOKEN"};
  test::TempFolder folder_;
};

TEST_F(ChooseServerTest, ArgumentsGoBeforeTheEnvironmentAndThatBeforeContexts) {
  EXPECT_EQ(Chosen({}).server, "127.0.0.1:7070");
  EXPECT_EQ(Chosen({}, CurrentContext::kCounts).server, "lab:1");
  ::setenv("LOSSD_CONTEXT", "other", 1);
  EXPECT_EQ(Chosen({}).server, "other:1");
  EXPECT_EQ(Chosen({}).http, "other:2");
  ::setenv("LOSSD_SERVER", "environment:1", 1);
  EXPECT_EQ(Chosen({}, CurrentContext::kCounts).server, "environment:1");
  EXPECT_EQ(Chosen({.context = "lab"}).server, "lab:1");
  EXPECT_EQ(Chosen({.server = "argument:1"}).server, "argument:1");
  const absl::Status both =
      ChooseServer({.server = "a:1", .context = "lab"}, CurrentContext::kCounts).status();
  EXPECT_EQ(both.message(), "options.target is 'a:1' and the context is 'lab'; give one of them");
  ::setenv("LOSSD_SERVER", "http://a:1", 1);
  const absl::Status url = ChooseServer({}, CurrentContext::kIsIgnored).status();
  EXPECT_THAT(std::string(url.message()),
              HasSubstr("options.target is 'http://a:1' (from LOSSD_SERVER); write"));
}

TEST_F(ChooseServerTest, CredentialsOfAContextGoToItsServerOnly) {
  const ChosenServer lab = Chosen({.context = "lab"});
  EXPECT_EQ(lab.context, "lab");
  EXPECT_EQ(lab.credentials.ca, folder_.File("ca.pem"));
  EXPECT_EQ(lab.credentials.cert, folder_.File("me.pem"));
  EXPECT_EQ(lab.credentials.key, "/k/me.key");
  EXPECT_EQ(lab.credentials.token, "0123456789abcdef");
  for (const char* variable : {"LOSSD_CA", "LOSSD_CERT", "LOSSD_TOKEN"}) ::setenv(variable, " variable ", 1);
  const client::CredentialOptions mixed = Chosen({.context = "lab", .ca = ""}).credentials;
  EXPECT_EQ(mixed.ca, "") << "none is wanted";
  EXPECT_EQ(mixed.cert, " variable ");
  EXPECT_EQ(mixed.key, "") << "a certificate and its key come from one place";
  EXPECT_EQ(mixed.token, "variable");
  EXPECT_EQ(Chosen({.context = "lab", .token = "argument\n"}).credentials.token, "argument");
  for (const char* variable : {"LOSSD_CA", "LOSSD_CERT", "LOSSD_TOKEN"}) ::unsetenv(variable);
  const client::CredentialOptions none = Chosen({.server = "a:1"}).credentials;
  EXPECT_EQ(none.ca + none.cert + none.key + none.token, "");
}

TEST_F(ChooseServerTest, ATokenIsReadIfItIsNeeded) {
  ASSERT_EQ(chmod(folder_.File("token").c_str(), 0644), 0);
  EXPECT_TRUE(
      absl::IsPermissionDenied(ChooseServer({.context = "lab"}, CurrentContext::kIsIgnored).status()));
  EXPECT_EQ(Chosen({.context = "lab", .token = "given"}).credentials.token, "given");
  const absl::Status unknown = ChooseServer({.context = "lob"}, CurrentContext::kIsIgnored).status();
  EXPECT_THAT(
      std::string(unknown.message()),
      HasSubstr("there is no context \"lob\" in " + folder_.File("contexts.json") + "; it has lab, other"));
}

}  // namespace
}  // namespace lossd::client::contexts_test
