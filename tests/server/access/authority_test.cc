// SPDX-License-Identifier: Apache-2.0
#include "server/access/authority.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/test_pki.h"

namespace lossd::access::authority_test {
namespace {

using testing::HasSubstr;
using testing::Not;

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

}  // namespace
}  // namespace lossd::access::authority_test
