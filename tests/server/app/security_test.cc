// SPDX-License-Identifier: Apache-2.0
// The linked lossd program with TLS, client certificates, tokens and roles, as clients see it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "tests/server/app/security_fixture.h"
#include "tests/support/raw_http.h"

namespace lossd::security_test {
namespace {

using client::CredentialOptions;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

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
              ::testing::ContainsRegex("identity=token:p1 address=127.0.0.1:[0-9]+ "
                                       "method=SaveCheckpoint head=h outcome=PERMISSION_DENIED"));
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

}  // namespace
}  // namespace lossd::security_test
