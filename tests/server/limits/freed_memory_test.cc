// SPDX-License-Identifier: Apache-2.0
// What is freed goes back to the system, whatever threads of the server took it, and in whatever order.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/server/limits/attacks_fixture.h"

namespace lossd::app::testing::freed_memory_test {
namespace {

// That the allocator may keep (server/app/process.h), and what else stays after the first calls.
constexpr int64_t kMostFree = (64 + 16) * kMebibyte;

class FreedMemoryTest : public AttacksTest {
 protected:
  // Creates and deletes a head of some MiB, again and again.
  void ComeAndGo(const std::string& name) const {
    const auto client = TestClient::Connect(server_->target());
    for (uint64_t i = 0; i < 40; ++i) {
      v1::CreateHeadRequest request;
      request.mutable_spec()->set_name(name);
      request.mutable_spec()->set_hidden_size(256);
      request.mutable_spec()->set_vocab_size(4096 + 1024 * (i % 8));
      const auto created = client->CreateHead(request);
      ASSERT_TRUE(created.ok()) << created.status();
      ASSERT_TRUE(client->DeleteHead(name).ok());
    }
  }
  // Sends requests that stay unfinished, of 192 MiB in all, and goes away.
  void Burst() const {
    std::vector<std::unique_ptr<RawHttp2>> connections;
    for (int i = 0; i < 8; ++i) {
      connections.push_back(std::make_unique<RawHttp2>(server_->target()));
      for (int j = 0; j < 6; ++j) {
        const uint32_t call = connections.back()->Call("/lossd.v1.HeadService/ApplyStep");
        connections.back()->Message(call, 5 * kMebibyte, "", 4 * kMebibyte);
      }
    }
    Pump(connections, absl::Seconds(4));
  }
  // How much resident memory has grown by, once it is at most kMostFree, or after two minutes.
  int64_t GrownAtRest() const {
    int64_t grown = Resident() - before_;
    for (int i = 0; i < 1200 && grown > kMostFree; ++i) {
      absl::SleepFor(absl::Milliseconds(100));
      grown = Resident() - before_;
    }
    return grown;
  }
};

// The thread that makes a head takes its memory, which then stayed in the arena of that thread.
TEST_F(FreedMemoryTest, HeadsThatComeAndGo) {
  Start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) threads.emplace_back([this, i] { ComeAndGo(absl::StrCat("passing", i)); });
  for (std::thread& each : threads) each.join();
  EXPECT_LE(GrownAtRest(), kMostFree);
  Train();
}

// Pieces of messages are smaller than what is mapped by itself; what stays lies among them in the arenas.
TEST_F(FreedMemoryTest, BurstsOfMessages) {
  Start({kPatient, kPatient + 4}, 256 * kMebibyte);
  for (int i = 0; i < 3; ++i) Burst();
  EXPECT_LE(GrownAtRest(), kMostFree);
  Train();
}

}  // namespace
}  // namespace lossd::app::testing::freed_memory_test
