// SPDX-License-Identifier: Apache-2.0
// A lossd process with certificates, roles and tokens of the test's own, and clients of each kind.
// Thread-compatible.
#ifndef LOSSD_TESTS_SERVER_APP_SECURITY_FIXTURE_H_
#define LOSSD_TESTS_SERVER_APP_SECURITY_FIXTURE_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd {

inline constexpr char kReaderToken[] = "reader-token-0123456789";
inline constexpr char kTrainerToken[] = "trainer-token-0123456789";
inline constexpr char kAdminToken[] = "admin-token-0123456789";

class SecurityFixture : public testing::Test {
 protected:
  SecurityFixture() {
    pki_.Issue("trainer-1", "DNS:trainer-1,URI:spiffe://test/trainer");
    pki_.Issue("operator", "DNS:operator");
    pki_.Issue("stranger", "DNS:stranger");
    pki_.MakeAuthority("other-ca");
    pki_.Issue("impostor", "DNS:operator", "other-ca");
    test::WriteWholeFile(pki_.File("roles"), "admin dns:operator\ntrainer uri:spiffe://test/trainer\n");
    WriteTokens(kReaderToken);
  }

  void WriteTokens(const std::string& reader_token) {
    pki_.Secret("tokens", absl::StrCat("reader:scraper:", reader_token, "\ntrainer:p1:", kTrainerToken,
                                       "\nadmin:ops:", kAdminToken, "\n"));
  }

  std::vector<std::string> TlsFlags() const {
    return {absl::StrCat("--tls_cert=", pki_.Certificate("server")),
            absl::StrCat("--tls_key=", pki_.Key("server")), "--log_level=info"};
  }
  std::vector<std::string> MutualTlsFlags() const {
    return With(TlsFlags(), {absl::StrCat("--tls_client_ca=", pki_.Certificate("ca")),
                             absl::StrCat("--role_file=", pki_.File("roles"))});
  }
  std::string TokenFlag() const { return absl::StrCat("--token_file=", pki_.File("tokens")); }
  static std::vector<std::string> With(std::vector<std::string> flags, const std::vector<std::string>& more) {
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }
  static std::unique_ptr<test::ServerProcess> Serve(const std::vector<std::string>& flags) {
    return std::make_unique<test::ServerProcess>(LOSSD_BINARY, flags);
  }

  client::CredentialOptions Certificate(const std::string& name) const {
    return {.ca = pki_.Certificate("ca"), .cert = pki_.Certificate(name), .key = pki_.Key(name), .token = ""};
  }
  client::CredentialOptions Token(const std::string& token) const {
    return {.ca = pki_.Certificate("ca"), .cert = "", .key = "", .token = token};
  }

  static absl::StatusOr<std::unique_ptr<client::Client>> Connect(const std::string& target,
                                                                 const client::CredentialOptions& options) {
    auto credentials = client::Credentials::Create(options);
    if (!credentials.ok()) return credentials.status();
    return client::Client::Connect(
        {.target = target, .credentials = *credentials, .channels = 1, .wait_for_server = false});
  }
  // The status of connecting and listing the heads.
  static absl::Status Try(const std::string& target, const client::CredentialOptions& options) {
    const auto client = Connect(target, options);
    return client.ok() ? (*client)->ListHeads().status() : client.status();
  }
  static v1::CreateHeadRequest SmallHead(const std::string& name) {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name(name);
    request.mutable_spec()->set_hidden_size(4);
    request.mutable_spec()->set_vocab_size(6);
    return request;
  }

  test::TestPki pki_;
};

}  // namespace lossd

#endif  // LOSSD_TESTS_SERVER_APP_SECURITY_FIXTURE_H_
