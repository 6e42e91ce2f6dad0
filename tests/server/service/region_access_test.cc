// SPDX-License-Identifier: Apache-2.0
// Regions of shared memory, of the host and of a GPU that is played, on a server that asks who calls: one
// belongs to the identity that names it first, and others learn nothing of it.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/app/security_fixture.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/small_head.h"
#include "tests/support/raw_region.h"

namespace lossd::region_access_test {
namespace {

using app::testing::LossAnswers;
using app::testing::TestClient;

constexpr int kRows = 8, kHidden = 4, kClasses = 6;
constexpr uint64_t kBytes = kRows * kHidden * sizeof(float);

struct Case {
  bool of_device = false;
  bool certificates = false;  // else tokens
};

class RegionAccessTest : public SecurityFixture, public testing::WithParamInterface<Case> {
 protected:
  RegionAccessTest() {
    std::vector<std::string> flags =
        GetParam().certificates ? MutualTlsFlags() : With(TlsFlags(), {TokenFlag()});
    flags.emplace_back(GetParam().of_device ? "--backend=cuda" : "--backend=cpu");
    server_ = std::make_unique<test::ServerProcess>(
        GetParam().of_device ? LOSSD_WITH_SHARED_DEVICE : LOSSD_BINARY, flags);
    trainer_ = Caller("trainer-1", kTrainerToken);
    admin_ = Caller("operator", kAdminToken);
    v1::CreateHeadRequest head = SmallHead("head");
    head.mutable_kaiming_uniform()->set_seed(1);
    const auto created = admin_->CreateHead(head);
    EXPECT_TRUE(created.ok()) << created.status();
  }

  // Who shows that certificate, or that token.
  std::unique_ptr<TestClient> Caller(const std::string& certificate, const std::string& token) const {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = test::ReadWholeFile(pki_.Certificate("ca"));
    if (GetParam().certificates) {
      options.pem_private_key = test::ReadWholeFile(pki_.Key(certificate));
      options.pem_cert_chain = test::ReadWholeFile(pki_.Certificate(certificate));
    }
    std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::SslCredentials(options);
    if (!GetParam().certificates)
      credentials = grpc::CompositeChannelCredentials(credentials, grpc::AccessTokenCredentials(token));
    return TestClient::Over(grpc::CreateChannel(server_->target(), credentials));
  }
  std::unique_ptr<test::RawRegion> OpenRegion() const {
    return std::make_unique<test::RawRegion>(admin_->GetServer()->region_socket(), 64 << 10,
                                             GetParam().of_device);
  }

  // Each names the region in another message; what the call ends with.
  static absl::Status ComputeIn(TestClient& caller, const std::string& region) {
    v1::OpenMicrobatch open = lossd::app::testing::OpenSum(std::vector<int32_t>(kRows, 1));
    open.set_region(region);
    v1::ComputeLossRequest slice;
    slice.mutable_slice()->mutable_rows()->set_end(kRows);
    slice.mutable_slice()->mutable_in_region()->set_offset(0);
    slice.mutable_slice()->mutable_in_region()->set_bytes(kBytes);
    const auto stream = caller.OpenLoss();
    stream->SendOpen(open);
    stream->Send(slice);
    stream->HalfClose();
    return stream->Finish().status;
  }
  static absl::Status ReadInto(TestClient& caller, const std::string& region) {
    v1::ReadTensorRequest read;
    read.set_head("head");
    read.set_param(v1::PARAM_WEIGHT);
    read.set_region(region);
    read.mutable_in_region()->set_offset(0);
    read.mutable_in_region()->set_bytes(kClasses * kHidden * sizeof(float));
    return caller.ReadTensor(read).status();
  }
  static absl::Status BackwardInto(TestClient& caller, const std::string& region) {
    v1::ComputeLossRequest request;
    v1::OpenBackward* const open = request.mutable_backward();
    open->set_head("head");
    open->set_microbatch_id(3);
    open->mutable_rows()->set_end(kRows);
    open->set_want_grad_hidden(true);
    open->mutable_grad_loss()->Resize(kRows, 1);
    open->set_region(region);
    open->mutable_in_region()->set_offset(0);
    open->mutable_in_region()->set_bytes(kBytes);
    const auto stream = caller.OpenLoss();
    stream->Send(request);
    stream->HalfClose();
    return stream->Finish().status;
  }

  std::unique_ptr<test::ServerProcess> server_;
  std::unique_ptr<TestClient> trainer_, admin_;
};

TEST_P(RegionAccessTest, AnotherIdentityCannotNameARegion) {
  const auto region = OpenRegion();
  std::memset(region->data(), 0, region->size());
  ASSERT_TRUE(ComputeIn(*trainer_, region->id()).ok()) << "whose it is from now on";
  const std::string mine(reinterpret_cast<const char*>(region->data()), region->size());
  using Name = absl::Status (*)(TestClient&, const std::string&);
  for (const Name name : {Name{ComputeIn}, Name{ReadInto}, Name{BackwardInto}}) {
    const absl::Status other = name(*admin_, region->id()), nobody = name(*admin_, std::string(16, 'x'));
    EXPECT_EQ(other.code(), absl::StatusCode::kUnavailable) << other;
    EXPECT_EQ(other, nobody) << "it tells something of the region";
  }
  EXPECT_EQ(std::memcmp(region->data(), mine.data(), mine.size()), 0);
  EXPECT_TRUE(ComputeIn(*trainer_, region->id()).ok());
  EXPECT_TRUE(ReadInto(*trainer_, region->id()).ok());
  // The same holds where reading a tensor was what named it first.
  const auto second = OpenRegion();
  EXPECT_TRUE(ReadInto(*admin_, second->id()).ok());
  EXPECT_EQ(ComputeIn(*trainer_, second->id()).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(ComputeIn(*admin_, second->id()).ok());
}

// Who may not compute does not come to own a region by trying.
TEST_P(RegionAccessTest, ACallThatIsNotAllowedNamesNothing) {
  const auto region = OpenRegion();
  std::memset(region->data(), 0, region->size());
  const auto stranger = Caller("stranger", kReaderToken);
  EXPECT_EQ(ComputeIn(*stranger, region->id()).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(ComputeIn(*trainer_, region->id()).ok());
}

INSTANTIATE_TEST_SUITE_P(Callers, RegionAccessTest,
                         ::testing::Values(Case{false, false}, Case{false, true}, Case{true, false},
                                           Case{true, true}),
                         [](const auto& parameter) {
                           return absl::StrCat(parameter.param.of_device ? "OfGpu" : "OfHost",
                                               parameter.param.certificates ? "ByCertificate" : "ByToken");
                         });

}  // namespace
}  // namespace lossd::region_access_test
