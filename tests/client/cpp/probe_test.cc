// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/probe.h"

#include <gtest/gtest.h>
#include <sys/un.h>

#include <csignal>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/client/cpp/listener.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_pki.h"

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
