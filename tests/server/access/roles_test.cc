// SPDX-License-Identifier: Apache-2.0
// Tests of roles.h, authority.h and audit_log.h: the access file, the roles of certificates, tokens, who may
// do what, and what is written down of it.
#include "server/access/roles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/access/audit_log.h"
#include "server/access/authority.h"
#include "server/log/log.h"
#include "tests/support/temp_folder.h"

namespace lossd::access::roles_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- Access file ----

class AccessFileTest : public testing::Test {
 protected:
  void Write(mode_t mode, absl::string_view content = "content") {
    test::WriteWholeFile(file_.path, content);
    ASSERT_EQ(chmod(file_.path.c_str(), mode), 0);
  }
  std::string Error(Secrecy secrecy = Secrecy::kSecret) {
    const auto content = ReadAccessFile(file_, secrecy);
    EXPECT_EQ(content.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(content.status().message()),
                AllOf(HasSubstr("token_file"), HasSubstr(file_.path)));
    return std::string(content.status().message());
  }

  test::TempFolder folder_;
  const AccessFile file_ = {"token_file", folder_.File("file")};
};

TEST_F(AccessFileTest, ReadsWhatItsOwnerAloneCanRead) {
  Write(0600);
  EXPECT_EQ(*ReadAccessFile(file_, Secrecy::kSecret), "content");
  Write(0400);
  EXPECT_EQ(*ReadAccessFile(file_, Secrecy::kSecret), "content");
}

TEST_F(AccessFileTest, RefusesSecretsThatOthersCanRead) {
  for (const mode_t mode : {0644, 0604, 0602, 0660}) {
    Write(mode);
    EXPECT_THAT(Error(), HasSubstr("chmod 600")) << std::oct << mode;
    EXPECT_TRUE(ReadAccessFile(file_, Secrecy::kPublic).ok());
  }
}

TEST_F(AccessFileTest, TheGroupMayReadSecretsOfRoot) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to be root";
  Write(0640);
  EXPECT_TRUE(ReadAccessFile(file_, Secrecy::kSecret).ok());
  ASSERT_EQ(chown(file_.path.c_str(), 12345, 12345), 0);
  EXPECT_THAT(Error(), HasSubstr("chmod 600"));
}

TEST_F(AccessFileTest, RefusesWhatIsNoFileWithContent) {
  EXPECT_THAT(Error(), HasSubstr("No such file"));
  Write(0600, "");
  EXPECT_THAT(Error(), HasSubstr("empty"));
  Write(0600, std::string(kMaxAccessFileBytes + 1, 'x'));
  EXPECT_THAT(Error(), HasSubstr("at most"));
  std::filesystem::remove(file_.path);
  std::filesystem::create_directory(file_.path);
  EXPECT_THAT(Error(), HasSubstr("regular file"));
  std::filesystem::remove(file_.path);
  ASSERT_EQ(mkfifo(file_.path.c_str(), 0600), 0);  // would make a plain open wait for ever
  EXPECT_THAT(Error(), HasSubstr("regular file"));
}

// ---- Certificate roles ----

const AccessFile kRoleFile = {"role_file", "/etc/lossd/roles"};

TEST(CertificateRolesTest, TheHighestRoleOfAName) {
  const auto roles = CertificateRoles::Parse(
      kRoleFile, "# who\nadmin dns:ops\n\ttrainer   uri:spiffe://a/b\nreader dns:watch\n");
  ASSERT_TRUE(roles.ok()) << roles.status();
  EXPECT_EQ((*roles)->Find({"dns:ops"}).role, Role::kAdmin);
  const auto match = (*roles)->Find({"dns:else", "dns:watch", "uri:spiffe://a/b"});
  EXPECT_EQ(match.role, Role::kTrainer);
  EXPECT_EQ(match.name, "uri:spiffe://a/b");
}

TEST(CertificateRolesTest, OthersHaveNone) {
  const auto roles = CertificateRoles::Parse(kRoleFile, "admin dns:ops");
  ASSERT_TRUE(roles.ok());
  for (const char* name : {"dns:Ops", "dns:ops.example.com", "email:ops", "uri:ops", "ops", "dns:", "*"}) {
    EXPECT_EQ((*roles)->Find({name}).role, std::nullopt) << name;
    EXPECT_EQ((*roles)->Find({name}).name, name);
  }
  EXPECT_EQ((*roles)->Find({}).role, std::nullopt);
}

TEST(CertificateRolesTest, AStarIsForAll) {
  const auto roles = CertificateRoles::Parse(kRoleFile, "reader *\nadmin dns:ops");
  ASSERT_TRUE(roles.ok());
  EXPECT_EQ((*roles)->Find({"dns:x"}).role, Role::kReader);
  EXPECT_EQ((*roles)->Find({}).role, Role::kReader);
  EXPECT_EQ((*roles)->Find({"dns:x", "dns:ops"}).name, "dns:ops");
}

TEST(CertificateRolesTest, RefusesLines) {
  for (const char* line :
       {"admin", "boss dns:a", "admin a", "admin dns:", "admin dns:a b", "trainer dns:ops"}) {
    const auto roles = CertificateRoles::Parse(kRoleFile, absl::StrCat("admin dns:ops\n", line));
    EXPECT_THAT(std::string(roles.status().message()), HasSubstr("/etc/lossd/roles line 2")) << line;
  }
  EXPECT_FALSE(CertificateRoles::Parse(kRoleFile, "#\n").ok());
}

// ---- Tokens ----

const AccessFile kTokenFile = {"token_file", "/etc/lossd/tokens"};
// Of "abcdefghijklmnopqrstuvwxyz".
constexpr char kHash[] = "71c480df93d6ae2f1efad1447c66c9525e316218cf51fc8d9ed832f2daf18b73";

TEST(TokensTest, FindsWhoseATokenIs) {
  const auto tokens = Tokens::Parse(
      kTokenFile,
      absl::StrCat("# people\n\nadmin:ops:0123456789abcdef\r\n", "  trainer:p1:with:colons:in:it \n",
                   "reader:scrape:sha256:", kHash, "\ntrainer:p1:a-second-token-of-p1"));
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ((*tokens)->size(), 4);
  ASSERT_NE((*tokens)->Find("0123456789abcdef"), nullptr);
  EXPECT_EQ((*tokens)->Find("0123456789abcdef")->name, "ops");
  EXPECT_EQ((*tokens)->Find("0123456789abcdef")->role, Role::kAdmin);
  EXPECT_EQ((*tokens)->Find("with:colons:in:it")->role, Role::kTrainer);
  EXPECT_EQ((*tokens)->Find("abcdefghijklmnopqrstuvwxyz")->name, "scrape");
  EXPECT_EQ((*tokens)->Find("a-second-token-of-p1")->name, "p1");
}

TEST(TokensTest, KnowsNoOther) {
  const auto tokens =
      Tokens::Parse(kTokenFile, absl::StrCat("admin:ops:0123456789abcdef\nreader:s:sha256:", kHash));
  ASSERT_TRUE(tokens.ok());
  for (const std::string& token :
       {std::string(), std::string("0123456789abcde"), std::string("0123456789abcdef0"),
        std::string("0123456789abcdeF"), absl::StrCat("sha256:", kHash), std::string(kHash),
        std::string(100'000, 'x')}) {
    EXPECT_EQ((*tokens)->Find(token), nullptr) << token.substr(0, 80);
  }
}

TEST(TokensTest, RefusesLinesByNumberAndTellsNoToken) {
  for (const char* line : {"admin:ops", "boss:ops:secret-secret-secret", ":ops:secret-secret-secret",
                           "admin::secret-secret-secret", "admin:a name:secret-secret-secret",
                           "admin:ops:secret", "admin:ops:secret secret secret secret",
                           "admin:ops:sha256:secret", "secret-secret-secret", "reader:a:0123456789abcdef"}) {
    const auto tokens = Tokens::Parse(kTokenFile, absl::StrCat("reader:first:0123456789abcdef\n", line));
    const std::string message(tokens.status().message());
    EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument) << line;
    EXPECT_THAT(message, HasSubstr("/etc/lossd/tokens line 2"));
    EXPECT_THAT(message, HasSubstr("token_file"));
    EXPECT_THAT(message, Not(HasSubstr("secret")));
    EXPECT_THAT(message, Not(HasSubstr("0123")));
  }
  EXPECT_THAT(std::string(Tokens::Parse(kTokenFile, "# none\n").status().message()),
              HasSubstr("at least one"));
}

TEST(TokensTest, TheirNumberIsBounded) {
  std::string text;
  for (size_t i = 0; i <= Tokens::kMaxTokens; ++i)
    absl::StrAppend(&text, "reader:n:0123456789abcdef", i, "\n");
  EXPECT_THAT(std::string(Tokens::Parse(kTokenFile, text).status().message()), HasSubstr("line 1025"));
}

// ---- Authority ----

class AuthorityTest : public testing::Test {
 protected:
  std::unique_ptr<Authority> Make(bool roles, bool tokens) {
    const std::string role_file = folder_.File("roles");
    test::WriteWholeFile(role_file, "admin dns:ops\n");
    const std::string token_file = folder_.File("tokens");
    test::WriteWholeFile(token_file, "trainer:p1:0123456789abcdef\n");
    std::filesystem::permissions(token_file, std::filesystem::perms::owner_read);
    auto made =
        Authority::Create({"role_file", roles ? role_file : ""}, {"token_file", tokens ? token_file : ""});
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }

  test::TempFolder folder_;
};

TEST_F(AuthorityTest, WithoutFilesEverybodyIsAdmin) {
  const auto authority = Make(false, false);
  EXPECT_FALSE(authority->asks());
  EXPECT_EQ(authority->Identify({})->role, Role::kAdmin);
  EXPECT_EQ(authority->Identify({.authorization = "Bearer whatever"})->role, Role::kAdmin);
}

TEST_F(AuthorityTest, Tokens) {
  const auto authority = Make(false, true);
  EXPECT_EQ(authority->Identify({.authorization = "Bearer 0123456789abcdef"})->name, "token:p1");
  EXPECT_EQ(authority->Identify({.authorization = "bearer  0123456789abcdef "})->role, Role::kTrainer);
  for (const char* wrong : {"", "Bearer", "Bearer ", "Bearer 0123456789abcdee", "Basic 0123456789abcdef",
                            "0123456789abcdef", "Bearer0123456789abcdef"}) {
    const auto identity = authority->Identify({.authorization = wrong});
    EXPECT_EQ(identity.status().code(), absl::StatusCode::kUnauthenticated) << wrong;
    EXPECT_THAT(std::string(identity.status().message()), Not(HasSubstr("0123")));
  }
  // A certificate counts for nothing here, although TLS may have verified one.
  EXPECT_EQ(authority->Identify({.certificate = true, .names = {"dns:ops"}}).status().code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(authority->Identify({}).status().message()), HasSubstr("LOSSD_TOKEN"));
}

TEST_F(AuthorityTest, Certificates) {
  const auto authority = Make(true, false);
  EXPECT_EQ(authority->Identify({.certificate = true, .names = {"dns:ops"}})->role, Role::kAdmin);
  const auto other = authority->Identify({.certificate = true, .names = {"dns:x"}});
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(other->role, std::nullopt);
  // Names without a verified certificate are nothing.
  EXPECT_EQ(authority->Identify({.names = {"dns:ops"}}).status().code(), absl::StatusCode::kUnauthenticated);
  // A token is nothing either; it may be meant for another server.
  EXPECT_EQ(
      authority->Identify({.certificate = true, .names = {"dns:ops"}, .authorization = "Bearer x"})->role,
      Role::kAdmin);
}

TEST_F(AuthorityTest, ATokenCountsBeforeACertificate) {
  const auto authority = Make(true, true);
  const Presented both = {
      .certificate = true, .names = {"dns:ops"}, .authorization = "Bearer 0123456789abcdef"};
  EXPECT_EQ(authority->Identify(both)->name, "token:p1");
  const Presented wrong = {
      .certificate = true, .names = {"dns:ops"}, .authorization = "Bearer 0123456789abcdeX"};
  EXPECT_EQ(authority->Identify(wrong).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(AuthorityTest, CheckRoleNamesMethodRoleAndIdentity) {
  EXPECT_TRUE(CheckRole({.name = "dns:a", .role = Role::kAdmin}, Role::kReader, "M").ok());
  EXPECT_TRUE(CheckRole({.name = "dns:a", .role = Role::kTrainer}, Role::kTrainer, "M").ok());
  const absl::Status low = CheckRole({.name = "dns:a", .role = Role::kReader}, Role::kAdmin, "CreateHead");
  EXPECT_EQ(low.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(low.message(), "CreateHead needs the role admin; dns:a has the role reader on this server");
  const absl::Status none = CheckRole({.name = "dns:a"}, Role::kReader, "GetServer");
  EXPECT_EQ(none.message(), "GetServer needs the role reader; dns:a has no role on this server");
}

// ---- Audit log ----

class AuditLogTest : public testing::Test {
 protected:
  AuditLogTest() { log::Configure(log::LogLevel::kInfo, log::LogFormat::kText); }

  std::string Refuse(int times) {
    testing::internal::CaptureStderr();
    for (int i = 0; i < times; ++i) {
      audit_.Refused({.identity = "",
                      .holder = {.name = "10.0.0.5"},
                      .address = "10.0.0.5:1",
                      .method = "ListHeads",
                      .head = ""},
                     absl::UnauthenticatedError("who"));
    }
    return testing::internal::GetCapturedStderr();
  }
  // Lines of each kind about one call of an identity; `number` tells the calls' addresses apart.
  static log::LineHolder Known(const std::string& name) { return {.name = name, .is_known = true}; }
  static AuditedCall CallOf(const std::string& identity, int number) {
    return {.identity = identity,
            .holder = Known(identity),
            .address = "10.0." + std::to_string(number % 256) + ".7:" + std::to_string(number),
            .method = "DeleteHead",
            .head = "lm"};
  }
  int64_t LinesOf(const std::function<void()>& calls) {
    testing::internal::CaptureStderr();
    calls();
    return Lines(testing::internal::GetCapturedStderr());
  }
  static int64_t Lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  AuditLog audit_{[this] { return now_; }};
};

TEST_F(AuditLogTest, ALineHasWhoWhenceWhatAndOutcome) {
  testing::internal::CaptureStderr();
  audit_.Ended({.identity = "dns:ops", .address = "10.0.0.5:1", .method = "DeleteHead", .head = "lm"}, "OK");
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasSubstr("INFO audit identity=dns:ops address=10.0.0.5:1 method=DeleteHead head=lm outcome=OK\n"));
}

TEST_F(AuditLogTest, ALineIsBoundedAndCannotForgeAnother) {
  const std::string evil =
      "a\nINFO audit identity=dns:ops outcome=OK\r\033[2J\xc2\x9b\xff \"" + std::string(1'000'000, 'x');
  testing::internal::CaptureStderr();
  audit_.Ended({.identity = evil, .address = evil, .method = "DeleteHead", .head = evil}, "OK");
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_EQ(Lines(line), 1);
  EXPECT_LT(line.size(), 1000);
  EXPECT_TRUE(std::all_of(line.begin(), line.end() - 1, [](char c) { return c >= ' ' && c <= '~'; })) << line;
}

TEST_F(AuditLogTest, RefusedCallsCannotFillADisk) {
  EXPECT_EQ(Lines(Refuse(100'000)), AuditLog::kLines);
  now_ += absl::Seconds(3);
  const std::string later = Refuse(100'000);
  EXPECT_EQ(Lines(later), 3);
  EXPECT_THAT(later, HasSubstr("refusals_left_out=99980"));
  now_ += absl::Hours(1000);
  EXPECT_EQ(Lines(Refuse(100'000)), AuditLog::kLines);
}

TEST_F(AuditLogTest, AClockThatIsSetBackDoesNotStopTheLines) {
  Refuse(1000);
  now_ -= absl::Hours(1);
  Refuse(1);
  now_ += absl::Seconds(2);
  EXPECT_EQ(Lines(Refuse(10)), 2);
}

TEST_F(AuditLogTest, ASaveSaysWhatItRemoved) {
  testing::internal::CaptureStderr();
  audit_.Ended({.identity = "token:pipeline",
                .address = "10.0.0.5:1",
                .method = "SaveCheckpoint",
                .head = "lm",
                .removed = {"lm/step-0000000001", "lm/step-0000000002"}},
               "OK");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("outcome=OK removed=2 removed_names=\"lm/step-0000000001 lm/step-0000000002\"\n"));
  std::vector<std::string> many(1000, "lm/step-0000000001");
  testing::internal::CaptureStderr();
  audit_.Ended({.identity = "x", .address = "y", .method = "SaveCheckpoint", .head = "lm", .removed = many},
               "OK");
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_THAT(line, HasSubstr("removed=1000"));
  EXPECT_LT(line.size(), 600u);
}

// Calls of one peer that fail over and over; another one's failures are told all the same.
TEST_F(AuditLogTest, FailedCallsHaveABudgetForEachPeer) {
  const auto fail = [&](const std::string& peer, int times) {
    testing::internal::CaptureStderr();
    for (int i = 0; i < times; ++i)
      audit_.Failed({.name = peer}, peer, "DescribeHead", "NOT_FOUND", "no head");
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(Lines(fail("a", 100'000)), AuditLog::kLines);
  EXPECT_EQ(Lines(fail("b", 1)), 1);
  now_ += absl::Seconds(1);
  EXPECT_THAT(fail("a", 1), HasSubstr("failures_left_out=99980"));
  int64_t lines = 0;
  for (int i = 0; i < 5'000; ++i) lines += Lines(fail("peer" + std::to_string(i), 1));
  EXPECT_LE(lines, AuditLog::kLinesOfAll) << "of peers that come and go";
}

// A trainer may delete checkpoints, and so may ask for ones that are not there.
TEST_F(AuditLogTest, AuditedCallsThatFailHaveABudgetForEachIdentity) {
  const auto end = [&](const std::string& identity, const char* outcome, int times) {
    testing::internal::CaptureStderr();
    for (int i = 0; i < times; ++i) {
      audit_.Ended({.identity = identity,
                    .holder = Known(identity),
                    .address = "x",
                    .method = "DeleteCheckpoint",
                    .head = "lm"},
                   outcome);
    }
    return Lines(testing::internal::GetCapturedStderr());
  };
  EXPECT_EQ(end("a", "NOT_FOUND", 100'000), AuditLog::kLines);
  EXPECT_EQ(end("b", "NOT_FOUND", 1), 1);
  EXPECT_EQ(end("a", "OK", 500), 500) << "what was done is always told";
}

// A trainer may zero the gradients of a step without end.
TEST_F(AuditLogTest, CallsThatLeaveNothingHaveABudgetToo) {
  const auto end = [&](const char* method, int times) {
    testing::internal::CaptureStderr();
    for (int i = 0; i < times; ++i) {
      AuditedCall call = CallOf("token:a", i);
      call.method = method;
      call.leaves_nothing = true;
      audit_.Ended(call, "OK");
    }
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(Lines(end("ZeroGradients", 100'000)), AuditLog::kLines);
  EXPECT_EQ(Lines(end("PlanHead", 1)), 1) << "another call of the same identity";
  now_ += absl::Seconds(1);
  EXPECT_THAT(end("ZeroGradients", 1),
              HasSubstr("method=ZeroGradients head=lm outcome=OK calls_left_out=99980"));
}

// Whatever addresses it calls from.
TEST_F(AuditLogTest, AnIdentityHasOneBudgetForAllItsAddresses) {
  EXPECT_EQ(LinesOf([&] {
              for (int i = 0; i < 50'000; ++i)
                audit_.Refused(CallOf("token:a", i), absl::PermissionDeniedError("no"));
            }),
            AuditLog::kLines);
  EXPECT_EQ(LinesOf([&] {
              for (int i = 0; i < 50'000; ++i) audit_.Ended(CallOf("token:a", i), "NOT_FOUND");
            }),
            AuditLog::kLines);
  EXPECT_EQ(LinesOf([&] {
              for (int i = 0; i < 50'000; ++i)
                audit_.Failed(Known("token:a"), "token:a", "DescribeHead", "NOT_FOUND", "no head");
            }),
            AuditLog::kLines);
}

// Fifty identities whose calls are refused, and fail, without end: a line about another one is not left out.
TEST_F(AuditLogTest, IdentitiesLeaveNoLineAboutAnotherOut) {
  for (int minute = 0; minute < 20; ++minute) {
    const int64_t lines = LinesOf([&] {
      for (int second = 0; second < 60; ++second) {
        now_ += absl::Seconds(1);
        for (int i = 0; i < 50; ++i) {
          const std::string identity = "token:" + std::to_string(i);
          for (int k = 0; k < 3; ++k) {
            audit_.Refused(CallOf(identity, i), absl::PermissionDeniedError("no"));
            audit_.Ended(CallOf(identity, i), "NOT_FOUND");
          }
        }
      }
    });
    EXPECT_LE(lines, 2 * (AuditLog::kLinesOfAll + 60 + 50)) << "the log is bounded";
    EXPECT_EQ(LinesOf([&] { audit_.Refused(CallOf("dns:rare", 1), absl::PermissionDeniedError("no")); }), 1)
        << minute;
    EXPECT_EQ(LinesOf([&] { audit_.Ended(CallOf("dns:rare", 1), "NOT_FOUND"); }), 1) << minute;
  }
}

// However many addresses strangers have.
TEST_F(AuditLogTest, StrangersLeaveNoLineAboutAKnownCallerOut) {
  EXPECT_LE(LinesOf([&] {
              for (int i = 0; i < 50'000; ++i) {
                const std::string address = "10.1." + std::to_string(i / 256) + "." + std::to_string(i % 256);
                audit_.Refused({.identity = "",
                                .holder = {.name = address},
                                .address = address + ":1",
                                .method = "ListHeads",
                                .head = ""},
                               absl::UnauthenticatedError("who"));
              }
            }),
            AuditLog::kLinesOfAll);
  EXPECT_EQ(LinesOf([&] {
              for (int i = 0; i < 10; ++i)
                audit_.Refused(CallOf("token:a", i), absl::PermissionDeniedError("no"));
            }),
            10);
}

// Names that nobody gave out, or too many: the budget of all holds without exception.
TEST_F(AuditLogTest, NoNumberOfNamesFillsTheLog) {
  EXPECT_LE(LinesOf([&] {
              for (int i = 0; i < 100'000; ++i)
                audit_.Ended(CallOf("token:" + std::to_string(i % 3'000), i), "NOT_FOUND");
            }),
            AuditLog::kLinesOfAll + static_cast<int64_t>(log::LineBudgets::kMostHolders));
}

}  // namespace
}  // namespace lossd::access::roles_test
