// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/credentials.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "client/cpp/client.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_pki.h"

namespace lossd::client::credentials_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Error(const CredentialOptions& options) {
  const auto credentials = Credentials::Create(options);
  EXPECT_EQ(credentials.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(credentials.status().message());
}

TEST(CredentialsTest, OptionsThatDoNotGoTogether) {
  EXPECT_THAT(Error({.ca = "a", .cert = "b", .key = "", .token = ""}), HasSubstr("options.credentials.key"));
  EXPECT_THAT(Error({.ca = "a", .cert = "", .key = "b", .token = ""}), HasSubstr("options.credentials.cert"));
  EXPECT_THAT(Error({.ca = "", .cert = "a", .key = "b", .token = ""}), HasSubstr("LOSSD_CA"));
  const std::string token = Error({.ca = "", .cert = "", .key = "", .token = "secret secret"});
  EXPECT_THAT(token, HasSubstr("options.credentials.token"));
  EXPECT_THAT(token, Not(HasSubstr("secret")));
}

TEST(CredentialsTest, FilesThatCannotBeRead) {
  test::TempFolder folder;
  test::WriteWholeFile(folder.File("empty"), "");
  for (const std::string& path : {folder.File("none"), folder.File("empty"), folder.path()}) {
    EXPECT_THAT(Error({.ca = path, .cert = "", .key = "", .token = ""}), HasSubstr(path));
  }
}

TEST(CredentialsTest, FilesThatAreSomethingElse) {
  const test::TestPki pki;
  test::WriteWholeFile(pki.File("text"), "no certificate\n");
  const std::string ca = pki.Certificate("ca"), text = pki.File("text");
  EXPECT_EQ(Error({.ca = text, .cert = "", .key = "", .token = ""}),
            "options.credentials.ca is \"" + text + "\", which has no certificate");
  EXPECT_THAT(Error({.ca = ca, .cert = text, .key = pki.Key("server"), .token = ""}),
              HasSubstr("options.credentials.cert is \"" + text + "\", which has no certificate"));
  EXPECT_THAT(Error({.ca = ca, .cert = pki.Certificate("server"), .key = text, .token = ""}),
              HasSubstr("options.credentials.key is \"" + text + "\", which has no private key"));
  EXPECT_THAT(Error({.ca = ca, .cert = pki.Certificate("server"), .key = pki.Key("ca"), .token = ""}),
              HasSubstr("which is not that of the certificate"));
  EXPECT_TRUE(Credentials::Create(
                  {.ca = ca, .cert = pki.Certificate("server"), .key = pki.Key("server"), .token = ""})
                  .ok());
}

TEST(CredentialsTest, ATokenStaysOnThisMachineWithoutTls) {
  for (const char* target : {"127.0.0.1:1", "127.3.2.1:1", "localhost:1", "[::1]:1", "dns:///localhost:1",
                             "ipv4:127.0.0.1:1", "unix:/run/lossd"}) {
    EXPECT_TRUE(IsLocalTarget(target)) << target;
  }
  const auto credentials = Credentials::Create({.ca = "", .cert = "", .key = "", .token = "a-token"});
  ASSERT_TRUE(credentials.ok());
  for (const char* target : {"10.0.0.1:1", "example.com:1", "127.0.0.1.example.com:1", "[::2]:1",
                             "dns:///x:1", "ipv4:127.0.0.1:1,10.0.0.1:1", "xds:///localhost:1", ""}) {
    EXPECT_FALSE(IsLocalTarget(target)) << target;
    if (*target == '\0') continue;
    const auto client = Client::Connect({.target = target, .credentials = *credentials});
    EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument) << target;
    EXPECT_THAT(std::string(client.status().message()), HasSubstr("unencrypted"));
  }
}

TEST(CredentialsTest, TheEnvironment) {
  setenv("LOSSD_CA", "/a", 1);
  setenv("LOSSD_TOKEN", " a-token\n", 1);
  setenv("LOSSD_SERVER", "host:1", 1);
  EXPECT_EQ(Credentials::OptionsFromEnvironment().ca, "/a");
  EXPECT_EQ(Credentials::OptionsFromEnvironment().token, "a-token");
  EXPECT_EQ(ClientOptions().target, "host:1");
  EXPECT_THAT(std::string(Credentials::FromEnvironment().status().message()), HasSubstr("/a"));
  for (const char* name : {"LOSSD_CA", "LOSSD_TOKEN", "LOSSD_SERVER"}) unsetenv(name);
  EXPECT_EQ(ClientOptions().target, "127.0.0.1:7070");
  EXPECT_TRUE(Credentials::FromEnvironment().ok());
}

}  // namespace
}  // namespace lossd::client::credentials_test
