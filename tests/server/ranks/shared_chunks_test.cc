// SPDX-License-Identifier: Apache-2.0
// Chunks whose rows lie in memory that leader and worker share: hidden states and their gradients leave the
// messages, and results are the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/ranks/messages.h"
#include "server/ranks/remote_backend.h"
#include "server/ranks/shared_rows.h"
#include "tests/server/app/forwarding_backend.h"
#include "tests/server/ranks/local_worker.h"

namespace lossd::ranks::shared_chunks_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHidden = 512, kClasses = 9, kRows = 64;
constexpr int64_t kChunkBytes = kRows * kHidden * int64_t{sizeof(float)};

std::unique_ptr<kernels::Backend> MakeBackend() { return kernels::CreateCpuBackend({.threads = 1}).value(); }

int64_t Staging(const kernels::Backend& backend) {
  return backend.memory().current[kernels::MemoryKind::kStaging];
}

class SharedChunksTest : public ::testing::Test {
 protected:
  ~SharedChunksTest() override {
    worker_backend_.reset();
    if (local_ != nullptr) local_->Cancel();
    if (reader_.joinable()) reader_.join();
  }

  // A worker whose rows lie in the leader's memory, as far as its backend takes that.
  void StartWorker(std::unique_ptr<kernels::Backend> backend) {
    rows_ = SharedRows::Listen(2).value();
    local_ = std::make_unique<LocalWorker>(std::move(backend));
    v1::Prepare prepare;
    prepare.set_rows_socket(rows_->socket());
    prepare.set_rows_token(rows_->TokenOf(1));
    const absl::Status shared = local_->heads().UseRowsOf(prepare);
    ASSERT_TRUE(shared.ok()) << shared;
    v1::Hello hello;
    hello.set_rank(1);
    *hello.mutable_backend() = ToProto(local_->backend().info(), 1);
    stream_ = std::make_shared<WorkerStream>(std::move(hello), local_.get());
    stream_->ShareRows(&rows_->regions());
    reader_ = std::thread([this] { stream_->Run([](const absl::Status&) {}, [](const std::string&) {}); });
    worker_backend_ = RemoteBackend::Create(stream_).value();
  }

  std::unique_ptr<kernels::StagingMemory> Allocate(int64_t bytes) {
    auto memory = rows_->Allocate(own_.get(), bytes);
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }

  std::unique_ptr<kernels::Backend> own_ = MakeBackend();
  std::unique_ptr<SharedRows> rows_;
  std::unique_ptr<LocalWorker> local_;
  std::shared_ptr<WorkerStream> stream_;
  std::thread reader_;
  std::unique_ptr<kernels::Backend> worker_backend_;
};

std::unique_ptr<kernels::HeadKernels> MakeHead(kernels::Backend& backend) {
  auto head = backend.CreateHead({.hidden_size = kHidden, .vocab_size = kClasses});
  EXPECT_TRUE(head.ok()) << head.status();
  std::vector<float> weight(kClasses * kHidden);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i % 17) / 64 - 0.1f;
  const absl::Status written = (*head)->WriteTensor(
      {kernels::Param::kWeight, kernels::Role::kValue}, 0, kClasses, kernels::DType::kFloat32,
      {reinterpret_cast<const uint8_t*>(weight.data()), weight.size() * sizeof(float)});
  EXPECT_TRUE(written.ok()) << written;
  return *std::move(head);
}

// Two slices in `memory`, whose gradients overwrite them; the losses.
std::vector<float> Compute(kernels::HeadKernels& head, absl::Span<uint8_t> memory) {
  auto* const hidden = reinterpret_cast<float*>(memory.data());
  for (int64_t i = 0; i < kRows * kHidden; ++i) hidden[i] = static_cast<float>(i % 31) / 32;
  std::vector<int32_t> targets(kRows);
  for (size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<int32_t>(i % (kClasses + 1)) - 1;
  std::vector<float> losses(kRows);
  kernels::Slice slices[2];
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t first = i * kRows / 2;
    slices[i].rows = kRows / 2;
    slices[i].hidden = slices[i].grad_hidden = hidden + first * kHidden;
    slices[i].targets = targets.data() + first;
    slices[i].out.loss = losses.data() + first;
  }
  kernels::Chunk chunk;
  chunk.hidden_dtype = kernels::DType::kFloat32;
  chunk.slices = absl::MakeSpan(slices);
  absl::Notification done;
  head.Submit(&chunk, {.on_results = [](absl::Status status) { EXPECT_TRUE(status.ok()) << status; },
                       .on_done =
                           [&](absl::Status status) {
                             EXPECT_TRUE(status.ok()) << status;
                             done.Notify();
                           }});
  done.WaitForNotification();
  return losses;
}

std::vector<uint8_t> Copy(absl::Span<const uint8_t> bytes) { return {bytes.begin(), bytes.end()}; }

TEST_F(SharedChunksTest, RowsAreComputedWhereTheyLie) {
  StartWorker(MakeBackend());
  const auto memory = Allocate(kChunkBytes);
  const auto head = MakeHead(*worker_backend_);
  const auto own_head = MakeHead(*own_);
  std::vector<uint8_t> want(kChunkBytes);
  const std::vector<float> want_losses = Compute(*own_head, absl::MakeSpan(want));
  const size_t sent = local_->bytes_sent(), heard = local_->bytes_heard();
  EXPECT_EQ(Compute(*head, memory->bytes()), want_losses);
  EXPECT_EQ(Copy(memory->bytes()), want) << "the gradients are where the hidden states were";
  // Targets and losses, 4 bytes a row each, and what belongs to a message.
  EXPECT_LT(local_->bytes_sent() - sent, 4 * kRows + 512);
  EXPECT_LT(local_->bytes_heard() - heard, 4 * kRows + 2048);
  EXPECT_EQ(Staging(local_->backend()), 0) << "the worker has no memory for rows";
}

TEST_F(SharedChunksTest, RowsElsewhereTravelInMessages) {
  StartWorker(MakeBackend());
  const auto memory = Allocate(kChunkBytes);
  const auto head = MakeHead(*worker_backend_);
  const auto own_head = MakeHead(*own_);
  std::vector<uint8_t> want(kChunkBytes), got(kChunkBytes);
  const std::vector<float> want_losses = Compute(*own_head, absl::MakeSpan(want));
  const size_t sent = local_->bytes_sent(), heard = local_->bytes_heard();
  EXPECT_EQ(Compute(*head, absl::MakeSpan(got)), want_losses);
  EXPECT_EQ(got, want);
  EXPECT_GT(local_->bytes_sent() - sent, static_cast<size_t>(kChunkBytes));
  EXPECT_GT(local_->bytes_heard() - heard, static_cast<size_t>(kChunkBytes));
}

// Its backend takes no memory of others, as one whose driver cannot register it.
TEST_F(SharedChunksTest, AWorkerThatCannotMapGetsMessages) {
  StartWorker(std::make_unique<kernels::ForwardingBackend>(MakeBackend()));
  const auto memory = Allocate(kChunkBytes);
  const auto head = MakeHead(*worker_backend_);
  const auto own_head = MakeHead(*own_);
  std::vector<uint8_t> want(kChunkBytes);
  const std::vector<float> want_losses = Compute(*own_head, absl::MakeSpan(want));
  const size_t sent = local_->bytes_sent();
  EXPECT_EQ(Compute(*head, memory->bytes()), want_losses);
  EXPECT_EQ(Copy(memory->bytes()), want);
  EXPECT_GT(local_->bytes_sent() - sent, static_cast<size_t>(kChunkBytes));
}

TEST_F(SharedChunksTest, ASliceThatNamesWhatThereIsNotIsRefused) {
  StartWorker(MakeBackend());
  const auto memory = Allocate(kChunkBytes);
  const auto head = MakeHead(*worker_backend_);
  const uint64_t region = rows_->regions().Find(1, memory->bytes().data(), 1)->region();
  v1::ChunkStart start;
  start.set_head(1);
  start.set_hidden_dtype(static_cast<uint32_t>(kernels::DType::kFloat32));
  start.set_slices(1);
  start.set_rows(1);
  v1::ChunkSlice slice;
  slice.set_rows(1);
  slice.set_targets(std::string(4, '\0'));
  const auto submit = [&] { return local_->heads().Submit(start, {slice}); };
  slice.mutable_hidden_at()->set_region(region + 1);
  EXPECT_THAT(std::string(submit().message()), HasSubstr("which there is not"));
  slice.mutable_hidden_at()->set_region(region);
  slice.mutable_hidden_at()->set_offset(kChunkBytes - kHidden * sizeof(float) + 1);
  EXPECT_THAT(std::string(submit().message()), HasSubstr("of memory that has"));
  slice.mutable_hidden_at()->set_offset(std::numeric_limits<uint64_t>::max() - 7);
  EXPECT_THAT(std::string(submit().message()), HasSubstr("of memory that has"));
  slice.mutable_hidden_at()->set_offset(0);
  slice.mutable_grad_hidden_at()->set_region(region);
  slice.mutable_grad_hidden_at()->set_offset(kChunkBytes);
  EXPECT_THAT(std::string(submit().message()), HasSubstr("of memory that has"));
  slice.clear_grad_hidden_at();
  slice.set_hidden(std::string(kHidden * sizeof(float), '\0'));
  EXPECT_THAT(std::string(submit().message()), HasSubstr("bytes of hidden states instead of 0"));
  slice.clear_hidden();
  slice.set_rows(std::numeric_limits<int64_t>::max());
  EXPECT_THAT(std::string(submit().message()), HasSubstr("too many rows"));
  slice.set_rows(-1);
  EXPECT_THAT(std::string(submit().message()), HasSubstr("too many rows"));
}

}  // namespace
}  // namespace lossd::ranks::shared_chunks_test
