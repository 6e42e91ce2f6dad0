// SPDX-License-Identifier: Apache-2.0
// The HTTP port of the linked lossd program with TLS and with tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "client/cli/http.h"
#include "tests/server/app/security_fixture.h"
#include "tests/support/raw_http.h"

namespace lossd::http_security_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class HttpSecurityTest : public SecurityFixture {
 protected:
  static absl::StatusOr<std::string> Get(const test::ServerProcess& server, const char* path,
                                         const client::CredentialOptions& credentials) {
    return cli::HttpFetch(absl::StrCat("https://", server.http()), path, credentials, absl::Seconds(60));
  }
  static std::string Raw(const test::ServerProcess& server, const char* path, const std::string& field) {
    return Ask(server, "GET", path, field);
  }
  static std::string Post(const test::ServerProcess& server, const char* path, const std::string& field) {
    return Ask(server, "POST", path, field);
  }
  static std::string Ask(const test::ServerProcess& server, const char* method, const char* path,
                         const std::string& field) {
    return test::HttpExchange(
        server.http(), absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: localhost\r\n", field, "\r\n"));
  }
};

TEST_F(HttpSecurityTest, Https) {
  const auto server = Serve(With(TlsFlags(), {"--http=127.0.0.1:0", "--http_tls"}));
  EXPECT_EQ(*Get(*server, "/livez", Token("")), "ok\n");
  EXPECT_THAT(*Get(*server, "/metrics", Token("")), HasSubstr("lossd_build_info"));
  client::CredentialOptions other = Token("");
  other.ca = pki_.Certificate("other-ca");
  EXPECT_EQ(Get(*server, "/livez", other).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(test::HttpGet(server->http(), "/livez"), "");  // plain: hung up on
  // The certificate is replaced.
  pki_.Issue("new-server", "DNS:localhost,IP:127.0.0.1", "other-ca");
  std::filesystem::rename(pki_.Certificate("new-server"), pki_.Certificate("server"));
  std::filesystem::rename(pki_.Key("new-server"), pki_.Key("server"));
  bool taken = false;
  for (const absl::Time limit = absl::Now() + absl::Minutes(2); !taken && absl::Now() < limit;) {
    taken = Get(*server, "/livez", other).ok();
  }
  EXPECT_TRUE(taken);
  EXPECT_TRUE(server->Running());
}

TEST_F(HttpSecurityTest, Tls12AndLater) {
  const auto server = Serve(With(TlsFlags(), {"--http=127.0.0.1:0", "--http_tls"}));
  const auto connects = [&](const std::string& version) {
    const std::string command = absl::StrCat(
        "(sleep 1) | timeout 20 openssl s_client -connect ", server->http(), " -CAfile ",
        pki_.Certificate("ca"), " -cipher ALL@SECLEVEL=0 ", version, " >", pki_.File("s_client"), " 2>&1");
    (void)std::system(command.c_str());
    const std::string said = test::ReadWholeFile(pki_.File("s_client"));
    // A handshake that failed before there was a certificate to verify has "ok", and no cipher.
    return absl::StrContains(said, "Verify return code: 0 (ok)") &&
           !absl::StrContains(said, "Cipher is (NONE)");
  };
  EXPECT_FALSE(connects("-tls1"));
  EXPECT_FALSE(connects("-tls1_1"));
  EXPECT_TRUE(connects("-tls1_2"));
  EXPECT_TRUE(connects("-tls1_3"));
}

TEST_F(HttpSecurityTest, HalfOpenHandshakesDoNotKeepAScrapeOut) {
  const auto server = Serve(With(TlsFlags(), {"--http=127.0.0.1:0", "--http_tls"}));
  std::vector<test::RawHttp> idle;
  for (int i = 0; i < 300; ++i) {
    idle.emplace_back(server->http());
    idle.back().Send(i % 2 == 0 ? absl::string_view() : absl::string_view("\x16\x03\x01\x02\x00\x01", 6));
  }
  EXPECT_EQ(*Get(*server, "/livez", Token("")), "ok\n");
}

TEST_F(HttpSecurityTest, AServerThatAsksTracesForKnownOperatorsOnly) {
  const auto server = Serve({TokenFlag(), "--http=127.0.0.1:0"});  // tokens count for gRPC only
  EXPECT_EQ(test::HttpStatus(Raw(*server, "/metrics", "")), 200);
  const std::string admin = absl::StrCat("Authorization: Bearer ", kAdminToken, "\r\n");
  for (const std::string& who : {std::string(), admin}) {
    const std::string answer = Post(*server, "/trace", who);
    EXPECT_EQ(test::HttpStatus(answer), 403);
    EXPECT_THAT(answer, HasSubstr("--http_token"));
  }
}

// Without tokens everything on the machine may record a trace, but not every web page that its users look at.
TEST_F(HttpSecurityTest, PagesOfOtherSitesRecordNoTraces) {
  const auto server = Serve({"--http=127.0.0.1:0"});
  for (const char* path : {"/trace?seconds=30", "/trace.json?recording=1"}) {
    for (const char* field :
         {"Sec-Fetch-Site: cross-site\r\n", "sec-fetch-site: same-site\r\nOrigin: http://localhost\r\n",
          "Origin: https://example.com\r\n", "Origin: null\r\n",
          "Origin: https://example.com\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n"}) {
      const std::string answer = Post(*server, path, field);
      EXPECT_EQ(test::HttpStatus(answer), 403) << path << " " << field;
      EXPECT_THAT(answer, HasSubstr("is not for pages of other web sites"));
    }
    // What an image, a link or a script of such a page asks for.
    EXPECT_EQ(test::HttpStatus(Raw(*server, path, "")), 405);
    EXPECT_THAT(Raw(*server, path, "Sec-Fetch-Site: cross-site\r\n"), HasSubstr("Allow: POST\r\n"));
  }
  EXPECT_THAT(Post(*server, "/trace?seconds=0.05", ""), HasSubstr("{\"recording\":1,")) << "the first one";
}

TEST_F(HttpSecurityTest, TokensForWhatIsNotHealth) {
  const auto server = Serve({TokenFlag(), "--http=127.0.0.1:0", "--http_token", "--log_level=info"});
  for (const char* path : {"/livez", "/readyz", "/healthz"})
    EXPECT_EQ(test::HttpStatus(Raw(*server, path, "")), 200) << path;
  for (const char* path : {"/", "/metrics", "/history.json", "/events.json", "/page/page.js"}) {
    const std::string right = absl::StrCat("Authorization: Bearer ", kReaderToken, "\r\n");
    EXPECT_EQ(test::HttpStatus(Raw(*server, path, right)), 200);
    for (const std::string& wrong :
         {std::string(), std::string("Authorization: Bearer x\r\n"), std::string("Authorization:\r\n"),
          absl::StrCat("Authorization: Basic ", kReaderToken, "\r\n"), right + right}) {
      const std::string answer = Raw(*server, path, wrong);
      EXPECT_EQ(test::HttpStatus(answer), 401) << wrong;
      EXPECT_THAT(answer, HasSubstr("WWW-Authenticate: Bearer"));
      EXPECT_THAT(answer, Not(HasSubstr("lossd_build_info")));
    }
  }
  const std::string reader = absl::StrCat("Authorization: Bearer ", kReaderToken, "\r\n");
  for (const char* path : {"/trace", "/trace.json"}) {  // for operators
    EXPECT_EQ(test::HttpStatus(Post(*server, path, "")), 401) << path;
    const std::string answer = Post(*server, path, reader);
    EXPECT_EQ(test::HttpStatus(answer), 403) << path;
    EXPECT_THAT(answer, HasSubstr("needs the role admin"));
    const std::string admin = absl::StrCat("Authorization: Bearer ", kAdminToken, "\r\n");
    EXPECT_THAT(test::HttpStatus(Post(*server, path, admin)), ::testing::AnyOf(400, 404))
        << "it lacks a parameter";
  }
  EXPECT_EQ(test::HttpStatus(Raw(*server, "/none", "")), 404);
  EXPECT_THAT(server->log(), HasSubstr("audit identity=unknown address=127.0.0.1 method=HTTP"));
  EXPECT_THAT(server->log(), Not(HasSubstr(kReaderToken)));
}

}  // namespace
}  // namespace lossd::http_security_test
