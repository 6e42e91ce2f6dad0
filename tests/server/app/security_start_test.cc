// SPDX-License-Identifier: Apache-2.0
// What lossd refuses to start with, and what it starts with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/app/security_fixture.h"

namespace lossd::security_start_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class SecurityStartTest : public SecurityFixture {
 protected:
  // What lossd says when it ends with status 2.
  std::string Refuses(const std::vector<std::string>& flags) {
    const std::string errors = pki_.File("errors");
    std::filesystem::remove(errors);
    test::ChildProcess lossd(
        With({LOSSD_BINARY, "--listen=127.0.0.1:0", "--http=", "--threads=1", "--backend=cpu",
              absl::StrCat("--checkpoint_dir=", pki_.File("checkpoints"))},
             flags),
        errors);
    EXPECT_EQ(lossd.WaitFor(absl::Minutes(2)), 2) << ::testing::PrintToString(flags);
    return test::ReadWholeFile(errors);
  }
};

TEST_F(SecurityStartTest, BeyondTheLoopbackOnlyWithTlsAndIdentityOrInsecure) {
  EXPECT_THAT(Refuses({"--listen=0.0.0.0:0"}), HasSubstr("--insecure"));
  EXPECT_THAT(Refuses({"--http=0.0.0.0:0"}), HasSubstr("--insecure"));
  EXPECT_THAT(Refuses(With(TlsFlags(), {"--listen=0.0.0.0:0"})), HasSubstr("say who they are"));
  EXPECT_THAT(Refuses({"--listen=0.0.0.0:0", TokenFlag()}), HasSubstr("without encryption"));
  EXPECT_THAT(Refuses({"--listen=0.0.0.0:0", TokenFlag(), "--insecure"}), HasSubstr("without encryption"));
  EXPECT_THAT(Refuses({"--http=0.0.0.0:0", "--http_token", TokenFlag(), "--insecure"}),
              HasSubstr("without encryption"));
  for (const auto& flags :
       {With(MutualTlsFlags(), {"--listen=0.0.0.0:0", "--http=0.0.0.0:0", "--http_tls"}),
        With(TlsFlags(), {"--listen=0.0.0.0:0", TokenFlag()}),
        std::vector<std::string>{"--listen=0.0.0.0:0", "--http=0.0.0.0:0", "--insecure"}}) {
    const auto server = Serve(flags);
    EXPECT_TRUE(server->Running());
  }
}

// Whoever runs the image opens it to others by flags of their own.
TEST_F(SecurityStartTest, TheContainersOwnFlagsStayOnTheLoopback) {
  const std::string text = test::ReadWholeFile(LOSSD_DOCKERFILE);
  const size_t begin = text.rfind("\nCMD [");
  ASSERT_NE(begin, std::string::npos);
  const size_t list = begin + 5;
  std::vector<std::string> flags = nlohmann::json::parse(text.substr(list, text.find('\n', list) - list));
  EXPECT_FALSE(flags.empty());
  flags.push_back(absl::StrCat("--checkpoint_dir=", pki_.File("checkpoints")));
  const auto server = Serve(flags);
  EXPECT_THAT(server->target(), StartsWith("127.0.0.1:"));
  EXPECT_EQ(server->http(), "") << "ServerProcess asks for none, and the container's flags come after that";
}

TEST_F(SecurityStartTest, AUnixSocketNeedsNoTls) {
  const std::string target = absl::StrCat("unix:", pki_.File("socket"));
  const auto server = Serve({absl::StrCat("--listen=", target), TokenFlag()});
  EXPECT_EQ(server->target(), target);
  EXPECT_TRUE(Try(target, {.ca = "", .cert = "", .key = "", .token = kReaderToken}).ok());
  EXPECT_EQ(Try(target, {}).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(Refuses({"--http=unix:/tmp/x"}), HasSubstr("http"));
}

TEST_F(SecurityStartTest, FlagsThatNeedEachOther) {
  const std::string cert = absl::StrCat("--tls_cert=", pki_.Certificate("server"));
  const std::string key = absl::StrCat("--tls_key=", pki_.Key("server"));
  const std::string ca = absl::StrCat("--tls_client_ca=", pki_.Certificate("ca"));
  const std::string roles = absl::StrCat("--role_file=", pki_.File("roles"));
  EXPECT_THAT(Refuses({cert}), HasSubstr("tls_key"));
  EXPECT_THAT(Refuses({key}), HasSubstr("tls_cert"));
  EXPECT_THAT(Refuses({cert, key, ca}), HasSubstr("role_file"));
  EXPECT_THAT(Refuses({cert, key, roles}), HasSubstr("tls_client_ca"));
  EXPECT_THAT(Refuses({ca, roles}), HasSubstr("tls_cert"));
  EXPECT_THAT(Refuses({"--http_tls"}), HasSubstr("tls_cert"));
  EXPECT_THAT(Refuses({"--http_token"}), HasSubstr("token_file"));
}

TEST_F(SecurityStartTest, FilesThatAreNotInOrder) {
  const auto with = [&](const std::string& flag, const std::string& path) {
    return Refuses(With(With(MutualTlsFlags(), {TokenFlag()}), {absl::StrCat("--", flag, "=", path)}));
  };
  const std::string empty = pki_.Secret("empty", "");
  for (const char* flag : {"tls_cert", "tls_key", "tls_client_ca", "role_file", "token_file"}) {
    for (const std::string& path : {empty, pki_.File("none"), pki_.File("")}) {
      const std::string said = with(flag, path);
      EXPECT_THAT(said, HasSubstr(flag)) << path;
      EXPECT_THAT(said, HasSubstr(path));
    }
  }
  for (const auto& [flag, path] :
       {std::pair("tls_key", pki_.Key("server")), {"token_file", pki_.File("tokens")}}) {
    std::filesystem::permissions(path, std::filesystem::perms::others_read,
                                 std::filesystem::perm_options::add);
    EXPECT_THAT(with(flag, path), HasSubstr("chmod 600"));
    std::filesystem::permissions(path, std::filesystem::perms::others_read,
                                 std::filesystem::perm_options::remove);
  }
}

}  // namespace
}  // namespace lossd::security_start_test
