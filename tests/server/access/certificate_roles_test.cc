// SPDX-License-Identifier: Apache-2.0
#include "server/access/certificate_roles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

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
