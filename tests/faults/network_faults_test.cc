// SPDX-License-Identifier: Apache-2.0
// Connections that break, stand still or are slow, between two messages and between any two bytes: the client
// repeats what broke, and training goes on as if nothing had happened.
#include <array>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "tests/faults/faults_test.h"

namespace lossd::test::network_faults_test {
namespace {

using client::Client;

Fault::Action AnyCut(std::mt19937_64& random) {
  return DrawFrom(random, 1) == 0 ? Fault::Action::kReset : Fault::Action::kClose;
}
Direction AnyDirection(std::mt19937_64& random) {
  return DrawFrom(random, 1) == 0 ? Direction::kToServer : Direction::kToClient;
}

// Bytes, by direction.
using Traffic = std::array<int64_t, 2>;

// The cuts of one step: the first at any byte of `undisturbed`, each later one after at most `room` bytes.
class CutsOfStep {
 public:
  CutsOfStep(uint64_t seed, const Traffic& undisturbed, const Traffic& room)
      : random_(seed), most_(undisturbed), room_(room) {}

  Fault operator()() {
    const Direction direction = AnyDirection(random_);
    const int64_t most = std::exchange(most_, room_)[static_cast<size_t>(direction)];
    return {.direction = direction,
            .unit = Fault::Unit::kBytes,
            .after = DrawFrom(random_, most),
            .action = AnyCut(random_)};
  }

 private:
  std::mt19937_64 random_;
  Traffic most_;
  Traffic room_;
};

class NetworkFaultsTest : public FaultsTest {
 protected:
  // Trains a step without faults: the bytes that passed.
  Traffic TrainUndisturbed(Client& client, const Travel& travel) {
    proxy_.Heal();
    const Traffic before = proxy_.bytes();
    const absl::Status status = TrainStep(trainer_, client, travel);
    EXPECT_TRUE(status.ok()) << status;
    const Traffic after = proxy_.bytes();
    return {after[0] - before[0], after[1] - before[1]};
  }

  const std::unique_ptr<Client> client_ = Connect();
};

TEST_F(NetworkFaultsTest, CutAtEveryMessageBoundary) {
  for (int64_t round = 0; round < Scaled(1); ++round) {
    for (const Direction direction : {Direction::kToServer, Direction::kToClient}) {
      bool fired = true;
      for (int64_t message = 0; fired; ++message) {
        proxy_.Arm({.direction = direction, .after = message, .action = AnyCut(random_)});
        const absl::Status status = TrainStep(trainer_, *client_);
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_TRUE(Undisturbed()) << "cut after message " << message;
        fired = proxy_.fired();
      }
    }
  }
  EXPECT_GT(proxy_.cuts(), Scaled(40));
  Count("cuts", proxy_.cuts());
}

// The transport refuses a call after each of its messages, while others on the connection go on. A refusal
// that comes when the call has ended means nothing.
TEST_F(NetworkFaultsTest, RefusedAtEveryMessageBoundary) {
  for (int64_t round = 0; round < Scaled(1); ++round) {
    for (const Direction direction : {Direction::kToServer, Direction::kToClient}) {
      bool fired = true;
      for (int64_t message = 1; fired; ++message) {
        proxy_.Arm({.direction = direction, .after = message, .action = Fault::Action::kRefuse});
        const absl::Status status = TrainStep(trainer_, *client_);
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_TRUE(Undisturbed()) << "refused after message " << message;
        fired = proxy_.fired();
      }
    }
  }
  EXPECT_GT(proxy_.refusals(), Scaled(20));
  EXPECT_EQ(proxy_.cuts(), 0);
  Count("refusals", proxy_.refusals());
}

// What is refused each time fails with what the transport said, and the step can go on.
TEST_F(NetworkFaultsTest, RefusalsThatDoNotEnd) {
  const auto client =
      Client::Connect(
          {.target = proxy_.target(), .retry = {.max_attempts = 3, .initial_backoff = absl::Milliseconds(2)}})
          .value();
  proxy_.ArmEach(
      [] { return Fault{.direction = Direction::kToServer, .after = 1, .action = Fault::Action::kRefuse}; });
  const absl::Status refused = TrainStep(trainer_, *client);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "; tried 3 times")) << refused;
  proxy_.Heal();
  const absl::Status status = TrainStep(trainer_, *client);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Undisturbed());
}

// A call that broke is sent again as a whole. Its rows travel in messages while the client has no shared
// memory, which it may be refused for seconds after a break (RegionPauses). So later cuts of a step leave
// room for a step in messages; else no call would get through until then.
TEST_F(NetworkFaultsTest, CutAtAnyByte) {
  const Traffic room = TrainUndisturbed(*Connect("grpc"), kMostTraffic);
  for (int64_t i = 0; i < Scaled(60); ++i) {
    const Travel travel = AnyTravel();
    const Traffic undisturbed = TrainUndisturbed(*client_, travel);
    proxy_.ArmEach(CutsOfStep(random_(), undisturbed, room));
    const absl::Status status = TrainStep(trainer_, *client_, travel);
    ASSERT_TRUE(status.ok()) << status;
  }
  proxy_.Heal();
  EXPECT_TRUE(Undisturbed());
  EXPECT_GT(proxy_.cuts(), Scaled(40));
  Count("cuts", proxy_.cuts());
}

TEST_F(NetworkFaultsTest, SlowConnections) {
  proxy_.Delay(absl::Milliseconds(4));
  for (int64_t i = 0; i < Scaled(4); ++i) {
    const absl::Status status = TrainStep(trainer_, *client_, AnyTravel());
    ASSERT_TRUE(status.ok()) << status;
    Count("slow steps");
  }
  EXPECT_TRUE(Undisturbed());
}

// The trainer's patience ends, and it says everything again; what stood still arrives after all, late and a
// second time.
TEST_F(NetworkFaultsTest, ConnectionsStandStillBeyondTheDeadline) {
  const absl::Duration patience = absl::Milliseconds(150);
  const auto client =
      Client::Connect({.target = proxy_.target(), .call_timeout = patience, .loss_timeout = patience})
          .value();
  for (int64_t i = 0; i < Scaled(15); ++i) {
    proxy_.Arm({.direction = AnyDirection(random_), .after = Draw(25), .action = Fault::Action::kHold});
    absl::Status status = TrainStep(trainer_, *client, AnyTravel());
    if (!status.ok()) {
      ASSERT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
      Count("deadlines");
    }
    proxy_.Heal();
    for (int attempt = 0; attempt < 20 && trainer_.step() == static_cast<uint64_t>(i); ++attempt) {
      status = TrainStep(trainer_, *client, AnyTravel());
    }
    ASSERT_EQ(trainer_.step(), static_cast<uint64_t>(i) + 1) << status;
    ASSERT_TRUE(Undisturbed());
  }
}

// A client that chooses its connections opens further ones and drops them, while any of them is cut.
class ConnectionFaultsTest : public FaultsTest {
 protected:
  // 8 MiB a microbatch.
  ConnectionFaultsTest() : FaultsTest({.hidden_size = 2048, .vocab_size = 16, .microbatch_rows = 1024}) {}
};

TEST_F(ConnectionFaultsTest, CutWhileConnectionsComeAndGo) {
  client::ClientOptions options{.target = proxy_.target(),
                                .retry = {.max_attempts = 1000,
                                          .initial_backoff = absl::Milliseconds(2),
                                          .max_backoff = absl::Milliseconds(20)},
                                .transport = "grpc"};
  const auto client = Client::Connect(options).value();
  EXPECT_EQ(client->transport().connections.connections, 1);
  proxy_.ArmEach([this] {
    return Fault{.direction = AnyDirection(random_), .unit = Fault::Unit::kBytes, .after = Draw(60 << 20)};
  });
  // Until a trial of another connection has ended, and some steps beyond.
  const auto tried = [&client] { return absl::StrContains(client->transport().connections.reason, "GB/s"); };
  int beyond = 0;
  for (int i = 0; i < 200 && beyond < Scaled(4); ++i) {
    const absl::Status status = TrainStep(trainer_, *client, {.streams = 0, .slice_bytes = 64 << 10});
    ASSERT_TRUE(status.ok()) << status;
    beyond += tried() ? 1 : 0;
  }
  EXPECT_TRUE(tried()) << client->transport().connections.reason;
  EXPECT_TRUE(Undisturbed());
  EXPECT_GT(proxy_.cuts(), 0);
  Count("cuts", proxy_.cuts());
}

}  // namespace
}  // namespace lossd::test::network_faults_test
