// SPDX-License-Identifier: Apache-2.0
// Heads that are deleted while something of theirs, or another head of their name, is under way.
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::deletions_test {
namespace {

using DeletionsTest = EngineTest;

// Its calls have ended, and its weight gradient is still being computed.
TEST_F(DeletionsTest, ADeletionWaitsForTheChunkThatIsUnderWay) {
  absl::Notification has_results, goes_on;
  device_.asynchronous = true;
  device_.fail_done = [&](int64_t) {
    has_results.Notify();
    goes_on.WaitForNotification();
    return absl::InternalError("the device failed");
  };
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 2), collector);
  Send(*stream, 1, {0, 2});
  EXPECT_TRUE(collector->Wait().ok());
  has_results.WaitForNotification();
  stream.reset();
  std::atomic<bool> deleted = false;
  std::thread deletion([&] {
    EXPECT_TRUE(engine_->DeleteHead("head").ok());
    deleted = true;
  });
  while (engine_->Describe("head").ok()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(engine_->CreateHead("head", {.hidden_size = kHidden, .vocab_size = 10}).code(),
            absl::StatusCode::kAlreadyExists);
  absl::SleepFor(absl::Milliseconds(20));  // if it is too short, the deletion has had no time to be wrong
  EXPECT_FALSE(deleted);
  EXPECT_EQ(device_.heads, 1);
  goes_on.Notify();
  deletion.join();
  EXPECT_EQ(device_.heads, 0);
  device_.fail_done = [](int64_t) { return absl::OkStatus(); };
  AddHead("head");
  EXPECT_TRUE(engine_->ApplyStep("head", {}).ok()) << "what became of the first one is none of its business";
}

// Passes everything on; one creation waits.
class SlowBackend final : public kernels::Backend {
 public:
  static constexpr int64_t kSlowHidden = 7;

  explicit SlowBackend(kernels::Backend* backend) : backend_(backend) {}
  kernels::BackendInfo info() const override { return backend_->info(); }
  kernels::MemoryStats memory() const override { return backend_->memory(); }
  int max_chunks_in_flight() const override { return backend_->max_chunks_in_flight(); }
  absl::StatusOr<kernels::MemoryBytes> PlanHead(const kernels::HeadConfig& config) const override {
    return backend_->PlanHead(config);
  }
  absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> CreateHead(
      const kernels::HeadConfig& config) override {
    if (config.hidden_size == kSlowHidden) {
      creates.Notify();
      goes_on.WaitForNotification();
    }
    return backend_->CreateHead(config);
  }
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateStaging(int64_t bytes) override {
    return backend_->AllocateStaging(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> AllocateRetained(int64_t bytes) override {
    return backend_->AllocateRetained(bytes);
  }
  absl::Status PlanHostMemory(kernels::MemoryKind kind, int64_t bytes) override {
    return backend_->PlanHostMemory(kind, bytes);
  }

  absl::Notification creates, goes_on;

 private:
  kernels::Backend* const backend_;
};

// A head is deleted while it is being created, which fails; before the deletion has gone on, its name is that
// of another head.
TEST_F(DeletionsTest, ADeletionTakesNoOtherHeadOfTheName) {
  constexpr absl::Duration kBehind = absl::Milliseconds(30);  // if it is too short, another order is tried
  SlowBackend slow(&backend_);
  EngineOptions options;
  options.slice_bytes = kSliceBytes;
  options.staging_bytes = 64 * kSliceBytes;
  engine_ = Engine::Create(options, &slow, 42, {}).value();
  AddHead("head");
  absl::Notification device_is_busy, device_goes_on;
  std::vector<std::thread> callers;
  callers.emplace_back([&] {
    EXPECT_TRUE(engine_
                    ->OnDevice("head",
                               [&](head::Head&) {
                                 device_is_busy.Notify();
                                 device_goes_on.WaitForNotification();
                                 return absl::OkStatus();
                               })
                    .ok());
  });
  device_is_busy.WaitForNotification();
  const auto is_taken = [&](const char* name) {
    return absl::IsAlreadyExists(engine_->PlanHead(name, {.hidden_size = 1, .vocab_size = 2}).status());
  };
  const auto create = [&](const char* name, kernels::HeadConfig config, absl::StatusCode code) {
    callers.emplace_back([=, this] { EXPECT_EQ(engine_->CreateHead(name, config).code(), code); });
    while (!is_taken(name)) absl::SleepFor(absl::Milliseconds(1));
    absl::SleepFor(kBehind);
  };
  create("name", {.hidden_size = 1, .vocab_size = 2'000'000}, absl::StatusCode::kResourceExhausted);
  create("slow", {.hidden_size = SlowBackend::kSlowHidden, .vocab_size = 2}, absl::StatusCode::kOk);
  callers.emplace_back([&] { EXPECT_TRUE(engine_->DeleteHead("name").ok()); });
  absl::SleepFor(kBehind);
  device_goes_on.Notify();
  slow.creates.WaitForNotification();
  ASSERT_FALSE(is_taken("name"));
  create("name", {.hidden_size = 1, .vocab_size = 2}, absl::StatusCode::kOk);
  slow.goes_on.Notify();
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(engine_->PublishHead("name").ok());
  engine_.reset();  // before the backend
}

}  // namespace
}  // namespace lossd::engine::deletions_test
