// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/worker_buffers.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"

namespace lossd::ranks::worker_buffers_test {
namespace {

using kernels::MemoryKind;

// A backend with two chunks in flight, whose memory can come to its end.
class LimitedBackend final : public kernels::Backend {
 public:
  kernels::BackendInfo info() const override { return cpu_->info(); }
  kernels::MemoryStats memory() const override { return cpu_->memory(); }
  int max_chunks_in_flight() const override { return 2; }
  absl::StatusOr<kernels::MemoryBytes> PlanHead(const kernels::HeadConfig& config) const override {
    return cpu_->PlanHead(config);
  }
  absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> CreateHead(
      const kernels::HeadConfig& config) override {
    return cpu_->CreateHead(config);
  }
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateStaging(int64_t bytes) override {
    if (left_ == 0) return absl::ResourceExhaustedError("no memory");
    --left_;
    return cpu_->AllocateStaging(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> AllocateRetained(int64_t bytes) override {
    return cpu_->AllocateRetained(bytes);
  }
  absl::Status PlanHostMemory(MemoryKind kind, int64_t bytes) override {
    return cpu_->PlanHostMemory(kind, bytes);
  }

  int64_t staging() const { return memory().current[MemoryKind::kStaging]; }
  void AllowMore(int buffers) { left_ = buffers; }

 private:
  const std::unique_ptr<kernels::Backend> cpu_ = kernels::CreateCpuBackend({.threads = 1}).value();
  int left_ = 100;
};

TEST(WorkerBuffersTest, WhatIsReservedIsThereForAsManyChunksAsAreInFlight) {
  LimitedBackend backend;
  WorkerBuffers buffers(&backend);
  ASSERT_TRUE(buffers.Reserve(1000).ok());
  backend.AllowMore(0);
  for (int round = 0; round < 3; ++round) {
    auto first = buffers.Take(1000), second = buffers.Take(1);
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_GE((*first)->bytes().size(), 1000u);
    EXPECT_EQ(buffers.Take(1000).status().code(), absl::StatusCode::kResourceExhausted);
    buffers.Return(*std::move(first));
    buffers.Return(*std::move(second));
  }
}

TEST(WorkerBuffersTest, WhatIsReservedStaysWhenALargerOneIsNotToBeHad) {
  LimitedBackend backend;
  WorkerBuffers buffers(&backend);
  ASSERT_TRUE(buffers.Reserve(1000).ok());
  backend.AllowMore(1);
  EXPECT_EQ(buffers.Reserve(5000).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(buffers.Take(5000).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(buffers.Take(1000).ok());
  EXPECT_TRUE(buffers.Take(1000).ok());
}

// Chunks of another head are under way while a larger one is created.
TEST(WorkerBuffersTest, SmallerOnesGoWhenLargerOnesAreReserved) {
  LimitedBackend backend;
  WorkerBuffers buffers(&backend);
  auto first = buffers.Take(100), second = buffers.Take(100);
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(buffers.Reserve(1000).ok());
  buffers.Return(*std::move(first));
  buffers.Return(*std::move(second));
  EXPECT_EQ(backend.staging(), 2000);
  backend.AllowMore(0);
  auto large = buffers.Take(1000), also_large = buffers.Take(1000);
  EXPECT_TRUE(large.ok() && also_large.ok());
}

TEST(WorkerBuffersTest, WithoutAReserveTheLargestChunkDecides) {
  LimitedBackend backend;
  WorkerBuffers buffers(&backend);
  for (const int64_t bytes : {100, 900, 300, 900}) {
    auto buffer = buffers.Take(bytes);
    ASSERT_TRUE(buffer.ok());
    EXPECT_GE(static_cast<int64_t>((*buffer)->bytes().size()), bytes);
    buffers.Return(*std::move(buffer));
  }
  EXPECT_LE(backend.staging(), 1000);
}

}  // namespace
}  // namespace lossd::ranks::worker_buffers_test
