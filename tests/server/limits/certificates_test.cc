// SPDX-License-Identifier: Apache-2.0
// Client certificates that end while they are in use, or whose names gRPC does not take.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "tests/server/app/security_fixture.h"
#include "tests/server/service/service_client.h"

namespace lossd::certificates_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Close {
  void operator()(FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<FILE, Close>;

class CertificatesTest : public SecurityFixture {
 protected:
  // A certificate of the authority's that is valid for `time` from now on; the openssl program knows days
  // only.
  void IssueFor(const std::string& name, const std::string& names, absl::Duration time) {
    pki_.Issue(name, names);
    const File old(std::fopen(pki_.Certificate(name).c_str(), "r"));
    X509* const certificate = PEM_read_X509(old.get(), nullptr, nullptr, nullptr);
    const File key_file(std::fopen(pki_.Key("ca").c_str(), "r"));
    EVP_PKEY* const key = PEM_read_PrivateKey(key_file.get(), nullptr, nullptr, nullptr);
    ASSERT_TRUE(certificate != nullptr && key != nullptr);
    X509_gmtime_adj(X509_getm_notAfter(certificate), static_cast<long>(absl::ToInt64Seconds(time)));
    ASSERT_GT(X509_sign(certificate, key, EVP_sha256()), 0);
    const File made(std::fopen(pki_.Certificate(name).c_str(), "w"));
    ASSERT_EQ(PEM_write_X509(made.get(), certificate), 1);
    X509_free(certificate);
    EVP_PKEY_free(key);
  }
  std::shared_ptr<grpc::Channel> Channel(const std::string& target, const std::string& name) const {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = test::ReadWholeFile(pki_.Certificate("ca"));
    options.pem_cert_chain = test::ReadWholeFile(pki_.Certificate(name));
    options.pem_private_key = test::ReadWholeFile(pki_.Key(name));
    return grpc::CreateChannel(target, grpc::SslCredentials(options));
  }
  // What the openssl program says of a handshake.
  std::string Handshake(const std::string& target, const std::string& name,
                        const std::string& options) const {
    const std::string output = pki_.File("s_client");
    const std::string command =
        absl::StrCat("(sleep 1) | timeout 20 openssl s_client -connect ", target, " -CAfile ",
                     pki_.Certificate("ca"), " -cert ", pki_.Certificate(name), " -key ", pki_.Key(name),
                     " -alpn h2 ", options, " >", output, " 2>&1");
    (void)std::system(command.c_str());
    return test::ReadWholeFile(output);
  }
};

constexpr absl::Duration kShort = absl::Seconds(8);

TEST_F(CertificatesTest, AConnectionThatStandsEndsWithItsCertificate) {
  const auto server = Serve(With(MutualTlsFlags(), {"--shared_memory_bytes=0"}));
  ASSERT_TRUE((*Connect(server->target(), Certificate("operator")))->CreateHead(SmallHead("head")).ok());
  IssueFor("short", "DNS:short,URI:spiffe://test/trainer", kShort);
  const absl::Time end = absl::Now() + kShort;
  const auto client = app::testing::TestClient::Over(Channel(server->target(), "short"));
  ASSERT_TRUE(client->ListHeads().ok());
  v1::OpenMicrobatch open;
  open.set_head("head");
  open.set_microbatch_rows(2);
  open.mutable_rows()->set_end(2);
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_SUM);
  open.set_accumulate_gradients(true);
  open.set_step(0);
  open.mutable_targets()->Resize(2, 1);
  const auto stream = client->OpenLoss();
  stream->SendOpen(open);
  ASSERT_TRUE(stream->ReadOne()) << stream->Finish().status;
  EXPECT_TRUE(client->ListHeads().ok());
  absl::SleepFor(end - absl::Now() + absl::Seconds(2));
  const absl::Status refused = client->ListHeads().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnauthenticated) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the client certificate has expired"));
  const absl::Status ended = stream->Finish().status;
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnauthenticated) << ended;
  EXPECT_THAT(std::string(ended.message()), HasSubstr("the client certificate has expired"));
  EXPECT_TRUE(Try(server->target(), Certificate("operator")).ok());
}

TEST_F(CertificatesTest, NoSessionIsResumed) {
  const auto server = Serve(MutualTlsFlags());
  const std::string session = pki_.File("session");
  for (const std::string version : {"-tls1_2", "-tls1_3"}) {
    const std::string first = Handshake(server->target(), "operator", version + " -sess_out " + session);
    EXPECT_THAT(first, HasSubstr("New, TLSv1."));
    EXPECT_THAT(first, Not(HasSubstr("TLS session ticket:"))) << first;
    if (!std::filesystem::exists(session)) continue;
    EXPECT_THAT(Handshake(server->target(), "operator", version + " -sess_in " + session),
                Not(HasSubstr("Reused")));
  }
}

TEST_F(CertificatesTest, ConnectionsGetOldAndClientsDoNotNotice) {
  const auto server = Serve(With(MutualTlsFlags(), {"--connection_age=1s"}));
  const auto client = Connect(server->target(), Certificate("operator"));
  ASSERT_TRUE(client.ok()) << client.status();
  for (const absl::Time limit = absl::Now() + absl::Seconds(5); absl::Now() < limit;) {
    const auto heads = (*client)->ListHeads();
    ASSERT_TRUE(heads.ok()) << heads.status();
  }
}

// Two of them ended the process in gRPC 1.51.
TEST_F(CertificatesTest, NamesThatNoProgramTakesAreRefused) {
  const auto server = Serve(MutualTlsFlags());
  const std::pair<const char*, bool> all[] = {
      {"DER:30:07:87:05:01:02:03:04:05", false},  // an address of 5 bytes
      {"DER:30:02:87:00", false},                 // of none
      {"DER:30:13:87:11:01:01:01:01:01:01:01:01:01:01:01:01:01:01:01:01:01", false},
      {"DER:30:07:87", false},  // no list of names
      {"RID:1.2.3.4,URI:spiffe://test/trainer", true},
      {"IP:1.2.3.4,IP:1::2,URI:spiffe://test/trainer", true}};
  for (const auto& [names, good] : all) {
    SCOPED_TRACE(names);
    pki_.Issue("odd", names);
    EXPECT_EQ(Try(server->target(), Certificate("odd")).ok(), good);
    ASSERT_TRUE(server->Running());
    EXPECT_TRUE(Try(server->target(), Certificate("operator")).ok());
  }
}

}  // namespace
}  // namespace lossd::certificates_test
