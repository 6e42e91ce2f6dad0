// SPDX-License-Identifier: Apache-2.0
// Tests of probe.h without a network, and of credentials (client_options.h).
#include "client/cpp/probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/un.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cpp/client.h"
#include "client/cpp/client_options.h"
#include "tests/client/cpp/listener.h"
#include "tests/support/temp_folder.h"

// ---- Probe ----

namespace lossd::client::internal::probe_test {
namespace {

constexpr absl::string_view kSettings("\0\0\0\x04\0\0\0\0\0", 9);

Found Heard(absl::string_view words, const TlsFiles& files = {}) {
  const Listener listener{std::string(words)};
  return Probe(listener.target(), files).found;
}

TEST(ProbeTest, KnowsHttp2ByItsSettings) {
  const test::TestPki pki;
  const TlsFiles files{.ca = test::ReadWholeFile(pki.Certificate("ca")), .cert = "", .key = ""};
  EXPECT_EQ(Heard(kSettings), Found::kUnknown) << "nothing is wrong with it";
  EXPECT_EQ(Heard(kSettings, files), Found::kHttp2);
  EXPECT_EQ(Heard(kSettings.substr(0, 8)), Found::kClosed);
  for (const size_t wrong : {0, 3, 5, 8}) {  // length, type, stream
    std::string frame(kSettings);
    frame[wrong] = 7;
    EXPECT_EQ(Heard(frame, files), Found::kOther) << wrong;
  }
}

TEST(ProbeTest, KnowsNothingOfAddressesThatAreNotOneHost) {
  for (const char* target : {"", "nowhere", "xds:///lossd", "ipv4:127.0.0.1:1,127.0.0.1:2"}) {
    EXPECT_FALSE(CanProbe(target)) << target;
    EXPECT_EQ(Probe(target, {}).found, Found::kUnknown) << target;
  }
}

TEST(ProbeTest, NamesThatHaveNoAddress) {
  const Finding finding = Probe("no-such-host.invalid:7070", {});
  EXPECT_EQ(finding.found, Found::kNoHost);
  EXPECT_NE(finding.why, "");
  EXPECT_EQ(Probe(absl::StrCat(std::string(300, 'a'), ":7070"), {}).found, Found::kNoHost);
}

TEST(ProbeTest, UnixSockets) {
  const test::TempFolder folder;
  const std::string path = folder.File("socket");
  EXPECT_EQ(Probe("unix:" + path, {}).found, Found::kUnreachable);
  EXPECT_EQ(Probe("unix:" + path, {}).why, "No such file or directory");
  EXPECT_EQ(Probe("unix:/" + std::string(200, 'a'), {}).why, "File name too long");
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.copy(address.sun_path, sizeof(address.sun_path) - 1), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(Probe("unix:" + path, {}).found, Found::kRefused) << "nobody listens yet";
  ASSERT_EQ(listen(listener, 4), 0);
  EXPECT_EQ(Probe("unix:" + path, {}).found, Found::kUnknown);
  close(listener);
  EXPECT_EQ(Probe("unix:" + path, {}).found, Found::kRefused);
}

// The connection is gone while the probe speaks, which ends programs that take SIGPIPE as it comes.
TEST(ProbeTest, APeerThatGoesDuringTheHandshake) {
  std::signal(SIGPIPE, SIG_DFL);
  const Listener hangs_up("");
  for (int i = 0; i < 20; ++i) EXPECT_EQ(Probe(hangs_up.target(), {}).found, Found::kClosed);
}

}  // namespace
}  // namespace lossd::client::internal::probe_test

// ---- Credentials ----

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
