// SPDX-License-Identifier: Apache-2.0
// Tests of roles.h: the access file, the roles of certificates, and tokens.
#include "server/access/roles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "tests/support/temp_folder.h"

// ---- Access file ----

namespace lossd::access::access_file_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

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

}  // namespace
}  // namespace lossd::access::access_file_test

// ---- Certificate roles ----

namespace lossd::access::certificate_roles_test {
namespace {

using testing::HasSubstr;

const AccessFile kFile = {"role_file", "/etc/lossd/roles"};

TEST(CertificateRolesTest, TheHighestRoleOfAName) {
  const auto roles = CertificateRoles::Parse(
      kFile, "# who\nadmin dns:ops\n\ttrainer   uri:spiffe://a/b\nreader dns:watch\n");
  ASSERT_TRUE(roles.ok()) << roles.status();
  EXPECT_EQ((*roles)->Find({"dns:ops"}).role, Role::kAdmin);
  const auto match = (*roles)->Find({"dns:else", "dns:watch", "uri:spiffe://a/b"});
  EXPECT_EQ(match.role, Role::kTrainer);
  EXPECT_EQ(match.name, "uri:spiffe://a/b");
}

TEST(CertificateRolesTest, OthersHaveNone) {
  const auto roles = CertificateRoles::Parse(kFile, "admin dns:ops");
  ASSERT_TRUE(roles.ok());
  for (const char* name : {"dns:Ops", "dns:ops.example.com", "email:ops", "uri:ops", "ops", "dns:", "*"}) {
    EXPECT_EQ((*roles)->Find({name}).role, std::nullopt) << name;
    EXPECT_EQ((*roles)->Find({name}).name, name);
  }
  EXPECT_EQ((*roles)->Find({}).role, std::nullopt);
}

TEST(CertificateRolesTest, AStarIsForAll) {
  const auto roles = CertificateRoles::Parse(kFile, "reader *\nadmin dns:ops");
  ASSERT_TRUE(roles.ok());
  EXPECT_EQ((*roles)->Find({"dns:x"}).role, Role::kReader);
  EXPECT_EQ((*roles)->Find({}).role, Role::kReader);
  EXPECT_EQ((*roles)->Find({"dns:x", "dns:ops"}).name, "dns:ops");
}

TEST(CertificateRolesTest, RefusesLines) {
  for (const char* line :
       {"admin", "boss dns:a", "admin a", "admin dns:", "admin dns:a b", "trainer dns:ops"}) {
    const auto roles = CertificateRoles::Parse(kFile, absl::StrCat("admin dns:ops\n", line));
    EXPECT_THAT(std::string(roles.status().message()), HasSubstr("/etc/lossd/roles line 2")) << line;
  }
  EXPECT_FALSE(CertificateRoles::Parse(kFile, "#\n").ok());
}

}  // namespace
}  // namespace lossd::access::certificate_roles_test

// ---- Tokens ----

namespace lossd::access::tokens_test {
namespace {

using testing::HasSubstr;
using testing::Not;

const AccessFile kFile = {"token_file", "/etc/lossd/tokens"};
// Of "abcdefghijklmnopqrstuvwxyz".
constexpr char kHash[] = "71c480df93d6ae2f1efad1447c66c9525e316218cf51fc8d9ed832f2daf18b73";

TEST(TokensTest, FindsWhoseATokenIs) {
  const auto tokens = Tokens::Parse(
      kFile, absl::StrCat("# people\n\nadmin:ops:0123456789abcdef\r\n", "  trainer:p1:with:colons:in:it \n",
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
      Tokens::Parse(kFile, absl::StrCat("admin:ops:0123456789abcdef\nreader:s:sha256:", kHash));
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
    const auto tokens = Tokens::Parse(kFile, absl::StrCat("reader:first:0123456789abcdef\n", line));
    const std::string message(tokens.status().message());
    EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument) << line;
    EXPECT_THAT(message, HasSubstr("/etc/lossd/tokens line 2"));
    EXPECT_THAT(message, HasSubstr("token_file"));
    EXPECT_THAT(message, Not(HasSubstr("secret")));
    EXPECT_THAT(message, Not(HasSubstr("0123")));
  }
  EXPECT_THAT(std::string(Tokens::Parse(kFile, "# none\n").status().message()), HasSubstr("at least one"));
}

TEST(TokensTest, TheirNumberIsBounded) {
  std::string text;
  for (size_t i = 0; i <= Tokens::kMaxTokens; ++i)
    absl::StrAppend(&text, "reader:n:0123456789abcdef", i, "\n");
  EXPECT_THAT(std::string(Tokens::Parse(kFile, text).status().message()), HasSubstr("line 1025"));
}

}  // namespace
}  // namespace lossd::access::tokens_test
