// SPDX-License-Identifier: Apache-2.0
// Calls, clients and servers that end at awkward moments; limits under pressure; health and reflection; and
// the clients of shared memory: who may use a region, and clients that go away.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "kernels/clocks/clock.h"
#include "tests/server/app/security_fixture.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"
#include "tests/server/service/small_training.h"
#include "tests/support/process_holdings.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing::lifecycle_test {
namespace {

using app::testing::LossAnswers;
using app::testing::TestClient;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 16;

void CreateHead(TestClient& client, int64_t classes = 64) {
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("head");
  request.mutable_spec()->set_hidden_size(kHidden);
  request.mutable_spec()->set_vocab_size(static_cast<uint64_t>(classes));
  const auto created = client.CreateHead(request);
  ASSERT_TRUE(created.ok()) << created.status();
}

v1::OpenMicrobatch OpenFor(int64_t rows, uint64_t id) {
  std::vector<int32_t> targets;
  for (int64_t i = 0; i < rows; ++i) targets.push_back(static_cast<int32_t>(i % 50));
  v1::OpenMicrobatch open = OpenSum(targets);
  open.set_step(0);
  open.set_microbatch_id(id);
  open.set_reduction(v1::REDUCTION_MEAN);
  open.set_accumulate_gradients(true);
  return open;
}

std::string Payload(int64_t rows) {
  return Bytes(std::vector<float>(static_cast<size_t>(rows * kHidden), 0.25f));
}

LossAnswers RunMicrobatch(TestClient& client, int64_t rows, uint64_t id, int64_t slice_rows = 16) {
  const auto stream = client.OpenLoss();
  stream->SendOpen(OpenFor(rows, id));
  for (int64_t row = 0; row < rows; row += slice_rows) {
    const int64_t end = std::min(row + slice_rows, rows);
    stream->SendSlice(row, end, Payload(end - row));
  }
  return stream->Finish();
}

::testing::AssertionResult BecomesIdle(TestServer& server) {
  const absl::Time limit = clocks::SteadyNow() + absl::Seconds(20);
  engine::EngineStats stats;
  do {
    stats = server.server().stats();
    if (stats.open_streams == 0 && stats.queued_slices == 0 && stats.staging_used_bytes == 0) {
      return ::testing::AssertionSuccess();
    }
    absl::SleepFor(absl::Milliseconds(5));
  } while (clocks::SteadyNow() < limit);
  return ::testing::AssertionFailure()
         << stats.open_streams << " streams, " << stats.queued_slices << " slices, "
         << stats.staging_used_bytes << " of " << stats.staging_bytes << " bytes in use";
}

// Two buffers, and sixteen calls that are open without sending anything: they must hold none.
TEST(LifecycleTest, IdleCallsHoldNoBuffers) {
  ServerOptions options = SmallServer();
  options.staging_bytes = 2 * options.slice_bytes;
  TestServer server(options);
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client));
  std::vector<std::unique_ptr<LossStream>> idle;
  for (uint64_t i = 0; i < 16; ++i) {
    idle.push_back(client->OpenLoss());
    idle.back()->SendOpen(OpenFor(8, 100 + i));
    ASSERT_TRUE(idle.back()->ReadOne());
  }
  EXPECT_TRUE(RunMicrobatch(*client, 200, 1).status.ok());
  idle.clear();
  EXPECT_TRUE(BecomesIdle(server));
}

// More slices under way than buffers, from several connections: everybody finishes.
TEST(LifecycleTest, FewBuffersManyStreams) {
  ServerOptions options = SmallServer();
  options.staging_bytes = 2 * options.slice_bytes;
  TestServer server(options);
  ASSERT_NO_FATAL_FAILURE(CreateHead(*server.Connect()));
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 6; ++i) {
    threads.emplace_back([&server, i] {
      const auto client = server.Connect();
      for (uint64_t j = 0; j < 5; ++j) {
        const LossAnswers answers = RunMicrobatch(*client, 100, i * 10 + j, 7);
        EXPECT_TRUE(answers.status.ok()) << answers.status;
        EXPECT_EQ(answers.slices.size(), 15u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(BecomesIdle(server));
}

// A client that never reads its answers is cancelled after the send timeout and gives its buffers back.
TEST(LifecycleTest, ClientThatTakesNoAnswers) {
  ServerOptions options = SmallServer();
  options.slice_bytes = 1 << 20;
  options.staging_bytes = 32 << 20;
  options.timeouts.send = absl::Milliseconds(300);
  TestServer server(options);
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client));
  const int64_t rows = 16 << 10;  // 1 MiB a slice
  constexpr int64_t kSlices = 64;
  const auto stuck = client->OpenLoss(absl::ZeroDuration());
  stuck->SendOpen(OpenFor(kSlices * rows, 1));
  std::thread sender([&] {
    const std::string payload = Payload(256);
    for (int64_t row = 0; row + 256 <= kSlices * rows; row += 256) {
      if (!stuck->SendSlice(row, row + 256, payload)) return;
    }
  });
  sender.join();
  const LossAnswers answers = stuck->Finish();
  EXPECT_EQ(answers.status.code(), absl::StatusCode::kCancelled) << answers.status;
  EXPECT_TRUE(BecomesIdle(server));
  EXPECT_LE(server.server().stats().staging_peak_bytes, 9 * options.slice_bytes);  // of 32
  EXPECT_TRUE(RunMicrobatch(*client, 10, 2).status.ok());
}

TEST(LifecycleTest, TooManyStreams) {
  ServerOptions options = SmallServer();
  options.max_streams = 2;
  options.peer_share = 1.0;
  TestServer server(options);
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client));
  std::vector<std::unique_ptr<LossStream>> open;
  for (uint64_t i = 0; i < 2; ++i) {
    open.push_back(client->OpenLoss());
    open.back()->SendOpen(OpenFor(8, i));
    ASSERT_TRUE(open.back()->ReadOne());
  }
  EXPECT_EQ(RunMicrobatch(*client, 8, 5).status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(client->DeleteHead("head").code(), absl::StatusCode::kFailedPrecondition);
  open.clear();
  EXPECT_TRUE(BecomesIdle(server));
  EXPECT_TRUE(RunMicrobatch(*client, 8, 6).status.ok());
}

// How often the metrics say that a limit was reached; -1: never.
double TimesReached(TestServer& server, absl::string_view flag) {
  return test::ValueOf(test::HttpGet(server.server().http_address(), "/metrics"),
                       absl::StrCat("lossd_limits_reached_total{limit=\"", flag, "\"}"));
}

TEST(LifecycleTest, LimitsThatRefuseAStreamAreCountedByTheirFlag) {
  struct Case {
    const char* flag;
    double peer_share;
    v1::OpenMicrobatch refused;
  };
  v1::OpenMicrobatch retained = OpenFor(16'384, 9);  // 1 MiB of hidden states
  retained.set_accumulate_gradients(false);
  retained.set_want_grad_hidden(false);
  retained.set_reduction(v1::REDUCTION_NONE);
  retained.clear_normalizer();
  retained.set_retain(true);
  for (const Case& each :
       {Case{"max_streams", 1.0, OpenFor(8, 9)}, Case{"peer_share", 0.5, OpenFor(8, 9)},
        Case{"ledger_bytes", 1.0, OpenFor(200'000, 9)}, Case{"retained_bytes", 1.0, retained}}) {
    SCOPED_TRACE(each.flag);
    ServerOptions options = SmallServer();
    options.http = "127.0.0.1:0";
    options.max_streams = 2;
    options.peer_share = each.peer_share;
    options.ledger_bytes = 512 << 10;
    TestServer server(options);
    const auto client = server.Connect();
    ASSERT_NO_FATAL_FAILURE(CreateHead(*client));
    std::vector<std::unique_ptr<LossStream>> open;
    const bool of_streams = each.refused.microbatch_rows() == 8;
    for (uint64_t i = 0; of_streams && i < (each.peer_share == 1.0 ? 2u : 1u); ++i) {
      open.push_back(client->OpenLoss());
      open.back()->SendOpen(OpenFor(8, i));
      ASSERT_TRUE(open.back()->ReadOne());
    }
    EXPECT_EQ(TimesReached(server, each.flag), -1);
    const auto refused = client->OpenLoss();
    refused->SendOpen(each.refused);
    const LossAnswers answers = refused->Finish();
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kResourceExhausted) << answers.status;
    EXPECT_EQ(TimesReached(server, each.flag), 1) << answers.status;
  }
}

TEST(LifecycleTest, HealthAndReflection) {
  TestServer server;
  const auto client = server.Connect();
  for (const char* service : {"", "lossd.v1.LossService", "lossd.v1.HeadService"}) {
    const auto health = client->Health(service);
    ASSERT_TRUE(health.ok()) << health.status();
    EXPECT_EQ(*health, "SERVING") << service;
  }
  EXPECT_EQ(client->Health("missing").status().code(), absl::StatusCode::kNotFound);
  const auto services = client->ReflectedServices();
  ASSERT_TRUE(services.ok()) << services.status();
  for (const char* service : {"lossd.v1.LossService", "lossd.v1.HeadService", "lossd.v1.ServerService"}) {
    EXPECT_THAT(*services, Contains(service));
  }
}

TEST(LifecycleTest, DescriptionOfTheServer) {
  TestServer server;
  const auto client = server.Connect();
  const auto description = client->GetServer();
  ASSERT_TRUE(description.ok()) << description.status();
  EXPECT_EQ(description->version(), "test");
  EXPECT_EQ(description->incarnation(), server.server().incarnation());
  EXPECT_NE(description->incarnation(), 0u);
  EXPECT_EQ(description->backend(), "cpu");
  EXPECT_EQ(description->memory().staging(), static_cast<uint64_t>(SmallServer().staging_bytes));
  EXPECT_FALSE(description->draining());
}

// While draining: open calls finish, new ones are refused, health says so, heads can still be saved.
TEST(LifecycleTest, DrainLetsOpenCallsFinish) {
  TestServer server;
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client));
  const auto stream = client->OpenLoss();
  stream->SendOpen(OpenFor(20, 1));
  ASSERT_TRUE(stream->ReadOne());
  bool clean = false;
  std::thread drain([&] { clean = server.server().Drain(clocks::SteadyNow() + absl::Seconds(30)); });
  while (client->GetServer().value_or(v1::ServerDescription()).draining() == false) {
    absl::SleepFor(absl::Milliseconds(2));
  }
  EXPECT_EQ(*client->Health(""), "NOT_SERVING");
  EXPECT_EQ(RunMicrobatch(*client, 8, 2).status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->ZeroGradients("head", 0).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(client->SaveCheckpoint("head", "last").ok());
  stream->SendSlice(0, 20, Payload(20));
  const LossAnswers answers = stream->Finish();
  EXPECT_TRUE(answers.status.ok()) << answers.status;
  drain.join();
  EXPECT_TRUE(clean);
}

TEST(LifecycleTest, DrainCancelsWhatDoesNotFinish) {
  TestServer server;
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client));
  const auto stream = client->OpenLoss();
  stream->SendOpen(OpenFor(20, 1));
  ASSERT_TRUE(stream->ReadOne());
  EXPECT_FALSE(server.server().Drain(clocks::SteadyNow() + absl::Milliseconds(100)));
  EXPECT_FALSE(stream->Finish().status.ok());
  server.Stop();
}

TEST(LifecycleTest, StopWithoutDrainUnderLoad) {
  auto server = std::make_unique<TestServer>();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*server->Connect()));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  const std::string target = server->target();
  for (uint64_t i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      const auto client = TestClient::Connect(target);
      for (uint64_t id = i << 32; !stop; ++id) RunMicrobatch(*client, 64, id, 3);
    });
  }
  absl::SleepFor(absl::Milliseconds(200));
  server.reset();
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

// A client process is killed at random moments; the server gets everything back and goes on.
TEST(LifecycleTest, ClientProcessesKilled) {
  TestServer server;
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client));
  std::mt19937 rng(std::random_device{}());
  for (int i = 0; i < 8; ++i) {
    {
      test::ChildProcess child({LOSSD_LOAD_PROCESS, server.target(), "head", absl::StrCat(kHidden), "300"});
      absl::SleepFor(absl::Milliseconds(std::uniform_int_distribution<>(20, 250)(rng)));
      child.Signal(SIGKILL);
      EXPECT_EQ(child.Wait(), -SIGKILL);
    }
    const LossAnswers answers = RunMicrobatch(*client, 30, static_cast<uint64_t>(i));
    EXPECT_TRUE(answers.status.ok()) << answers.status;
  }
  EXPECT_TRUE(BecomesIdle(server));
  EXPECT_TRUE(client->ZeroGradients("head", 0).ok());
  EXPECT_EQ(*client->GradNorm("head"), 0.0);
}

std::string WaitForAddress(const std::string& port_file) {
  for (int i = 0; i < 2000; ++i) {
    if (std::filesystem::exists(port_file)) {
      std::ifstream file(port_file);
      return nlohmann::json::parse(file)["grpc"];
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  return "";
}

// The real program under load gets SIGTERM: calls that are open end with OK, later ones with UNAVAILABLE, and
// the process with status 0.
TEST(LifecycleTest, SigtermUnderLoad) {
  test::TempFolder folder;
  const std::string port_file = folder.File("ports.json");
  test::ChildProcess lossd(
      {LOSSD_BINARY, "--listen=127.0.0.1:0", "--http=127.0.0.1:0", absl::StrCat("--port_file=", port_file),
       absl::StrCat("--checkpoint_dir=", folder.File("checkpoints")), "--log_level=warning", "--threads=1",
       "--staging_bytes=16MiB", "--slice_bytes=1MiB"});
  const std::string target = WaitForAddress(port_file);
  ASSERT_FALSE(target.empty());
  ASSERT_NO_FATAL_FAILURE(CreateHead(*TestClient::Connect(target)));
  std::atomic<int64_t> finished{0};
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto client = TestClient::Connect(target);
      for (uint64_t id = i << 32;; ++id) {
        const LossAnswers answers = RunMicrobatch(*client, 128, id, 9);
        if (!answers.status.ok()) {
          EXPECT_EQ(answers.status.code(), absl::StatusCode::kUnavailable) << answers.status;
          EXPECT_FALSE(answers.accepted.has_value()) << "an open call was not finished: " << answers.status;
          return;
        }
        EXPECT_TRUE(answers.summary.has_value());
        ++finished;
      }
    });
  }
  while (finished < 20) absl::SleepFor(absl::Milliseconds(2));
  lossd.Signal(SIGTERM);
  EXPECT_EQ(lossd.WaitFor(absl::Seconds(30)), 0);
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(std::filesystem::exists(port_file));
}

TEST(LifecycleTest, BadFlagsEndWithStatusTwo) {
  for (const char* flag :
       {"--threads=many", "--slice_bytes=lots", "--listen=0.0.0.0:0", "--listen=nowhere", "--backend=abacus",
        "--liveness_timeout=1s", "--send_timeout=0s", "--no_such_flag"}) {
    test::ChildProcess lossd({LOSSD_BINARY, flag});
    EXPECT_EQ(lossd.WaitFor(absl::Seconds(20)), 2) << flag;
  }
}

TEST(LifecycleTest, PortThatIsTaken) {
  TestServer first;
  ServerOptions options = SmallServer();
  options.listen = first.target();
  const auto second = Server::Start(options);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable) << second.status();
}

// ---- Who may use a region ----
// Regions of shared memory, of the host and of a GPU that is played, on a server that asks who calls: one
// belongs to the identity that names it first, and others learn nothing of it.

constexpr int kRegionRows = 8, kRegionHidden = 4, kRegionClasses = 6;
constexpr uint64_t kBytes = kRegionRows * kRegionHidden * sizeof(float);

struct Case {
  bool of_device = false;
  bool certificates = false;  // else tokens
};

class RegionAccessTest : public SecurityFixture, public ::testing::WithParamInterface<Case> {
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
    v1::OpenMicrobatch open = OpenSum(std::vector<int32_t>(kRegionRows, 1));
    open.set_region(region);
    v1::ComputeLossRequest slice;
    slice.mutable_slice()->mutable_rows()->set_end(kRegionRows);
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
    read.mutable_in_region()->set_bytes(kRegionClasses * kRegionHidden * sizeof(float));
    return caller.ReadTensor(read).status();
  }
  static absl::Status BackwardInto(TestClient& caller, const std::string& region) {
    v1::ComputeLossRequest request;
    v1::OpenBackward* const open = request.mutable_backward();
    open->set_head("head");
    open->set_microbatch_id(3);
    open->mutable_rows()->set_end(kRegionRows);
    open->set_want_grad_hidden(true);
    open->mutable_grad_loss()->Resize(kRegionRows, 1);
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

// ---- Clients that go away ----
// Clients that give up their memory, their session or themselves during a call, and clients that look for
// others' memory: with regions of the host, and of a GPU that is played.

constexpr int kSlices = 3;  // of a call
constexpr int64_t kSliceRows = 8;
constexpr int64_t kCallRows = kSlices * kSliceRows;
constexpr uint64_t kRowBytes = kSmallHidden * sizeof(float);
constexpr uint64_t kSliceBytes = kSliceRows * kRowBytes;
constexpr uint64_t kRegionBytes = 64 << 10;

class RegionClientsTest : public ::testing::TestWithParam<bool> {
 protected:
  RegionClientsTest() {
    EXPECT_TRUE(client_->CreateHead(SmallHead()).ok());
    std::mt19937_64 rng(1);
    rows_ = MakeSmallRows(kCallRows, rng);
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
}  // namespace lossd::app::testing::lifecycle_test
