// SPDX-License-Identifier: Apache-2.0
// Tests of certificates.h: files that are read again when they change, and TLS material.
#include "server/access/certificates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "tests/support/temp_folder.h"

// ---- Files that are read again ----

namespace lossd::access::reloaded_test {
namespace {

class ReloadedTest : public testing::Test {
 protected:
  ReloadedTest() {
    log::Configure(log::LogLevel::kOff, log::LogFormat::kText);
    test::WriteWholeFile(path_, "one");
  }
  std::unique_ptr<Reloaded<std::string>> Make() {
    auto made = Reloaded<std::string>::Create("text", {path_}, [this] { return Load(); });
    EXPECT_TRUE(made.ok());
    return *std::move(made);
  }
  absl::StatusOr<std::shared_ptr<const std::string>> Load() {
    if (!std::filesystem::exists(path_)) return absl::NotFoundError("gone");
    std::string text = test::ReadWholeFile(path_);
    if (text == "bad") return absl::InvalidArgumentError("bad");
    return std::make_shared<const std::string>(std::move(text));
  }
  static bool Becomes(Reloaded<std::string>& value, const std::string& text) {
    for (const absl::Time limit = clocks::SteadyNow() + absl::Minutes(2); clocks::SteadyNow() < limit;) {
      if (*value.Get() == text) return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  }

  test::TempFolder folder_;
  const std::string path_ = folder_.File("file");
};

TEST_F(ReloadedTest, TakesTheNewContent) {
  const auto value = Make();
  const std::shared_ptr<const std::string> first = value->Get();
  EXPECT_EQ(*first, "one");
  test::WriteWholeFile(path_, "two");
  EXPECT_TRUE(Becomes(*value, "two"));
  EXPECT_EQ(*first, "one");
}

TEST_F(ReloadedTest, KeepsTheOldWhileTheNewIsNotValid) {
  const auto value = Make();
  test::WriteWholeFile(path_, "bad");
  absl::SleepFor(2 * kLookAtFilesEvery);
  EXPECT_EQ(*value->Get(), "one");
  std::filesystem::remove(path_);
  absl::SleepFor(2 * kLookAtFilesEvery);
  EXPECT_EQ(*value->Get(), "one");
  test::WriteWholeFile(path_, "three");
  EXPECT_TRUE(Becomes(*value, "three"));
}

TEST_F(ReloadedTest, TheFirstHasToBeValid) {
  test::WriteWholeFile(path_, "bad");
  EXPECT_EQ(Reloaded<std::string>::Create("text", {path_}, [this] { return Load(); }).status().message(),
            "bad");
}

}  // namespace
}  // namespace lossd::access::reloaded_test

// ---- TLS material ----

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
