// SPDX-License-Identifier: Apache-2.0
// Calls, clients and servers that end at awkward moments; limits under pressure; health and reflection.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/small_head.h"
#include "tests/server/service/test_server.h"
#include "tests/support/child_process.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_http.h"

namespace lossd::app::testing::lifecycle_test {
namespace {

using ::testing::Contains;

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

TEST(LifecycleTest, InProcessChannel) {
  TestServer server;
  const auto client = TestClient::Over(server.server().InProcessChannel());
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client));
  const LossAnswers answers = RunMicrobatch(*client, 40, 1);
  EXPECT_TRUE(answers.status.ok()) << answers.status;
  EXPECT_EQ(answers.slices.size(), 3u);
}

}  // namespace
}  // namespace lossd::app::testing::lifecycle_test
