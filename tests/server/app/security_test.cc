// SPDX-License-Identifier: Apache-2.0
// The linked lossd program with TLS, client certificates, tokens and roles, as clients see it; its HTTP port
// with them; what it refuses to start with; and who may call each method of the protocol.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "client/cli/http.h"
#include "server/rpc/access_control.h"
#include "tests/server/app/security_fixture.h"
#include "tests/support/raw_http.h"

namespace lossd::security_test {
namespace {

using access::Role;
using client::CredentialOptions;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

int64_t CountOf(const std::string& what, const std::string& text) {
  int64_t count = 0;
  for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; ++at) ++count;
  return count;
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

class SecurityTest : public SecurityFixture {
 protected:
  // Whether the line comes while a client connects again and again, which is what has the server look at its
  // files.
  static bool Logs(test::ServerProcess& server, const std::string& text, const CredentialOptions& options) {
    for (const absl::Time limit = absl::Now() + absl::Minutes(2); absl::Now() < limit;) {
      if (server.log().find(text) != std::string::npos) return true;
      EXPECT_TRUE(Try(server.target(), options).ok());
    }
    return false;
  }
};

TEST_F(SecurityTest, ClientsAreKnownByTheirCertificates) {
  const auto server = Serve(MutualTlsFlags());
  EXPECT_TRUE(Try(server->target(), Certificate("operator")).ok());
  EXPECT_TRUE(Try(server->target(), Certificate("trainer-1")).ok());

  const absl::Status none =
      Try(server->target(), {.ca = pki_.Certificate("ca"), .cert = "", .key = "", .token = ""});
  EXPECT_EQ(none.code(), absl::StatusCode::kUnauthenticated) << none;
  EXPECT_THAT(Text(none), AllOf(HasSubstr(server->target()), HasSubstr("LOSSD_CERT")));

  CredentialOptions impostor = Certificate("impostor");
  const absl::Status other = Try(server->target(), impostor);
  EXPECT_EQ(other.code(), absl::StatusCode::kUnauthenticated) << other;
  EXPECT_THAT(Text(other), HasSubstr(impostor.cert));

  const absl::Status stranger = Try(server->target(), Certificate("stranger"));
  EXPECT_EQ(stranger.code(), absl::StatusCode::kPermissionDenied) << stranger;
  EXPECT_THAT(Text(stranger),
              HasSubstr("ListHeads needs the role reader; dns:stranger has no role on this server"));
  const auto probe = Connect(server->target(), Certificate("stranger"));
  ASSERT_TRUE(probe.ok()) << probe.status();
  EXPECT_EQ(*(*probe)->monitoring().CheckHealth(), client::Health::kServing) << "anyone may ask";
}

TEST_F(SecurityTest, RolesBoundWhatAClientMayDo) {
  const auto server = Serve(With(MutualTlsFlags(), {TokenFlag()}));
  const auto trainer = Connect(server->target(), Certificate("trainer-1"));
  const auto admin = Connect(server->target(), Certificate("operator"));
  const auto reader = Connect(server->target(), Token(kReaderToken));
  ASSERT_TRUE(trainer.ok() && admin.ok() && reader.ok());
  const absl::Status low = (*trainer)->CreateHead(SmallHead("h")).status();
  EXPECT_EQ(low.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Text(low),
            "CreateHead needs the role admin; uri:spiffe://test/trainer has the role trainer on this server");
  ASSERT_TRUE((*admin)->CreateHead(SmallHead("h")).ok());
  EXPECT_TRUE((*trainer)->ReadTensor("h", v1::PARAM_WEIGHT).ok());
  EXPECT_TRUE((*reader)->DescribeHead("h").ok());
  EXPECT_EQ((*reader)->ReadTensor("h", v1::PARAM_WEIGHT).status().code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ((*trainer)->DeleteHead("h").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE((*admin)->DeleteHead("h").ok());
}

TEST_F(SecurityTest, TokensOverTlsAndOverTheLoopback) {
  for (const bool tls : {true, false}) {
    const auto server = Serve(With(tls ? TlsFlags() : std::vector<std::string>(), {TokenFlag()}));
    const auto credentials = [&](const std::string& token) {
      return tls ? Token(token) : CredentialOptions{.ca = "", .cert = "", .key = "", .token = token};
    };
    EXPECT_TRUE(Try(server->target(), credentials(kReaderToken)).ok());
    const absl::Status none = Try(server->target(), credentials(""));
    EXPECT_EQ(none.code(), absl::StatusCode::kUnauthenticated) << none;
    EXPECT_THAT(Text(none), HasSubstr("LOSSD_TOKEN"));
    const absl::Status wrong = Try(server->target(), credentials("reader-token-0123456788"));
    EXPECT_EQ(wrong.code(), absl::StatusCode::kUnauthenticated) << wrong;
    EXPECT_THAT(Text(wrong), Not(HasSubstr("012345")));
  }
}

TEST_F(SecurityTest, OneSideWithoutTls) {
  const auto with = Serve(MutualTlsFlags());
  const absl::Status plain = Try(with->target(), CredentialOptions());
  EXPECT_EQ(plain.code(), absl::StatusCode::kFailedPrecondition) << plain;
  EXPECT_THAT(Text(plain),
              AllOf(HasSubstr(with->target()), HasSubstr("speaks TLS and this client does not")));
  const auto without = Serve({});
  const absl::Status encrypted = Try(without->target(), Certificate("operator"));
  EXPECT_EQ(encrypted.code(), absl::StatusCode::kFailedPrecondition) << encrypted;
  EXPECT_THAT(Text(encrypted), HasSubstr("does not speak TLS"));
}

TEST_F(SecurityTest, AServerOfAnotherAuthorityIsNotTrusted) {
  const auto server = Serve(MutualTlsFlags());
  CredentialOptions options = Certificate("operator");
  options.ca = pki_.Certificate("other-ca");
  const absl::Status status = Try(server->target(), options);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr("not trusted"), HasSubstr(options.ca)));
}

TEST_F(SecurityTest, AServerForAnotherNameIsNotTrusted) {
  pki_.Issue("server", "DNS:elsewhere.example.com");
  const auto server = Serve(MutualTlsFlags());
  const absl::Status status = Try(server->target(), Certificate("operator"));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr("not trusted"), HasSubstr("mismatch")));
}

TEST_F(SecurityTest, NewFilesAreTakenWithoutARestart) {
  const auto server = Serve(With(MutualTlsFlags(), {TokenFlag()}));
  const auto becomes = [&](const CredentialOptions& options, absl::StatusCode code) {
    for (const absl::Time limit = absl::Now() + absl::Minutes(2); absl::Now() < limit;) {
      if (Try(server->target(), options).code() == code) return true;
      absl::SleepFor(absl::Milliseconds(50));
    }
    return false;
  };
  // A token is replaced.
  EXPECT_TRUE(Try(server->target(), Token(kReaderToken)).ok());
  WriteTokens("another-reader-token-1234");
  EXPECT_TRUE(becomes(Token(kReaderToken), absl::StatusCode::kUnauthenticated));
  EXPECT_TRUE(Try(server->target(), Token("another-reader-token-1234")).ok());
  // A role is given.
  test::WriteWholeFile(pki_.File("roles"), "reader dns:stranger\n");
  EXPECT_TRUE(becomes(Certificate("stranger"), absl::StatusCode::kOk));
  // Files that are not in order change nothing.
  test::WriteWholeFile(pki_.File("roles"), "boss dns:stranger\n");
  EXPECT_TRUE(Logs(*server, "what=\"roles of certificates\" error=", Certificate("stranger")));
  EXPECT_TRUE(Try(server->target(), Certificate("stranger")).ok());
  // The server's certificate and its authorities are replaced, one file after the other.
  const auto before = Connect(server->target(), Certificate("stranger"));
  ASSERT_TRUE(before.ok());
  pki_.Issue("new-server", "DNS:localhost,IP:127.0.0.1", "other-ca");
  CredentialOptions fresh = Token("another-reader-token-1234");
  fresh.ca = pki_.Certificate("other-ca");
  EXPECT_EQ(Try(server->target(), fresh).code(), absl::StatusCode::kUnauthenticated);
  std::filesystem::rename(pki_.Certificate("new-server"), pki_.Certificate("server"));
  EXPECT_TRUE(
      Logs(*server, "what=certificates error=", Certificate("stranger")));  // the old ones stay in use
  std::filesystem::rename(pki_.Key("new-server"), pki_.Key("server"));
  EXPECT_TRUE(becomes(fresh, absl::StatusCode::kOk));
  // Connections that stand go on.
  EXPECT_TRUE((*before)->ListHeads().ok());
  EXPECT_TRUE(server->Running());
}

TEST_F(SecurityTest, AReaderSeesWhoTrainsAndNothingThatProvesIt) {
  const auto server = Serve(With(MutualTlsFlags(), {TokenFlag()}));
  const auto admin = Connect(server->target(), Certificate("operator"));
  const auto trainer = Connect(server->target(), Token(kTrainerToken));
  const auto reader = Connect(server->target(), Token(kReaderToken));
  ASSERT_TRUE(admin.ok() && trainer.ok() && reader.ok());
  ASSERT_TRUE((*admin)->CreateHead(SmallHead("h")).ok());
  const std::vector<float> hidden(12, 0.5f);  // [3, 4]
  const std::vector<int32_t> targets = {0, 1, 2};
  for (const auto* client : {&admin, &trainer, &trainer}) {
    const auto computed = (**client)->ComputeLoss({.head = "h",
                                                   .hidden_size = 4,
                                                   .hidden_dtype = v1::DTYPE_FP32,
                                                   .hidden = hidden.data(),
                                                   .targets = targets},
                                                  {});
    ASSERT_TRUE(computed.ok()) << computed.status();
  }
  const auto listed = (*reader)->monitoring().ListStreams();
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->peers_size(), 2) << listed->DebugString();
  EXPECT_EQ(listed->peers(0).peer(), "dns:operator");
  EXPECT_EQ(listed->peers(0).rows(), 3u);
  EXPECT_EQ(listed->peers(1).peer(), "token:p1");
  EXPECT_EQ(listed->peers(1).rows(), 6u);
  EXPECT_THAT(listed->DebugString(), Not(HasSubstr(kTrainerToken)));

  const auto stranger = Connect(server->target(), Certificate("stranger"));
  ASSERT_TRUE(stranger.ok()) << stranger.status();
  const absl::Status refused = (*stranger)->monitoring().ListStreams().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << refused;
  EXPECT_THAT(Text(refused), HasSubstr("ListStreams needs the role reader"));
  EXPECT_EQ((*reader)->monitoring().ListStreams(10'001).status().code(), absl::StatusCode::kInvalidArgument);
  server->Signal(SIGTERM);
  ASSERT_EQ(server->WaitFor(absl::Minutes(2)), 0);
  const std::string log = server->log();
  EXPECT_THAT(log, HasSubstr("method=ListStreams head=\"\" outcome=PERMISSION_DENIED"));
  EXPECT_THAT(log, Not(ContainsRegex("method=ListStreams .*outcome=OK"))) << "reads have no audit line";
}

TEST_F(SecurityTest, AuditLines) {
  const auto server = Serve(With(MutualTlsFlags(), {TokenFlag()}));
  const auto admin = Connect(server->target(), Certificate("operator"));
  const auto reader = Connect(server->target(), Token(kReaderToken));
  ASSERT_TRUE(admin.ok() && reader.ok());
  ASSERT_TRUE((*admin)->CreateHead(SmallHead("h")).ok());
  EXPECT_FALSE((*admin)->CreateHead(SmallHead("h")).ok());
  const std::vector<float> values(24);
  EXPECT_TRUE((*admin)->WriteTensor("h", v1::PARAM_WEIGHT, values).ok());
  EXPECT_TRUE((*admin)->SaveCheckpoint("h", "c").ok());
  EXPECT_TRUE((*admin)->LoadCheckpoint("h/c").ok());
  EXPECT_TRUE((*admin)->DeleteCheckpoint("h/c").ok());
  EXPECT_EQ((*reader)->DeleteCheckpoint("h/d").status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE((*admin)->ZeroGradients("h", 0).ok());
  EXPECT_FALSE((*reader)->DeleteHead("h").ok());
  EXPECT_TRUE((*admin)->DeleteHead("h").ok());
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE((*reader)->DeleteHead("h").ok());
  EXPECT_TRUE((*reader)->ListHeads().ok());
  server->Signal(SIGTERM);
  ASSERT_EQ(server->WaitFor(absl::Minutes(2)), 0);
  const std::string log = server->log();
  const std::string who = "audit identity=dns:operator address=127.0.0.1:[0-9]+ ";
  for (const std::string line :
       {"method=CreateHead head=h outcome=OK", "method=CreateHead head=h outcome=ALREADY_EXISTS",
        "method=WriteTensor head=h outcome=OK", "method=SaveCheckpoint head=h outcome=OK",
        "method=LoadCheckpoint head=h/c outcome=OK", "method=DeleteCheckpoint head=h/c outcome=OK",
        "method=ZeroGradients head=h outcome=OK", "method=DeleteHead head=h outcome=OK"}) {
    EXPECT_THAT(log, ::testing::ContainsRegex(who + line + "\n"));
  }
  EXPECT_THAT(log, ::testing::ContainsRegex("WARNING audit identity=token:scraper address=127.0.0.1:[0-9]+ "
                                            "method=DeleteHead head=h outcome=PERMISSION_DENIED"));
  EXPECT_THAT(log, ::testing::ContainsRegex("WARNING audit identity=token:scraper address=127.0.0.1:[0-9]+ "
                                            "method=DeleteCheckpoint head=h/d outcome=PERMISSION_DENIED"));
  EXPECT_THAT(log, Not(HasSubstr("ListHeads")));
  EXPECT_THAT(log, Not(HasSubstr(kReaderToken)));
  size_t refused = 0;
  for (size_t at = 0; (at = log.find("PERMISSION_DENIED", at)) != std::string::npos; ++at) ++refused;
  EXPECT_LT(refused, 300u);  // of 1,001: 20, and one a second
}

// A save with a keep below the operator's would remove the operator's checkpoints.
TEST_F(SecurityTest, ATrainerKeepsWhatTheOperatorKeeps) {
  const auto server = Serve(With(TlsFlags(), {TokenFlag(), "--keep_checkpoints=3"}));
  const auto admin = Connect(server->target(), Token(kAdminToken));
  const auto trainer = Connect(server->target(), Token(kTrainerToken));
  ASSERT_TRUE(admin.ok() && trainer.ok());
  ASSERT_TRUE((*admin)->CreateHead(SmallHead("h")).ok());
  const auto step = [&](uint64_t number) {
    v1::ApplyStepRequest request;
    request.set_head("h");
    request.set_step(number);
    request.mutable_optimizer()->mutable_adamw();
    EXPECT_TRUE((*trainer)->ApplyStep(request).ok());
  };
  const auto save = [](client::Client& client, std::optional<uint32_t> keep) {
    v1::SaveCheckpointRequest request;
    request.set_head("h");
    if (keep.has_value()) request.set_keep(*keep);
    return client.SaveCheckpoint(request, nullptr).status();
  };
  for (uint64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(save(**trainer, std::nullopt).ok());
    step(i);
  }
  const absl::Status refused = save(**trainer, 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("keep must be 0 or at least 3"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("got 1"));
  EXPECT_EQ((*admin)->ListCheckpoints("h")->checkpoints_size(), 3);
  EXPECT_TRUE(save(**trainer, 0).ok());
  step(3);
  EXPECT_TRUE(save(**trainer, 3).ok());
  step(4);
  EXPECT_EQ((*admin)->ListCheckpoints("h")->checkpoints_size(), 3);
  EXPECT_TRUE(save(**admin, 1).ok());
  EXPECT_EQ((*admin)->ListCheckpoints("h")->checkpoints_size(), 1);
  server->Signal(SIGTERM);
  ASSERT_EQ(server->WaitFor(absl::Minutes(2)), 0);
  EXPECT_THAT(server->log(), ::testing::ContainsRegex(
                                 "identity=token:ops address=127.0.0.1:[0-9]+ method=SaveCheckpoint head=h "
                                 "outcome=OK removed=3 removed_names=\"h/step-0000000004 "
                                 "h/step-0000000003 h/step-0000000002\""));
  EXPECT_THAT(server->log(),
              ::testing::ContainsRegex("WARNING audit identity=token:p1 address=127.0.0.1:[0-9]+ "
                                       "method=SaveCheckpoint head=h outcome=PERMISSION_DENIED"));
  EXPECT_EQ(CountOf("outcome=PERMISSION_DENIED", server->log()), 1) << "one line";
}

// Nor by deleting them one by one. What a client named, a trainer may delete.
TEST_F(SecurityTest, ATrainerDeletesNoCheckpointThatTheOperatorKeeps) {
  const auto server = Serve(With(TlsFlags(), {TokenFlag(), "--keep_checkpoints=3"}));
  const auto admin = Connect(server->target(), Token(kAdminToken));
  const auto trainer = Connect(server->target(), Token(kTrainerToken));
  ASSERT_TRUE(admin.ok() && trainer.ok());
  ASSERT_TRUE((*admin)->CreateHead(SmallHead("h")).ok());
  ASSERT_TRUE((*trainer)->SaveCheckpoint("h", "mine").ok());
  ASSERT_TRUE((*trainer)->SaveCheckpoint("h", "").ok());
  const absl::Status refused = (*trainer)->DeleteCheckpoint("h/step-0000000000").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << refused;
  EXPECT_THAT(Text(refused), HasSubstr("checkpoint must have a name that a client gave it, unless an admin "
                                       "asks: the server keeps those that it names (--keep_checkpoints=3), "
                                       "got h/step-0000000000"));
  EXPECT_EQ((*admin)->ListCheckpoints("h")->checkpoints_size(), 2);
  EXPECT_EQ((*trainer)->DeleteCheckpoint("h/none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ((*trainer)->DeleteCheckpoint("../h").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE((*trainer)->DeleteCheckpoint("h/mine").ok());
  EXPECT_TRUE((*admin)->DeleteCheckpoint("h/step-0000000000").ok());
  EXPECT_EQ((*admin)->ListCheckpoints("h")->checkpoints_size(), 0);
  server->Signal(SIGTERM);
  ASSERT_EQ(server->WaitFor(absl::Minutes(2)), 0);
  const std::string line = "method=DeleteCheckpoint head=h/step-0000000000 outcome=PERMISSION_DENIED";
  EXPECT_EQ(CountOf(line, server->log()), 1) << server->log();
  EXPECT_THAT(server->log(), ::testing::ContainsRegex("WARNING audit identity=token:p1 .*" + line));
}

// A server that keeps no number of checkpoints leaves them to whoever saves.
TEST_F(SecurityTest, ATrainerDeletesWhereNothingIsKept) {
  const auto server = Serve(With(TlsFlags(), {TokenFlag(), "--keep_checkpoints=0"}));
  const auto admin = Connect(server->target(), Token(kAdminToken));
  const auto trainer = Connect(server->target(), Token(kTrainerToken));
  ASSERT_TRUE(admin.ok() && trainer.ok());
  ASSERT_TRUE((*admin)->CreateHead(SmallHead("h")).ok());
  ASSERT_TRUE((*trainer)->SaveCheckpoint("h", "").ok());
  EXPECT_TRUE((*trainer)->DeleteCheckpoint("h/step-0000000000").ok());
}

// Connections without a token, one after the other, as a stranger makes them; what a known caller is refused
// is told all the same.
TEST_F(SecurityTest, StrangersLeaveNoAuditLineOfAKnownCallerOut) {
  const auto server = Serve({TokenFlag(), "--log_level=info"});
  const absl::Time start = absl::Now();
  for (int i = 0; i < 60; ++i) EXPECT_FALSE(Try(server->target(), {}).ok());
  const auto reader = Connect(server->target(), {.token = kReaderToken});
  ASSERT_TRUE(reader.ok());
  EXPECT_FALSE((*reader)->DeleteHead("h").ok());
  const int64_t seconds = absl::ToInt64Seconds(absl::Now() - start) + 1;
  server->Signal(SIGTERM);
  ASSERT_EQ(server->WaitFor(absl::Minutes(2)), 0);
  EXPECT_THAT(server->log(), ::testing::ContainsRegex("audit identity=token:scraper .*method=DeleteHead"));
  EXPECT_GE(CountOf("audit identity=unknown", server->log()), 10);
  EXPECT_LE(CountOf("audit identity=unknown", server->log()), 20 + seconds);
}

// One user of the server's machine, who makes a connection for a few calls that fail, and then the next one.
TEST_F(SecurityTest, AUserWhoConnectsOftenHasOneBudgetOfLines) {
  const auto server = Serve({"--log_level=info"});
  const absl::Time start = absl::Now();
  for (int i = 0; i < 30; ++i) {
    const auto client = Connect(server->target(), {});
    ASSERT_TRUE(client.ok());
    for (int k = 0; k < 10; ++k) {
      EXPECT_FALSE((*client)->DescribeHead("none").ok());
      EXPECT_FALSE((*client)->DeleteHead("none").ok());
    }
  }
  const int64_t seconds = absl::ToInt64Seconds(absl::Now() - start) + 1;
  server->Signal(SIGTERM);
  ASSERT_EQ(server->WaitFor(absl::Minutes(2)), 0);
  EXPECT_LE(CountOf("call failed", server->log()), 20 + seconds);
  EXPECT_LE(CountOf("audit identity=anybody", server->log()), 20 + seconds);
  EXPECT_GE(CountOf("audit identity=anybody", server->log()), 10);
}

TEST_F(SecurityTest, FailedHandshakesCannotFillADisk) {
  const auto server = Serve(MutualTlsFlags());
  const absl::Time start = absl::Now();
  for (int i = 0; i < 300; ++i) test::HttpExchange(server->target(), "this is not TLS");
  const auto seconds = static_cast<size_t>(absl::ToInt64Seconds(absl::Now() - start));
  EXPECT_TRUE(Try(server->target(), Certificate("operator")).ok());
  size_t lines = 0;
  const std::string log = server->log();
  for (size_t at = 0; (at = log.find('\n', at)) != std::string::npos; ++at) ++lines;
  EXPECT_LT(lines, 20 + 10 + 2 * seconds);
}

// ---- HTTP ----
// The HTTP port of the linked lossd program with TLS and with tokens.

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
    EXPECT_THAT(server->log(), HasSubstr("audit identity=token:scraper address=127.0.0.1 method=HTTP"));
    const std::string admin = absl::StrCat("Authorization: Bearer ", kAdminToken, "\r\n");
    EXPECT_THAT(test::HttpStatus(Post(*server, path, admin)), ::testing::AnyOf(400, 404))
        << "it lacks a parameter";
  }
  EXPECT_EQ(test::HttpStatus(Raw(*server, "/none", "")), 404);
  EXPECT_THAT(server->log(), HasSubstr("audit identity=unknown address=127.0.0.1 method=HTTP"));
  EXPECT_THAT(server->log(), Not(HasSubstr(kReaderToken)));
}

// ---- Starts ----
// What lossd refuses to start with, and what it starts with.

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

// ---- Access to every method ----
// Calls every method of the protocol on the linked server: as nobody, with a role that is too low, and with
// one that is high enough. So a method whose service forgets to ask who calls is found.

class ServicesAccessTest : public SecurityFixture {
 protected:
  // What a call with one empty message ends with.
  grpc::Status Call(const rpc::MethodAccess& method, const std::string& token) {
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    if (!token.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    const auto call =
        stub.PrepareCall(&context, absl::StrCat("/", method.service, "/", method.method), &queue);
    const auto wait = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      queue.Next(&tag, &ok);
      return ok;
    };
    call->StartCall(nullptr);
    wait();
    const grpc::Slice nothing;
    call->WriteLast(grpc::ByteBuffer(&nothing, 1), {}, nullptr);
    wait();
    grpc::ByteBuffer answer;
    do {
      call->Read(&answer, nullptr);
    } while (wait());
    grpc::Status status;
    call->Finish(&status, nullptr);
    wait();
    return status;
  }

  const std::unique_ptr<test::ServerProcess> server_ = Serve({TokenFlag()});
  const std::shared_ptr<grpc::Channel> channel_ =
      grpc::CreateChannel(server_->target(), grpc::InsecureChannelCredentials());
};

TEST_F(ServicesAccessTest, EveryMethodAsksWhoCallsAndWhatTheyMay) {
  const std::pair<Role, const char*> callers[] = {
      {Role::kReader, kReaderToken}, {Role::kTrainer, kTrainerToken}, {Role::kAdmin, kAdminToken}};
  for (const rpc::MethodAccess& method : rpc::MethodAccessTable()) {
    EXPECT_EQ(Call(method, "").error_code(), grpc::StatusCode::UNAUTHENTICATED) << method.method;
    EXPECT_EQ(Call(method, "of-nobody-0123456789").error_code(), grpc::StatusCode::UNAUTHENTICATED)
        << method.method;
    for (const auto& [role, token] : callers) {
      const grpc::Status status = Call(method, token);
      if (role < method.role) {
        EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << method.method;
        EXPECT_NE(status.error_message().find(std::string(method.method)), std::string::npos);
      } else {
        EXPECT_NE(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << method.method;
        EXPECT_NE(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method.method;
      }
    }
  }
}

TEST_F(ServicesAccessTest, HealthIsForEverybodyAndReflectionIsNotThere) {
  EXPECT_TRUE(Call({.service = "grpc.health.v1.Health", .method = "Check"}, "").ok());
  EXPECT_EQ(
      Call({.service = "grpc.reflection.v1alpha.ServerReflection", .method = "ServerReflectionInfo"}, "")
          .error_code(),
      grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace lossd::security_test
