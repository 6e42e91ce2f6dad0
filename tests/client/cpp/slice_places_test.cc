// SPDX-License-Identifier: Apache-2.0
// Slices that find no room in a region, whose other calls have all of it: played by the test, which takes it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/core.h"
#include "client/cpp/loss_call.h"
#include "client/cpp/regions.h"
#include "tests/support/server_process.h"

namespace lossd::client::internal::slice_places_test {
namespace {

using Kind = SlicePlaces::Place::Kind;

constexpr uint64_t kRegionBytes = 64 << 10;
constexpr uint64_t kRows = 300, kHidden = 24, kClasses = 97;
constexpr uint64_t kRowBytes = kHidden * sizeof(float);
constexpr uint64_t kSlice = 7 * kRowBytes;
constexpr absl::Duration kLong = absl::Hours(1);  // longer than a test may take

class SlicePlacesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Connect(server_.target());
    region_ = core_->connections().regions().Get();
    ASSERT_NE(region_, nullptr) << core_->connections().transport().reason;
    ASSERT_EQ(region_->size(), kRegionBytes);
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("lm");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_kaiming_uniform()->set_seed(7);
    const auto client = Client::Connect({.target = server_.target(), .transport = "grpc"});
    ASSERT_TRUE(client.ok()) << client.status();
    ASSERT_TRUE((*client)->CreateHead(request).ok());
    std::mt19937 random(5);
    for (float& value : hidden_) value = std::normal_distribution<float>()(random);
    for (int32_t& target : targets_) target = static_cast<int32_t>(random() % kClasses);
    const auto wanted =
        (*client)->ComputeLoss(MakeMicrobatch(), {.grad_hidden = wanted_.data()}, {.slice_bytes = kSlice});
    ASSERT_TRUE(wanted.ok()) << wanted.status();
  }

  void Connect(const std::string& target) {
    const ClientOptions options{.target = target,
                                .channels = 1,
                                .retry = {.max_attempts = 1},
                                .transport = "shared_memory",
                                .shared_memory_bytes = kRegionBytes};
    auto connections = Connections::Open(options);
    ASSERT_TRUE(connections.ok()) << connections.status();
    core_ = std::make_unique<Core>(options, *std::move(connections));
  }

  Microbatch MakeMicrobatch() const {
    return {.head = "lm",
            .hidden_size = kHidden,
            .hidden_dtype = v1::DTYPE_FP32,
            .hidden = hidden_.data(),
            .targets = targets_};
  }

  std::shared_ptr<LossCall> StartCall(std::vector<float>& gradient, absl::Duration patience) {
    auto call = std::make_shared<LossCall>(
        core_.get(), LossWork::Forward(MakeMicrobatch(), {.grad_hidden = gradient.data()}, {}),
        CallOptions{.streams = 1, .slice_bytes = kSlice, .patience = patience}, nullptr);
    call->Start();
    return call;
  }

  void AwaitWaiting(int calls) const {
    while (region_->waiting() != calls) absl::SleepFor(absl::Milliseconds(1));
  }

  void ExpectWanted(const std::vector<float>& gradient) const {
    for (size_t i = 0; i < gradient.size(); ++i) ASSERT_NEAR(gradient[i], wanted_[i], 1e-5) << i;
  }

  uint64_t moved_in_messages() const { return *core_->connections().moved(); }

  test::ServerProcess server_{LOSSD_BINARY};
  std::unique_ptr<Core> core_;
  std::shared_ptr<SharedRegion> region_;
  std::vector<float> hidden_ = std::vector<float>(kRows * kHidden);
  std::vector<int32_t> targets_ = std::vector<int32_t>(kRows);
  std::vector<float> wanted_ = std::vector<float>(kRows * kHidden);
  std::vector<float> gradient_ = std::vector<float>(kRows * kHidden, NAN);
};

TEST_F(SlicePlacesTest, ACallWaitsForWhatOthersGiveBack) {
  const uint64_t taken = region_->Take(kRegionBytes).value();
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  EXPECT_FALSE(call->Done());
  region_->Give(taken);
  const auto result = call->Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectWanted(gradient_);
  EXPECT_EQ(moved_in_messages(), 0u) << "all rows lay in the region";
  EXPECT_EQ(region_->waiting(), 0);
  EXPECT_EQ(region_->Take(kRegionBytes), uint64_t{0}) << "the call has given back what it took";
}

TEST_F(SlicePlacesTest, ManyCallsWaitAtOnce) {
  constexpr int kCalls = 8;
  const uint64_t taken = region_->Take(kRegionBytes).value();
  std::vector<std::vector<float>> gradients(kCalls, gradient_);
  std::vector<std::shared_ptr<LossCall>> calls;
  for (auto& gradient : gradients) calls.push_back(StartCall(gradient, kLong));
  AwaitWaiting(kCalls);
  region_->Give(taken);
  for (int i = 0; i < kCalls; ++i) {
    const auto result = calls[i]->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    ExpectWanted(gradients[i]);
  }
  EXPECT_EQ(moved_in_messages(), 0u);
}

TEST_F(SlicePlacesTest, ACallThatWaitsInVainGoesOnInMessages) {
  const uint64_t taken = region_->Take(kRegionBytes).value();
  for (const absl::Duration patience : {absl::ZeroDuration(), absl::Milliseconds(10)}) {
    std::fill(gradient_.begin(), gradient_.end(), NAN);
    const uint64_t before = moved_in_messages();
    const auto result = StartCall(gradient_, patience)->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    ExpectWanted(gradient_);
    EXPECT_EQ(moved_in_messages() - before, 2 * kRows * kRowBytes);
    EXPECT_EQ(region_->waiting(), 0);
  }
  region_->Give(taken);
}

TEST_F(SlicePlacesTest, ACallThatWaitsCanBeCancelled) {
  ASSERT_TRUE(region_->Take(kRegionBytes).has_value());
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  call->Cancel();
  EXPECT_EQ(call->Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(region_->waiting(), 0);
}

TEST_F(SlicePlacesTest, ACallThatWaitsEndsWithItsServer) {
  ASSERT_TRUE(region_->Take(kRegionBytes).has_value());
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  server_.Kill();
  EXPECT_EQ(call->Wait().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(region_->waiting(), 0);
}

TEST_F(SlicePlacesTest, AClientThatGoesEndsCallsThatWait) {
  ASSERT_TRUE(region_->Take(kRegionBytes).has_value());
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  core_ = nullptr;
  EXPECT_EQ(call->Wait().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(SlicePlacesTest, ARegionThatIsRetiredIsNotWaitedFor) {
  ASSERT_TRUE(region_->Take(kRegionBytes).has_value());
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  region_->Retire();
  const auto result = call->Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectWanted(gradient_);
  EXPECT_EQ(moved_in_messages(), 2 * kRows * kRowBytes);
}

TEST_F(SlicePlacesTest, WaitsOnlyWhereOthersAreInTheWay) {
  const std::vector<uint8_t> large(kRegionBytes + 1), small(100);
  int freed = 0;
  SlicePlaces places(region_, /*may_wait=*/true, std::nullopt);
  EXPECT_TRUE(places.WaitForOthers([&freed] { ++freed; }));
  EXPECT_EQ(places.Put(0, large)->kind, Kind::kMessage) << "the region is smaller";
  const uint64_t taken = region_->Take(kRegionBytes).value();
  EXPECT_EQ(places.Put(0, small)->kind, Kind::kWaitForOthers);
  EXPECT_EQ(places.Put(0, small)->kind, Kind::kWaitForOthers);
  EXPECT_EQ(region_->waiting(), 1);
  EXPECT_EQ(freed, 0);
  region_->Give(taken);
  EXPECT_EQ(freed, 1);
  EXPECT_EQ(places.Put(0, small)->kind, Kind::kRegion);
  // From here on it can wait for itself.
  ASSERT_TRUE(region_->Take(kRegionBytes - SharedRegion::kAlignment).has_value());
  EXPECT_EQ(places.Put(1, small)->kind, Kind::kWait);
  places.Free(0);
  const uint64_t rest = region_->Take(small.size()).value();
  EXPECT_EQ(places.Put(1, small)->kind, Kind::kWaitForOthers);
  places.StopWaitingForOthers();
  region_->Give(rest);
  EXPECT_EQ(freed, 1) << "it does not wait any more";
  ASSERT_TRUE(region_->Take(small.size()).has_value());
  EXPECT_EQ(places.Put(1, small)->kind, Kind::kMessage) << "once in vain is enough";
  places.End(absl::OkStatus());

  SlicePlaces in_order(region_, /*may_wait=*/false, std::nullopt);
  EXPECT_FALSE(in_order.WaitForOthers([] {}));
  EXPECT_EQ(in_order.Put(0, small)->kind, Kind::kMessage);
  in_order.End(absl::OkStatus());
  SlicePlaces in_messages(nullptr, /*may_wait=*/true, std::nullopt);
  EXPECT_FALSE(in_messages.WaitForOthers([] {}));
}

TEST_F(SlicePlacesTest, WaitersOfARegion) {
  int first = 0, second = 0;
  EXPECT_FALSE(region_->Await(kRegionBytes + 1, &first, [] {}));
  EXPECT_TRUE(region_->Await(1, &first, [&first] { ++first; }));
  EXPECT_EQ(first, 1) << "there is room already";
  const uint64_t half = region_->Take(kRegionBytes / 2).value();
  const uint64_t little = region_->Take(1).value();
  ASSERT_TRUE(region_->Take(kRegionBytes / 2 - SharedRegion::kAlignment).has_value());
  EXPECT_TRUE(region_->Await(kRegionBytes / 2, &first, [&first] { ++first; }));
  EXPECT_TRUE(region_->Await(1, &second, [&second] { ++second; }));
  region_->Give(little);
  EXPECT_EQ(first, 1) << "what is free is too small for it";
  EXPECT_EQ(second, 1);
  region_->Give(half);
  EXPECT_EQ(first, 2);
  EXPECT_EQ(region_->waiting(), 0);
  EXPECT_TRUE(region_->Await(kRegionBytes, &first, [&first] { ++first; }));
  region_->StopWaiting(&first);
  EXPECT_TRUE(region_->Await(kRegionBytes, &second, [&second] { ++second; }));
  region_->Retire();
  EXPECT_EQ(first, 2);
  EXPECT_EQ(second, 2);
  EXPECT_FALSE(region_->Await(kRegionBytes, &first, [] {}));
}

}  // namespace
}  // namespace lossd::client::internal::slice_places_test
