// SPDX-License-Identifier: Apache-2.0
// Tests of the clients of shared memory through the service: who may use a region, and clients that go away.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "kernels/clocks/clock.h"
#include "tests/server/app/security_fixture.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/small_head.h"
#include "tests/support/process_holdings.h"
#include "tests/support/raw_region.h"
#include "tests/support/server_process.h"

// ---- Who may use a region ----
// Regions of shared memory, of the host and of a GPU that is played, on a server that asks who calls: one
// belongs to the identity that names it first, and others learn nothing of it.

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

// ---- Clients that go away ----
// Clients that give up their memory, their session or themselves during a call, and clients that look for
// others' memory: with regions of the host, and of a GPU that is played.

namespace lossd::app::testing::region_clients_test {
namespace {

using ::testing::HasSubstr;

constexpr int kSlices = 3;  // of a call
constexpr int64_t kSliceRows = 8;
constexpr int64_t kRows = kSlices * kSliceRows;
constexpr uint64_t kRowBytes = kSmallHidden * sizeof(float);
constexpr uint64_t kSliceBytes = kSliceRows * kRowBytes;
constexpr uint64_t kRegionBytes = 64 << 10;

class RegionClientsTest : public ::testing::TestWithParam<bool> {
 protected:
  RegionClientsTest() {
    EXPECT_TRUE(client_->CreateHead(SmallHead()).ok());
    std::mt19937_64 rng(1);
    rows_ = MakeSmallRows(kRows, rng);
    for (int32_t& target : rows_.targets) target = std::max(target, 0);
    wanted_ = Gradients(Compute(""), nullptr);
    before_ = test::SettledHoldingsOf(server_.pid(), *observer_);
  }

  static bool OfDevice() { return GetParam(); }
  std::string socket() const { return client_->GetServer()->region_socket(); }
  std::unique_ptr<test::RawRegion> OpenRegion() const {
    return std::make_unique<test::RawRegion>(socket(), kRegionBytes, OfDevice());
  }

  v1::OpenMicrobatch Open(const std::string& region) const {
    v1::OpenMicrobatch open = OpenSum(rows_.targets);
    open.set_region(region);
    return open;
  }
  static v1::ComputeLossRequest Slice(int index, uint64_t offset, uint64_t bytes = kSliceBytes) {
    v1::ComputeLossRequest request;
    request.mutable_slice()->mutable_rows()->set_begin(index * kSliceRows);
    request.mutable_slice()->mutable_rows()->set_end((index + 1) * kSliceRows);
    request.mutable_slice()->mutable_in_region()->set_offset(offset);
    request.mutable_slice()->mutable_in_region()->set_bytes(bytes);
    return request;
  }
  static uint64_t PlaceOf(int index) { return 512 + static_cast<uint64_t>(index) * 4096; }
  void Fill(const test::RawRegion& region) const {
    for (int i = 0; i < kSlices; ++i) {
      std::memcpy(region.data() + PlaceOf(i),
                  reinterpret_cast<const char*>(rows_.hidden.data()) + i * kSliceBytes, kSliceBytes);
    }
  }
  // A call with its slices in messages, or in a region of this id that has the rows at their places.
  LossAnswers Compute(const std::string& region) {
    const auto stream = client_->OpenLoss();
    stream->SendOpen(Open(region));
    for (int i = 0; i < kSlices; ++i) {
      if (region.empty()) {
        stream->SendSlice(i * kSliceRows, (i + 1) * kSliceRows,
                          Bytes(rows_.hidden).substr(i * kSliceBytes, kSliceBytes));
      } else {
        stream->Send(Slice(i, PlaceOf(i)));
      }
    }
    stream->HalfClose();
    return stream->Finish();
  }
  // Of an answered call, in the order of rows; `region` null: in messages.
  static std::string Gradients(const LossAnswers& answers, const test::RawRegion* region) {
    EXPECT_TRUE(answers.status.ok()) << answers.status;
    EXPECT_EQ(answers.slices.size(), static_cast<size_t>(kSlices));
    std::string gradients(kSlices * kSliceBytes, '\0');
    for (const LossAnswers::Slice& slice : answers.slices) {
      EXPECT_EQ(slice.result.in_region(), region != nullptr);
      const int index = static_cast<int>(slice.result.rows().begin() / kSliceRows);
      const char* const from = region == nullptr
                                   ? slice.payload.data()
                                   : reinterpret_cast<const char*>(region->data() + PlaceOf(index));
      std::memcpy(gradients.data() + index * kSliceBytes, from, kSliceBytes);
    }
    return gradients;
  }
  // But for the last bits: slices are computed together as they come. `gradients`: of some rows, from `begin`
  // of all bytes on.
  bool IsWanted(const std::string& gradients, size_t begin = 0) const {
    std::vector<float> got(gradients.size() / sizeof(float)), wanted(got.size());
    std::memcpy(got.data(), gradients.data(), gradients.size());
    std::memcpy(wanted.data(), wanted_.data() + begin, gradients.size());
    return std::equal(got.begin(), got.end(), wanted.begin(), wanted.end(),
                      [](float a, float b) { return std::abs(a - b) <= 1e-5f; });
  }
  ::testing::AssertionResult NothingIsLeft() { return test::BackTo(before_, server_.pid(), *observer_); }
  // Waits until the server does not know the region any more.
  bool IsForgotten(const std::string& id) {
    const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
    while (clocks::SteadyNow() < end) {
      const LossAnswers answers = Compute(id);
      if (absl::IsUnavailable(answers.status)) return true;
      EXPECT_TRUE(answers.status.ok()) << answers.status;
      absl::SleepFor(absl::Milliseconds(2));
    }
    return false;
  }

  test::ServerProcess server_{OfDevice() ? LOSSD_WITH_SHARED_DEVICE : LOSSD_BINARY,
                              {OfDevice() ? "--backend=cuda" : "--backend=cpu"}};
  const std::unique_ptr<TestClient> client_ = TestClient::Connect(server_.target());
  const std::unique_ptr<client::Client> observer_ =
      client::Client::Connect({.target = server_.target(), .channels = 1, .transport = "grpc"}).value();
  SmallRows rows_;
  std::string wanted_;
  test::Holdings before_;
};

TEST_P(RegionClientsTest, AnHonestCallLeavesNothingWhenItsClientGoes) {
  auto region = OpenRegion();
  Fill(*region);
  EXPECT_TRUE(IsWanted(Gradients(Compute(region->id()), region.get())));
  EXPECT_GT(test::HoldingsOf(server_.pid(), *observer_).mappings, before_.mappings) << "what is counted";
  region.reset();
  EXPECT_TRUE(NothingIsLeft());
}

TEST_P(RegionClientsTest, UnmapsItsMemoryDuringACall) {
  const auto region = OpenRegion();
  Fill(*region);
  const auto stream = client_->OpenLoss();
  stream->SendOpen(Open(region->id()));
  stream->Send(Slice(0, PlaceOf(0)));
  ASSERT_TRUE(stream->ReadOne() && stream->ReadOne()) << "accepted, and the first slice is answered";
  region->Unmap();
  region->CloseDescriptor();
  for (int i = 1; i < kSlices; ++i) stream->Send(Slice(i, PlaceOf(i)));
  stream->HalfClose();
  const LossAnswers answers = stream->Finish();
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  EXPECT_EQ(answers.slices.size(), static_cast<size_t>(kSlices));
  EXPECT_TRUE(IsWanted(Gradients(Compute(""), nullptr))) << "of others";
  region->CloseSession();
  EXPECT_TRUE(NothingIsLeft());
}

// The call that uses the region goes on; no other one begins. When it ends, the memory goes back, so its
// gradients are there until then.
TEST_P(RegionClientsTest, ClosesItsSessionDuringACall) {
  auto region = OpenRegion();
  Fill(*region);
  const auto stream = client_->OpenLoss();
  stream->SendOpen(Open(region->id()));
  stream->Send(Slice(0, PlaceOf(0)));
  ASSERT_TRUE(stream->ReadOne() && stream->ReadOne());
  region->CloseSession();
  test::RawRegion other(socket(), kRegionBytes, OfDevice());
  std::memset(other.data(), 0, other.size());
  v1::OpenMicrobatch again = Open(region->id());
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  absl::Status refused;
  while (!absl::IsUnavailable(refused) && clocks::SteadyNow() < end) {
    const auto late = client_->OpenLoss();
    late->SendOpen(again);
    late->HalfClose();
    refused = late->Finish().status;
  }
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  stream->Send(Slice(1, PlaceOf(1)));
  ASSERT_TRUE(stream->ReadOne());
  EXPECT_TRUE(IsWanted(std::string(reinterpret_cast<const char*>(region->data() + PlaceOf(1)), kSliceBytes),
                       kSliceBytes));
  stream->Send(Slice(2, PlaceOf(2)));
  stream->HalfClose();
  const LossAnswers answers = stream->Finish();
  EXPECT_TRUE(answers.status.ok()) << answers.status;
  EXPECT_EQ(answers.slices.size(), static_cast<size_t>(kSlices));
  for (uint64_t i = 0; i < other.size(); ++i) ASSERT_EQ(other.data()[i], 0) << "memory of another one";
  region.reset();
  other.CloseSession();
  EXPECT_TRUE(NothingIsLeft());
}

// What the child has of it neither keeps the server from anything nor changes what the parent gets.
TEST_P(RegionClientsTest, ForksDuringACall) {
  auto region = OpenRegion();
  Fill(*region);
  const auto stream = client_->OpenLoss();
  stream->SendOpen(Open(region->id()));
  stream->Send(Slice(0, PlaceOf(0)));
  const pid_t child = fork();
  if (child == 0) {
    alarm(300);
    while (true) pause();
  }
  ASSERT_GT(child, 0);
  for (int i = 1; i < kSlices; ++i) stream->Send(Slice(i, PlaceOf(i)));
  stream->HalfClose();
  EXPECT_TRUE(IsWanted(Gradients(stream->Finish(), region.get())));
  EXPECT_TRUE(IsWanted(Gradients(Compute(""), nullptr))) << "of others";
  region.reset();
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(NothingIsLeft());
}

TEST_P(RegionClientsTest, PlacesOutsideTheRegionAreRefused) {
  const auto region = OpenRegion();
  const uint64_t size = region->size(), most = ~uint64_t{0};
  const std::vector<std::pair<uint64_t, uint64_t>> places = {{size, kSliceBytes},
                                                             {size - 256, kSliceBytes},
                                                             {most, kSliceBytes},
                                                             {most - 255, kSliceBytes},
                                                             {most - 255, 256},
                                                             {0, most},
                                                             {256, most - 255},
                                                             {0, 0},
                                                             {0, size + 1},
                                                             {1, kSliceBytes},
                                                             {0, kSliceBytes - 1},
                                                             {0, kSliceBytes + 1},
                                                             {uint64_t{1} << 63, uint64_t{1} << 63}};
  for (const auto& [offset, bytes] : places) {
    const auto stream = client_->OpenLoss();
    stream->SendOpen(Open(region->id()));
    stream->Send(Slice(0, offset, bytes));
    const LossAnswers answers = stream->Finish();
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument) << offset << " " << bytes;
  }
  Fill(*region);
  EXPECT_TRUE(IsWanted(Gradients(Compute(region->id()), region.get()))) << "nothing of that was used";
}

// Whatever place a client names, nothing comes to another's memory, and nothing of another's comes back.
TEST_P(RegionClientsTest, SessionsDoNotSeeEachOther) {
  const auto victim = OpenRegion(), region = OpenRegion();
  ASSERT_NE(victim->id(), region->id());
  const std::string secret(victim->size(), '\xa5');
  std::memcpy(victim->data(), secret.data(), secret.size());
  std::mt19937_64 rng(10);
  for (int i = 0; i < 100; ++i) {
    std::memset(region->data(), 0, region->size());
    const uint64_t offset = rng() % 4 == 0 ? rng() : (rng() % 512) * 256;
    const auto stream = client_->OpenLoss();
    stream->SendOpen(Open(region->id()));
    stream->Send(Slice(0, offset));
    stream->Send(Slice(1, rng() % 2 == 0 ? PlaceOf(1) : ~offset));
    stream->HalfClose();
    stream->Finish();
    v1::ReadTensorRequest read;
    read.set_head("head");
    read.set_param(v1::PARAM_WEIGHT);
    read.set_region(region->id());
    read.mutable_in_region()->set_offset(offset);
    read.mutable_in_region()->set_bytes(kSmallVocab * kRowBytes);
    (void)client_->ReadTensor(read);
    ASSERT_EQ(std::memcmp(victim->data(), secret.data(), secret.size()), 0) << offset;
    for (uint64_t k = 0; k + 8 <= region->size(); k += 8)
      ASSERT_NE(std::memcmp(region->data() + k, secret.data(), 8), 0) << "at " << k;
  }
  Fill(*region);
  EXPECT_TRUE(IsWanted(Gradients(Compute(region->id()), region.get())));
}

// A region comes without bytes of those before it.
TEST_P(RegionClientsTest, MemoryComesWithoutBytesOfThoseBefore) {
  for (int i = 0; i < 20; ++i) {
    const auto region = OpenRegion();
    ASSERT_EQ(std::count(region->data(), region->data() + region->size(), 0),
              static_cast<std::ptrdiff_t>(region->size()));
    std::memset(region->data(), 0xa5, region->size());
  }
}

INSTANTIATE_TEST_SUITE_P(Memory, RegionClientsTest, ::testing::Bool(),
                         [](const auto& parameter) { return parameter.param ? "OfGpu" : "OfHost"; });

}  // namespace
}  // namespace lossd::app::testing::region_clients_test
