// SPDX-License-Identifier: Apache-2.0
// The region socket: clients that come, go, die, fork and lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/regions.h"
#include "kernels/clocks/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/access/listening_socket.h"
#include "server/regions/regions.h"
#include "tests/server/access/await_closing.h"

namespace lossd::regions::session_server_test {
namespace {

using client::internal::SharedRegion;
using ::testing::HasSubstr;

constexpr int64_t kMebibyte = int64_t{1} << 20;
constexpr absl::Duration kPatience = absl::Seconds(60);

size_t OpenDescriptors() {
  access::AwaitClosing();
  const std::filesystem::directory_iterator begin("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

size_t Mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("lossd-region") != std::string::npos;
  return count;
}

class SessionServerTest : public ::testing::Test {
 protected:
  void Start(SessionLimits limits = {}) {
    backend_ = *kernels::CreateCpuBackend({.threads = 1});
    regions_ = std::make_unique<Regions>(backend_.get(), RegionLimits{.host_bytes = 32 * kMebibyte}, 0.5);
    const std::string name = absl::StrCat("lossd-test-", getpid(), "-", std::random_device()());
    socket_ = absl::StrCat("@", name);
    server_ = std::make_unique<SessionServer>(*access::ListeningSocket::OpenAbstract(name, SOCK_SEQPACKET),
                                              regions_.get(), limits);
  }
  absl::StatusOr<std::shared_ptr<SharedRegion>> Open(uint64_t bytes = kMebibyte) const {
    return SharedRegion::Open(socket_, bytes, kPatience);
  }
  // Waits until nothing is left of any client.
  bool Empty() const {
    const absl::Time end = clocks::SteadyNow() + kPatience;
    while (server_->sessions() > 0 || regions_->used_bytes() > 0) {
      if (clocks::SteadyNow() > end) return false;
      absl::SleepFor(absl::Milliseconds(2));
    }
    return true;
  }
  // Empty, and as many descriptors as before. Clients that have ended may still be waiting to be accepted:
  // what they bring comes and goes after they do.
  testing::AssertionResult EmptyWith(size_t descriptors) const {
    const absl::Time end = clocks::SteadyNow() + kPatience;
    while (!Empty() || OpenDescriptors() != descriptors) {
      if (clocks::SteadyNow() > end)
        return testing::AssertionFailure() << OpenDescriptors() << " descriptors, not " << descriptors << "; "
                                           << server_->sessions() << " sessions";
      absl::SleepFor(absl::Milliseconds(2));
    }
    return testing::AssertionSuccess();
  }
  // Sends a packet as a new client; what the server answers.
  absl::StatusOr<v1::RegionAnswer> Ask(absl::string_view packet) const {
    const auto socket = wire::ConnectRegionSocket(socket_);
    if (!socket.ok()) return socket.status();
    if (absl::Status sent = wire::SendRegionPacket(socket->get(), packet, -1); !sent.ok()) return sent;
    absl::StatusOr<wire::RegionPacket> answer = wire::ReceiveRegionPacket(socket->get());
    const absl::Time end = clocks::SteadyNow() + kPatience;
    while (!answer.ok() && clocks::SteadyNow() < end) {
      absl::SleepFor(absl::Milliseconds(1));
      answer = wire::ReceiveRegionPacket(socket->get());
    }
    if (!answer.ok()) return answer.status();
    return wire::ParseRegionAnswer(answer->bytes);
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Regions> regions_;
  std::string socket_;
  std::unique_ptr<SessionServer> server_;
};

TEST_F(SessionServerTest, SharesMemory) {
  Start();
  const auto region = Open();
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ((*region)->size(), static_cast<uint64_t>(kMebibyte));
  EXPECT_TRUE((*region)->usable());
  (*region)->At(12345)[0] = 99;
  const auto claimed = regions_->Claim((*region)->id(), "");
  ASSERT_NE(claimed, nullptr);
  EXPECT_EQ(claimed->bytes()[12345], 99);
}

TEST_F(SessionServerTest, ForgetsARegionWhenItsSessionCloses) {
  Start();
  auto region = Open();
  ASSERT_TRUE(region.ok());
  const std::string id = (*region)->id();
  region->reset();
  EXPECT_TRUE(Empty());
  EXPECT_EQ(regions_->Claim(id, ""), nullptr);
}

TEST_F(SessionServerTest, TellsClientsThatItHasGone) {
  Start();
  const auto region = Open();
  ASSERT_TRUE(region.ok());
  server_.reset();
  // Another thread closes the connections.
  for (const absl::Time end = clocks::SteadyNow() + kPatience;
       (*region)->usable() && clocks::SteadyNow() < end;) {
    absl::SleepFor(absl::Milliseconds(2));
  }
  EXPECT_FALSE((*region)->usable());
  (*region)->At(0)[0] = 1;  // the mapping stays
  EXPECT_EQ(Open().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(SessionServerTest, TwoClientsHaveDifferentMemory) {
  Start();
  const auto one = Open(), other = Open();
  ASSERT_TRUE(one.ok() && other.ok());
  EXPECT_NE((*one)->id(), (*other)->id());
  std::fill_n((*one)->At(0), (*one)->size(), uint8_t{1});
  for (uint64_t i = 0; i < (*other)->size(); ++i) ASSERT_EQ((*other)->At(0)[i], 0);
}

TEST_F(SessionServerTest, MemoryComesWithoutBytesOfThoseBefore) {
  Start();
  for (int i = 0; i < 20; ++i) {
    const auto region = Open();
    ASSERT_TRUE(region.ok()) << region.status();
    for (uint64_t k = 0; k < (*region)->size(); ++k) ASSERT_EQ((*region)->At(0)[k], 0);
    std::fill_n((*region)->At(0), (*region)->size(), uint8_t{0xff});
  }
}

TEST_F(SessionServerTest, RefusesWhatIsNoRequest) {
  Start();
  for (const std::string& packet :
       {std::string("x"), std::string(1, '\0'), std::string(4096, '\xff'), std::string("\x08\x00", 2)}) {
    const auto answer = Ask(packet);
    EXPECT_FALSE(answer.ok() && answer->has_opened()) << packet.size();
  }
  v1::RegionRequest request;
  for (const uint64_t bytes : {uint64_t{0}, ~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 62}) {
    request.set_bytes(bytes);
    const auto answer = Ask(request.SerializeAsString());
    EXPECT_FALSE(answer.ok() && answer->has_opened()) << bytes;
  }
  EXPECT_TRUE(Empty());
  EXPECT_TRUE(Open().ok()) << "the server is still there";
}

TEST_F(SessionServerTest, ASessionHasOneRegion) {
  Start();
  const auto socket = wire::ConnectRegionSocket(socket_);
  ASSERT_TRUE(socket.ok());
  v1::RegionRequest request;
  request.set_bytes(4096);
  for (int i = 0; i < 2; ++i)
    ASSERT_TRUE(wire::SendRegionPacket(socket->get(), request.SerializeAsString(), -1).ok());
  const absl::Time end = clocks::SteadyNow() + kPatience;
  auto packet = wire::ReceiveRegionPacket(socket->get());
  while (!(packet.ok() && packet->closed) && clocks::SteadyNow() < end) {
    absl::SleepFor(absl::Milliseconds(2));
    packet = wire::ReceiveRegionPacket(socket->get());
  }
  EXPECT_TRUE(packet.ok() && packet->closed) << "the second request ends the session";
  EXPECT_TRUE(Empty());
}

TEST_F(SessionServerTest, ClosesDescriptorsThatComeUnasked) {
  Start();
  Open().IgnoreError();
  ASSERT_TRUE(Empty());
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 50; ++i) {
    const auto socket = wire::ConnectRegionSocket(socket_);
    wire::SendRegionPacket(socket->get(), "x", STDERR_FILENO).IgnoreError();
  }
  EXPECT_TRUE(EmptyWith(before));
}

TEST_F(SessionServerTest, ThoseWhoSayNothingGo) {
  Start({.request_timeout = absl::Milliseconds(50)});
  const auto silent = wire::ConnectRegionSocket(socket_);
  const auto region = Open();
  ASSERT_TRUE(silent.ok() && region.ok());
  const absl::Time end = clocks::SteadyNow() + kPatience;
  while (server_->sessions() != 1 && clocks::SteadyNow() < end) absl::SleepFor(absl::Milliseconds(2));
  EXPECT_EQ(server_->sessions(), 1);
  EXPECT_TRUE((*region)->usable());
}

TEST_F(SessionServerTest, BoundsSessions) {
  Start({.per_user = 2});
  const auto one = Open(4096), two = Open(4096);
  EXPECT_TRUE(one.ok() && two.ok());
  // The server may close before the request comes, or with the request unread: the reason arrives all the
  // same.
  for (int i = 0; i < 300; ++i)
    ASSERT_THAT(std::string(Open(4096).status().message()), HasSubstr("too many programs")) << i;
}

// Another thread closes the server's end of a connection, maybe much later.
TEST_F(SessionServerTest, AClientThatHasGoneCountsNoMore) {
  Start({.per_user = 1});
  for (int i = 0; i < 500; ++i) {
    const auto region = Open(4096);
    ASSERT_TRUE(region.ok()) << i << region.status();
  }
}

TEST_F(SessionServerTest, AThousandClientsLeaveNothingBehind) {
  Start();
  Open().IgnoreError();
  ASSERT_TRUE(Empty());
  const size_t descriptors = OpenDescriptors(), mappings = Mappings();
  const int64_t staging = backend_->memory().current.Total();
  for (int i = 0; i < 1000; ++i) {
    auto region = Open(64 << 10);
    ASSERT_TRUE(region.ok()) << i << region.status();
    (*region)->At(0)[i] = 1;
  }
  EXPECT_TRUE(EmptyWith(descriptors));
  EXPECT_EQ(Mappings(), mappings);
  EXPECT_EQ(backend_->memory().current.Total(), staging);
}

// A client that is killed while children of it live on, which have its descriptors.
TEST_F(SessionServerTest, AKilledClientsRegionGoesAlthoughItsChildLives) {
  Start();
  int ready[2], hold[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(hold), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto region = Open();
    if (fork() == 0) {  // inherits the session's socket
      char byte = 0;
      close(hold[1]);
      (void)!read(hold[0], &byte, 1);  // until the test closes it
      _exit(0);
    }
    (void)!write(ready[1], region.ok() ? "y" : "n", 1);
    pause();
    _exit(0);
  }
  close(hold[0]);
  char opened = 0;
  ASSERT_EQ(read(ready[0], &opened, 1), 1);
  ASSERT_EQ(opened, 'y');
  EXPECT_EQ(regions_->used_bytes(), kMebibyte);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(Empty());
  close(hold[1]);
  for (const int descriptor : ready) close(descriptor);
}

TEST_F(SessionServerTest, ClientsThatAreKilledAtAnyMomentLeaveNothingBehind) {
  Start();
  Open().IgnoreError();
  ASSERT_TRUE(Empty());
  const size_t descriptors = OpenDescriptors();
  std::mt19937 rng(5);
  for (int i = 0; i < 60; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      while (true) {
        auto region = SharedRegion::Open(socket_, 256 << 10, kPatience);
        if (region.ok()) (*region)->At(0)[0] = 1;
      }
    }
    absl::SleepFor(absl::Microseconds(rng() % 5000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  EXPECT_TRUE(EmptyWith(descriptors));
  EXPECT_EQ(Mappings(), 0u);
}

TEST_F(SessionServerTest, AForkedChildDoesNotUseItsParentsRegion) {
  Start();
  const auto region = Open();
  ASSERT_TRUE(region.ok());
  const pid_t child = fork();
  if (child == 0) _exit((*region)->usable() ? 1 : 0);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace lossd::regions::session_server_test
