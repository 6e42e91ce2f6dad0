// SPDX-License-Identifier: Apache-2.0
#include "server/access/tls_material.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/support/test_pki.h"

namespace lossd::access::tls_material_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class TlsMaterialTest : public testing::Test {
 protected:
  std::string Error(const std::string& certificate, const std::string& key, const std::string& authority) {
    const auto material = ReadTlsMaterial({.certificate = {"tls_cert", certificate},
                                           .key = {"tls_key", key},
                                           .client_authorities = {"tls_client_ca", authority}});
    return std::string(material.status().message());
  }

  test::TestPki pki_;
  const std::string cert_ = pki_.Certificate("server");
  const std::string key_ = pki_.Key("server");
  const std::string ca_ = pki_.Certificate("ca");
};

TEST_F(TlsMaterialTest, Reads) {
  const auto material = ReadTlsMaterial({{"tls_cert", cert_}, {"tls_key", key_}, {"tls_client_ca", ca_}});
  ASSERT_TRUE(material.ok()) << material.status();
  EXPECT_EQ((*material)->key, test::ReadWholeFile(key_));
  EXPECT_EQ((*material)->client_authorities, test::ReadWholeFile(ca_));
  EXPECT_TRUE((*ReadTlsMaterial({{"tls_cert", cert_}, {"tls_key", key_}, {}}))->client_authorities.empty());
}

TEST_F(TlsMaterialTest, KnowsTheFirstExpiry) {
  const absl::Time now = absl::Now();
  const auto material = ReadTlsMaterial({{"tls_cert", cert_}, {"tls_key", key_}, {}});
  ASSERT_TRUE(material.ok()) << material.status();
  EXPECT_GT((*material)->expires, now + absl::Hours(47));
  EXPECT_LT((*material)->expires, now + absl::Hours(49));
  pki_.MakeAuthority("long", 9);
  pki_.MakeAuthority("short", 1);
  const auto with = [&](const std::string& authority) {
    return (*ReadTlsMaterial({{"tls_cert", cert_}, {"tls_key", key_}, {"tls_client_ca", authority}}))
        ->expires;
  };
  EXPECT_EQ(with(pki_.Certificate("long")), (*material)->expires);
  EXPECT_LT(with(pki_.Certificate("short")), now + absl::Hours(25));
}

TEST_F(TlsMaterialTest, EachFaultNamesFlagAndPath) {
  const std::string junk = pki_.Secret("junk", "not PEM at all\n");
  const std::string damaged = pki_.Secret(
      "damaged", test::ReadWholeFile(ca_) + "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
  EXPECT_THAT(Error(junk, key_, ca_), AllOf(HasSubstr("tls_cert"), HasSubstr(junk)));
  EXPECT_THAT(Error(pki_.File("none"), key_, ca_),
              AllOf(HasSubstr("tls_cert"), HasSubstr(pki_.File("none"))));
  EXPECT_THAT(Error(cert_, junk, ca_), AllOf(HasSubstr("tls_key"), HasSubstr(junk)));
  EXPECT_THAT(Error(cert_, pki_.Secret("empty", ""), ca_), AllOf(HasSubstr("tls_key"), HasSubstr("empty")));
  EXPECT_THAT(Error(cert_, pki_.Key("ca"), ca_), AllOf(HasSubstr("tls_key"), HasSubstr("first certificate")));
  EXPECT_THAT(Error(cert_, key_, junk), AllOf(HasSubstr("tls_client_ca"), HasSubstr(junk)));
  EXPECT_THAT(Error(cert_, key_, damaged), AllOf(HasSubstr("tls_client_ca"), HasSubstr("damaged")));
  std::filesystem::permissions(key_, std::filesystem::perms::others_read, std::filesystem::perm_options::add);
  EXPECT_THAT(Error(cert_, key_, ca_), AllOf(HasSubstr("tls_key"), HasSubstr("chmod 600")));
}

}  // namespace
}  // namespace lossd::access::tls_material_test
