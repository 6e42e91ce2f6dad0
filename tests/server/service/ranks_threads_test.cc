// SPDX-License-Identifier: Apache-2.0
// A server of several processes with two devices each, all in one program, as far as the sanitizers see: the
// server, with its second device beside it, and what the other processes are made of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/client.h"
#include "kernels/clocks/clock.h"
#include "server/app/server_parts.h"
#include "tests/server/service/service_fixture.h"
#include "tests/server/service/small_training.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing::ranks_threads_test {
namespace {

using ::testing::HasSubstr;

// As process `process` of so many.
ServerOptions OptionsOf(int process, int processes, int port) {
  signal(SIGPIPE, SIG_IGN);  // as the program does: another rank may close its connections
  ServerOptions options = SmallServer();
  options.backend = "cpu";
  options.cpu_devices = 2;
  options.threads = 2;
  options.ranks.launch = {.rank = process, .ranks = processes, .leader = absl::StrCat("127.0.0.1:", port)};
  options.ranks.timeout = absl::Minutes(2);
  return options;
}

// What a process other than the first has.
class OtherProcess {
 public:
  explicit OtherProcess(const ServerOptions& options) : options_(options) {
    auto own = CreateOwnBackends(options_);
    EXPECT_TRUE(own.ok()) << own.status();
    auto ranks = LocalRanks::Start(options_, *std::move(own),
                                   {.first_rank = 2 * options_.ranks.launch.rank,
                                    .devices = 2,
                                    .on_joined = [this] { joined_.Notify(); },
                                    .on_end =
                                        [this](const RanksEnd& end) {
                                          end_ = end;
                                          ended_.Notify();
                                        }});
    EXPECT_TRUE(ranks.ok()) << ranks.status();
    ranks_ = *std::move(ranks);
  }

  LocalRanks& ranks() { return *ranks_; }
  void AwaitJoined() { joined_.WaitForNotification(); }
  RanksEnd AwaitEnd() {
    ended_.WaitForNotification();
    return end_;
  }

 private:
  const ServerOptions options_;
  absl::Notification joined_, ended_;
  RanksEnd end_;
  std::unique_ptr<LocalRanks> ranks_;
};

// A server whose other processes are in this one.
class ServerOfProcesses {
 public:
  // `change`: of what the processes have in common.
  explicit ServerOfProcesses(const std::function<void(ServerOptions&)>& change, int processes = 2)
      : port_(test::FreePort()) {
    log::Configure(log::LogLevel::kOff, log::LogFormat::kText);
    const auto options_of = [&](int process) {
      ServerOptions options = OptionsOf(process, processes, port_);
      options.checkpoint_directory = folder_.File("checkpoints");
      change(options);
      return options;
    };
    std::thread first([&] {
      auto server = Server::Start(options_of(0));
      EXPECT_TRUE(server.ok()) << server.status();
      if (server.ok()) server_ = *std::move(server);
    });
    for (int process = 1; process < processes; ++process) {
      others_.push_back(std::make_unique<OtherProcess>(options_of(process)));
    }
    first.join();
  }

  std::string target() const { return server_->grpc_address(); }
  Server& server() { return *server_; }
  OtherProcess& other(int process) { return *others_[static_cast<size_t>(process) - 1]; }
  // As the first process does.
  void Stop() { server_.reset(); }

 private:
  const int port_;
  test::TempFolder folder_;
  std::vector<std::unique_ptr<OtherProcess>> others_;
  std::unique_ptr<Server> server_;
};

class ServiceRanksThreadsTest : public ::testing::TestWithParam<v1::Split> {};

Trained TrainAt(client::Client& client, const std::vector<SmallRows>& data, uint64_t seed, v1::Split split) {
  std::mt19937_64 rng(seed);
  v1::CreateHeadRequest head = SmallHead();
  head.mutable_spec()->set_split(split);
  EXPECT_TRUE(client.CreateHead(head).ok());
  Trained trained;
  Train(client, data, 0, 2, rng, trained);
  return trained;
}

TEST_P(ServiceRanksThreadsTest, TheyTrainAsAsManyDevicesDoAndEndTogether) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  ServerOfProcesses ranks([](ServerOptions& options) { options.deterministic = true; });
  const auto client = Connect(ranks.target(), 2);
  const Trained of_ranks = TrainAt(*client, data, seed, GetParam());
  ServerOptions four = SmallServer();
  four.backend = "cpu";
  four.cpu_devices = 4;
  four.threads = 4;
  four.deterministic = true;
  TestServer devices(four);
  const Trained of_devices = TrainAt(*Connect(devices.target(), 2), data, seed + 1, GetParam());
  ExpectSameBits(of_ranks, of_devices);
  ranks.other(1).AwaitJoined();
  EXPECT_TRUE(ranks.other(1).ranks().joined());
  EXPECT_FALSE(ranks.other(1).ranks().device_lost());
  ranks.Stop();
  const RanksEnd end = ranks.other(1).AwaitEnd();
  EXPECT_TRUE(end.status.ok()) << end.status;
  EXPECT_TRUE(end.joined);
}

TEST_P(ServiceRanksThreadsTest, CheckpointsAndTensorsGoThereAndBack) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  ServerOfProcesses ranks([](ServerOptions&) {});
  const auto client = Connect(ranks.target());
  const Trained trained = TrainAt(*client, data, seed, GetParam());
  ASSERT_TRUE(client->SaveCheckpoint("head", "saved").ok());
  std::vector<float> other(trained.tensors.front().size(), 0.25f);
  ASSERT_TRUE(client->WriteTensor("head", v1::PARAM_WEIGHT, other).ok());
  EXPECT_EQ(Tensors(*client).front(), other);
  ASSERT_TRUE(client->DeleteHead("head").ok());
  const auto loaded = client->LoadCheckpoint("head/saved", "head");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(Tensors(*client), trained.tensors);
  Trained next;
  Train(*client, data, 2, 3, rng, next);
}

INSTANTIATE_TEST_SUITE_P(Splits, ServiceRanksThreadsTest,
                         ::testing::Values(v1::SPLIT_ROWS, v1::SPLIT_VOCABULARY),
                         [](const auto& split) { return v1::Split_Name(split.param); });

TEST(ServiceRanksThreadsHeadTest, HeadsInHostMemoryAreRefusedByName) {
  ServerOfProcesses ranks([](ServerOptions&) {});
  const auto client = Connect(ranks.target());
  v1::CreateHeadRequest head = SmallHead();
  head.mutable_spec()->set_frozen(true);
  head.mutable_spec()->set_residency(v1::RESIDENCY_HOST);
  const absl::Status refused = client->CreateHead(head).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented) << refused;
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("spec.residency must be device on a server of several processes"));
  head.mutable_spec()->set_residency(v1::RESIDENCY_DEVICE);
  EXPECT_TRUE(client->CreateHead(head).ok()) << "the name is free, and nothing is held";
}

TEST(ServiceRanksThreadsEndTest, ProcessesThatAreAskedToStopSayItOnce) {
  absl::Notification asked;  // notified twice, it ends the program
  ServerOfProcesses ranks(
      [&](ServerOptions& options) { options.ranks.on_leaving = [&asked] { asked.Notify(); }; }, 3);
  ranks.other(2).ranks().Leave("the test");
  ranks.other(1).ranks().Leave("the test");
  asked.WaitForNotification();
  EXPECT_TRUE(Connect(ranks.target())->CreateHead(SmallHead()).ok()) << "it goes on until it has drained";
  ranks.Stop();
  EXPECT_TRUE(ranks.other(1).AwaitEnd().status.ok());
  EXPECT_TRUE(ranks.other(2).AwaitEnd().status.ok());
}

// The last process is two workers alone, of which the test reports one's loss.
TEST(ServiceRanksThreadsEndTest, ALostDeviceEndsAllProcesses) {
  log::Configure(log::LogLevel::kOff, log::LogFormat::kText);
  const int port = test::FreePort();
  test::TempFolder folder;
  const ServerOptions of_lost = OptionsOf(2, 3, port);
  auto own = CreateOwnBackends(of_lost);
  ASSERT_TRUE(own.ok()) << own.status();
  std::vector<std::unique_ptr<ranks::Worker>> lost;
  std::vector<std::thread> threads;
  for (const int rank : {4, 5}) {
    auto worker = CreateWorker(of_lost, {.rank = rank, .devices = 2, .on_joined = [] {}},
                               std::move((*own)[static_cast<size_t>(rank) - 4]));
    ASSERT_TRUE(worker.ok()) << worker.status();
    lost.push_back(*std::move(worker));
    threads.emplace_back([worker = lost.back().get()] { EXPECT_FALSE(worker->Run().ok()); });
  }
  OtherProcess other(OptionsOf(1, 3, port));
  absl::Notification heard;
  ServerOptions options = OptionsOf(0, 3, port);
  options.checkpoint_directory = folder.File("checkpoints");
  options.on_device_lost = [&](const absl::Status&) { heard.Notify(); };
  auto server = Server::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  const auto client =
      client::Client::Connect({.target = (*server)->grpc_address(), .retry = {.max_attempts = 1}}).value();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  const SmallRows data = MakeSmallRows(2000, rng);
  std::vector<float> grads(data.hidden.size());
  client::ComputeOptions compute;
  compute.accumulate_gradients = true;
  compute.max_attempts = 1;
  std::thread reporter([&] { lost.front()->ReportLoss(absl::UnavailableError("the device of the test")); });
  absl::Status failed;
  for (uint64_t id = 0; failed.ok(); ++id) {
    failed =
        client->ComputeLoss(SmallMicrobatch(data, 0, id), {.grad_hidden = grads.data()}, compute).status();
  }
  EXPECT_THAT(std::string(failed.message()), HasSubstr("lost"));
  reporter.join();
  heard.WaitForNotification();
  const RanksEnd end = other.AwaitEnd();
  EXPECT_FALSE(end.status.ok());
  EXPECT_TRUE(end.joined) << "so that the process ends with status 3";
  for (std::thread& thread : threads) thread.join();
  (*server)->Drain(clocks::SteadyNow());
  server->reset();
}

TEST(ServiceRanksThreadsEndTest, AServerThatCannotFormEndsItsOtherDevice) {
  log::Configure(log::LogLevel::kOff, log::LogFormat::kText);
  ServerOptions options = OptionsOf(0, 2, test::FreePort());
  options.ranks.timeout = absl::Milliseconds(300);
  const auto server = Server::Start(options);
  EXPECT_THAT(std::string(server.status().message()),
              HasSubstr("ranks 2, 3 of 4 have not come within 300ms"));
}

}  // namespace
}  // namespace lossd::app::testing::ranks_threads_test
