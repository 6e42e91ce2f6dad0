// SPDX-License-Identifier: Apache-2.0
// FaultsTest: the base of the tests of faults. It has a small training run through a FaultProxy, the same run
// without disturbances, and the counts of the faults that were tried.
//
// Environment:
//   LOSSD_FAULT_SCALE   multiplies the number of attempts (default 1; a soak takes 20 and more)
//   LOSSD_TEST_SEED     the seed of all random choices, which each test prints
//   LOSSD_TEST_SHARES   the shares of heads that are split by vocabulary, such as "3,1"
//   LOSSD_TRANSPORT     how rows are sent (docs/transport.md); LOSSD_TEST_SOCKETS: what servers listen on
#ifndef LOSSD_TESTS_FAULTS_FAULTS_TEST_H_
#define LOSSD_TESTS_FAULTS_FAULTS_TEST_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "tests/faults/fault_proxy.h"
#include "tests/faults/small_run.h"
#include "tests/support/server_process.h"

namespace lossd::test {

inline uint64_t Environment(const char* name, uint64_t otherwise) {
  uint64_t value = 0;
  const char* text = std::getenv(name);
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

// A random number in [0, most].
inline int64_t DrawFrom(std::mt19937_64& random, int64_t most) {
  return std::uniform_int_distribution<int64_t>(0, most)(random);
}

class FaultsTest : public testing::Test {
 protected:
  explicit FaultsTest(const RunShape& shape = {}) : shape_(WithSeed(shape)) {
    std::cout << "LOSSD_TEST_SEED=" << seed_ << "\n";
    const auto created = direct_->CreateHead(HeadOf(shape_));
    EXPECT_TRUE(created.ok()) << created.status();
  }

  void TearDown() override {
    for (const auto& [what, count] : tried_) {
      std::cout << "tried: " << count << " " << what << "\n";
      RecordProperty(absl::StrReplaceAll(what, {{" ", "_"}}), static_cast<int>(count));
    }
  }

  static int64_t Scaled(int64_t count) {
    return count * static_cast<int64_t>(Environment("LOSSD_FAULT_SCALE", 1));
  }
  // A random number in [0, most]. Not thread-safe.
  int64_t Draw(int64_t most) { return DrawFrom(random_, most); }
  void Count(const std::string& what, int64_t count = 1) { tried_[what] += count; }

  // The Travel with the most bytes: the most streams, and one message for each row.
  static constexpr Travel kMostTraffic = {.streams = 3, .slice_bytes = 128};
  Travel AnyTravel() {
    return {.streams = static_cast<int>(1 + Draw(kMostTraffic.streams - 1)),
            .slice_bytes = kMostTraffic.slice_bytes + static_cast<uint64_t>(Draw(20000))};
  }

  // A client that connects through the proxy and repeats calls many times.
  std::unique_ptr<client::Client> Connect(const std::string& transport = client::TransportFromEnvironment()) {
    return client::Client::Connect({.target = proxy_.target(),
                                    .wait_for_server = true,
                                    .retry = {.max_attempts = 1000,
                                              .initial_backoff = absl::Milliseconds(2),
                                              .max_backoff = absl::Milliseconds(20)},
                                    .transport = transport})
        .value();
  }

  // Checks that the run has the same state as the run without disturbances.
  [[nodiscard]] testing::AssertionResult Undisturbed() {
    const auto image = TakeImage(trainer_, *direct_, shape_);
    if (!image.ok()) return testing::AssertionFailure() << image.status();
    const std::string difference = Difference(*image, undisturbed_.After(trainer_.step()));
    if (difference.empty()) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "after step " << trainer_.step() << ": " << difference;
  }

  static std::vector<std::string> ServerFlags() { return {"--deterministic"}; }

  const uint64_t seed_ = Environment("LOSSD_TEST_SEED", std::random_device()());
  std::mt19937_64 random_{seed_};
  const RunShape shape_;
  ServerProcess server_{LOSSD_BINARY, ServerFlags()};
  FaultProxy proxy_{server_.target(), seed_};
  UndisturbedRun undisturbed_{shape_, LOSSD_BINARY, ServerFlags()};
  std::unique_ptr<client::Client> direct_ = client::Client::Connect({.target = server_.target()}).value();
  SmallTrainer trainer_{shape_};

 private:
  RunShape WithSeed(RunShape shape) const {
    shape.seed = seed_;
    return shape;
  }

  std::map<std::string, int64_t> tried_;
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_FAULTS_FAULTS_TEST_H_
