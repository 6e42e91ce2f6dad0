// SPDX-License-Identifier: Apache-2.0
// Tests of rows.h: regions that hold rows, memory that ranks share, and chunks whose rows lie there.
#include "server/ranks/rows.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "proto/wire/shared_memory.h"
#include "server/ranks/messages.h"
#include "server/ranks/remote_backend.h"
#include "tests/server/access/await_closing.h"
#include "tests/server/app/forwarding_backend.h"
#include "tests/server/ranks/local_worker.h"

// ---- Row regions ----

namespace lossd::ranks::row_regions_test {
namespace {

constexpr size_t kBytes = 4096;

class RowRegionsTest : public ::testing::Test {
 protected:
  static wire::OwnedDescriptor AnyDescriptor() {
    return wire::OwnedDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  }
  uint64_t Add() { return regions_.Add(absl::MakeSpan(memory_), AnyDescriptor()); }
  // Tells worker `rank` all that there is, and has it map what it hears of.
  void TellAll(int rank, bool mapped = true) {
    while (const auto news = regions_.NextNews(rank)) {
      regions_.Told(rank, *news);
      if (news->message.bytes() > 0) {
        EXPECT_TRUE(regions_.OnAnswer(rank, news->message.region(), mapped));
      }
    }
  }
  uint8_t* at(size_t offset) { return memory_.data() + offset; }

  int news_ = 0;
  RowRegions regions_{3, [this] { ++news_; }};
  std::vector<uint8_t> memory_ = std::vector<uint8_t>(kBytes);
};

TEST_F(RowRegionsTest, RowsHaveAPlaceOnceAWorkerHasMappedThem) {
  ASSERT_TRUE(regions_.Enter(1));
  const uint64_t region = Add();
  EXPECT_EQ(news_, 1);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value()) << "it has not heard of it";
  const auto news = regions_.NextNews(1);
  ASSERT_TRUE(news.has_value());
  EXPECT_EQ(news->message.region(), region);
  EXPECT_EQ(news->message.bytes(), kBytes);
  EXPECT_TRUE(news->descriptor != nullptr && *news->descriptor);
  regions_.Told(1, *news);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value()) << "it has not answered";
  EXPECT_TRUE(regions_.OnAnswer(1, region, true));
  const auto place = regions_.Find(1, at(100), 50);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->region(), region);
  EXPECT_EQ(place->offset(), 100u);
  EXPECT_FALSE(regions_.Find(2, at(100), 50).has_value()) << "another worker, which is not here";
}

TEST_F(RowRegionsTest, BytesLieInOneRegionOrHaveNoPlace) {
  ASSERT_TRUE(regions_.Enter(1));
  Add();
  TellAll(1);
  EXPECT_TRUE(regions_.Find(1, at(0), kBytes).has_value());
  EXPECT_TRUE(regions_.Find(1, at(kBytes - 1), 1).has_value());
  EXPECT_TRUE(regions_.Find(1, at(0) + kBytes, 0).has_value());
  EXPECT_FALSE(regions_.Find(1, at(0), kBytes + 1).has_value());
  EXPECT_FALSE(regions_.Find(1, at(1), kBytes).has_value());
  EXPECT_FALSE(regions_.Find(1, at(0) - 1, 1).has_value());
  EXPECT_FALSE(regions_.Find(1, at(0) + kBytes + 1, 0).has_value());
  EXPECT_FALSE(regions_.Find(1, at(1), std::numeric_limits<size_t>::max()).has_value());
  EXPECT_FALSE(regions_.Find(1, nullptr, 1).has_value());
}

TEST_F(RowRegionsTest, AWorkerThatRefusesGetsMessages) {
  ASSERT_TRUE(regions_.Enter(1));
  ASSERT_TRUE(regions_.Enter(2));
  Add();
  TellAll(1, /*mapped=*/false);
  TellAll(2);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value());
  EXPECT_TRUE(regions_.Find(2, at(0), 1).has_value());
}

TEST_F(RowRegionsTest, AWorkerThatComesLaterHearsOfWhatThereIs) {
  Add();
  EXPECT_FALSE(regions_.NextNews(1).has_value());
  EXPECT_FALSE(regions_.AnyHere());
  ASSERT_TRUE(regions_.Enter(1));
  EXPECT_TRUE(regions_.AnyHere());
  TellAll(1);
  EXPECT_TRUE(regions_.Find(1, at(0), 1).has_value());
}

TEST_F(RowRegionsTest, AWorkerComesOnceAndHasNothingOnceItHasGone) {
  ASSERT_TRUE(regions_.Enter(1));
  EXPECT_FALSE(regions_.Enter(1));
  Add();
  TellAll(1);
  regions_.Leave(1);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value());
  EXPECT_FALSE(regions_.Enter(1));
  EXPECT_FALSE(regions_.AnyHere());
}

TEST_F(RowRegionsTest, WhatIsRemovedHasNoPlaceAndItsWorkersHearSo) {
  ASSERT_TRUE(regions_.Enter(1));
  const uint64_t region = Add();
  TellAll(1);
  regions_.Remove(region);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value());
  const auto news = regions_.NextNews(1);
  ASSERT_TRUE(news.has_value());
  EXPECT_EQ(news->message.region(), region);
  EXPECT_EQ(news->message.bytes(), 0u);
  EXPECT_EQ(news->descriptor, nullptr);
  regions_.Told(1, *news);
  EXPECT_FALSE(regions_.NextNews(1).has_value());
  EXPECT_NE(Add(), region) << "ids are not used again";
}

TEST_F(RowRegionsTest, WhatIsRemovedUnheardIsNeverHeardOf) {
  ASSERT_TRUE(regions_.Enter(1));
  regions_.Remove(Add());
  EXPECT_FALSE(regions_.NextNews(1).has_value());
  regions_.Remove(7);
}

// While the worker is told of a region, which takes place without the table's lock.
TEST_F(RowRegionsTest, WhatIsRemovedWhileAWorkerIsToldIsForgotten) {
  ASSERT_TRUE(regions_.Enter(1));
  const uint64_t region = Add();
  const auto news = regions_.NextNews(1);
  regions_.Remove(region);
  regions_.Told(1, *news);
  EXPECT_TRUE(regions_.OnAnswer(1, region, true));
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value());
  const auto gone = regions_.NextNews(1);
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(gone->message.region(), region);
  EXPECT_EQ(gone->message.bytes(), 0u);
}

TEST_F(RowRegionsTest, AnAnswerToNothingIsNone) {
  ASSERT_TRUE(regions_.Enter(1));
  const uint64_t region = Add();
  EXPECT_FALSE(regions_.OnAnswer(1, region, true)) << "it was not told";
  TellAll(1);
  EXPECT_FALSE(regions_.OnAnswer(1, region, false)) << "it has answered";
  EXPECT_FALSE(regions_.OnAnswer(1, region + 1, true));
  EXPECT_FALSE(regions_.OnAnswer(1, 0, true));
}

TEST_F(RowRegionsTest, AllIsBounded) {
  ASSERT_TRUE(regions_.Enter(1));
  std::vector<uint8_t> memory(RowRegions::kMost + 1);
  std::vector<uint64_t> ids;
  for (uint8_t& byte : memory) ids.push_back(regions_.Add({&byte, 1}, AnyDescriptor()));
  EXPECT_EQ(ids.back(), 0u);
  EXPECT_NE(ids[ids.size() - 2], 0u);
  // The worker takes nothing more: news of it stay as many as there can be regions.
  for (int round = 0; round < 5; ++round) {
    for (uint64_t id : ids) regions_.Remove(id);
    ids.clear();
    for (uint8_t& byte : memory) ids.push_back(regions_.Add({&byte, 1}, AnyDescriptor()));
  }
  size_t count = 0;
  for (; const auto news = regions_.NextNews(1); ++count) regions_.Told(1, *news);
  EXPECT_EQ(count, RowRegions::kMost);
  EXPECT_EQ(regions_.Add({}, AnyDescriptor()), 0u);
}

TEST_F(RowRegionsTest, OneMemoryIsOneRegion) {
  const uint64_t region = Add();
  EXPECT_EQ(Add(), 0u);
  regions_.Remove(region);
  EXPECT_NE(Add(), 0u);
}

TEST_F(RowRegionsTest, WaitsForThoseThatAreHere) {
  regions_.AwaitAnswers(Add(), absl::InfiniteDuration());  // nobody is
  ASSERT_TRUE(regions_.Enter(1));
  TellAll(1);
  std::vector<uint8_t> more(kBytes);
  const uint64_t region = regions_.Add(absl::MakeSpan(more), AnyDescriptor());
  const absl::Time begin = clocks::SteadyNow();
  regions_.AwaitAnswers(region, absl::Milliseconds(20));
  EXPECT_GE(clocks::SteadyNow() - begin, absl::Milliseconds(20));
  TellAll(1, /*mapped=*/false);
  regions_.AwaitAnswers(region, absl::InfiniteDuration());
}

}  // namespace
}  // namespace lossd::ranks::row_regions_test

// ---- Memory that ranks share ----
// Memory that the leader shares with a worker: who may have it, where rows lie in it, and how it ends. Leader
// and worker are in this process.

namespace lossd::ranks::shared_rows_test {
namespace {

using kernels::MemoryKind;

constexpr int64_t kPage = 4096;
constexpr absl::Duration kLimit = absl::Minutes(2);

std::unique_ptr<kernels::Backend> MakeBackend(int64_t limit = 0) {
  return kernels::CreateCpuBackend({.threads = 1, .memory_limit_bytes = limit}).value();
}

int64_t Staging(const kernels::Backend& backend) { return backend.memory().current[MemoryKind::kStaging]; }

class SharedRowsTest : public ::testing::Test {
 protected:
  SharedRowsTest() {
    auto rows = SharedRows::Listen(2);
    EXPECT_TRUE(rows.ok()) << rows.status();
    rows_ = *std::move(rows);
  }

  absl::StatusOr<std::unique_ptr<MappedRows>> Map(kernels::Backend* backend, int rank = 1) {
    return MappedRows::Connect(rows_->socket(), rows_->TokenOf(rank), backend);
  }
  std::unique_ptr<kernels::StagingMemory> Allocate(int64_t bytes) {
    auto memory = rows_->Allocate(own_.get(), bytes);
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }
  std::optional<v1::RowsPlace> Find(const kernels::StagingMemory&, uint8_t* begin, size_t bytes) {
    return rows_->regions().Find(1, begin, bytes);
  }

  std::unique_ptr<kernels::Backend> own_ = MakeBackend();
  std::unique_ptr<SharedRows> rows_;
};

// ---- Memory ----

TEST_F(SharedRowsTest, MemoryIsCountedOnce) {
  const auto worker = MakeBackend();
  const auto mapped = Map(worker.get()).value();
  auto memory = Allocate(3 * kPage + 5);
  EXPECT_EQ(memory->bytes().size(), static_cast<size_t>(3 * kPage + 5));
  EXPECT_EQ(Staging(*own_), 4 * kPage);
  EXPECT_EQ(Staging(*worker), 0);
  const auto place = Find(*memory, memory->bytes().data() + 100, 7);
  ASSERT_TRUE(place.has_value());
  auto rows = mapped->Find(*place, 7);
  ASSERT_TRUE(rows.ok()) << rows.status();
  rows->data[3] = 42;
  EXPECT_EQ(memory->bytes()[103], 42) << "it is the same memory";
  memory.reset();
  EXPECT_EQ(Staging(*own_), 0);
}

TEST_F(SharedRowsTest, ALimitIsThatOfOtherMemory) {
  const auto worker = MakeBackend();
  const auto mapped = Map(worker.get()).value();
  own_ = MakeBackend(8 * kPage);
  EXPECT_EQ(rows_->Allocate(own_.get(), 9 * kPage).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(rows_->Allocate(own_.get(), int64_t{1} << 61).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(rows_->Allocate(own_.get(), -1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Staging(*own_), 0);
  EXPECT_TRUE(rows_->Allocate(own_.get(), 8 * kPage).ok());
}

TEST_F(SharedRowsTest, NothingIsSharedWithNobody) {
  const auto memory = Allocate(kPage);
  EXPECT_FALSE(Find(*memory, memory->bytes().data(), 1).has_value());
  const auto worker = MakeBackend();
  const auto mapped = Map(worker.get()).value();
  EXPECT_FALSE(Find(*memory, memory->bytes().data(), 1).has_value()) << "it is not shared memory";
}

// As regions of clients.
TEST_F(SharedRowsTest, MemoryOfOthersIsSharedWithItsDescriptor) {
  const auto worker = MakeBackend();
  const auto mapped = Map(worker.get()).value();
  const auto theirs = wire::SharedMemory::Create(2 * kPage).value();
  auto without = rows_->Adopt(own_.get(), theirs->bytes(), {}).value();
  EXPECT_FALSE(Find(*without, theirs->bytes().data(), 1).has_value());
  without.reset();
  auto adopted = rows_->Adopt(own_.get(), theirs->bytes(), {.descriptor = theirs->descriptor()}).value();
  EXPECT_EQ(adopted->bytes().data(), theirs->bytes().data());
  EXPECT_EQ(Staging(*own_), 2 * kPage);
  std::optional<v1::RowsPlace> place;
  for (const absl::Time limit = clocks::SteadyNow() + kLimit;
       !place.has_value() && clocks::SteadyNow() < limit;) {
    place = Find(*adopted, theirs->bytes().data() + kPage, kPage);
  }
  ASSERT_TRUE(place.has_value());
  theirs->bytes()[kPage] = 42;
  EXPECT_EQ(*mapped->Find(*place, kPage)->data, 42);
  adopted.reset();
  EXPECT_FALSE(rows_->regions().Find(1, theirs->bytes().data(), 1).has_value());
}

// Memory that could become shorter would end the worker with a signal.
TEST_F(SharedRowsTest, OnlySealedMemoryIsMapped) {
  const auto worker = MakeBackend();
  const auto mapped = Map(worker.get()).value();
  const int open = memfd_create("test", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(open, kPage), 0);
  std::vector<uint8_t> memory(2 * kPage);
  const auto begin = (reinterpret_cast<uintptr_t>(memory.data()) + kPage - 1) / kPage * kPage;
  RowRegions& regions = rows_->regions();
  const uint64_t region =
      regions.Add({reinterpret_cast<uint8_t*>(begin), kPage}, wire::OwnedDescriptor(open));
  regions.AwaitAnswers(region, kLimit);
  EXPECT_FALSE(regions.Find(1, reinterpret_cast<uint8_t*>(begin), 1).has_value());
  regions.Remove(region);
}

int OpenDescriptors() {
  access::AwaitClosing();
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    count += entry.exists() ? 1 : 0;
  return count;
}

int Mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += absl::StrContains(line, "memfd:lossd-region");
  return count;
}

TEST_F(SharedRowsTest, MemoryLeavesNothing) {
  const auto worker = MakeBackend();
  const auto mapped = Map(worker.get()).value();
  const auto kept = Allocate(kPage);
  const int descriptors = OpenDescriptors();
  EXPECT_EQ(Mappings(), 2);  // the leader's and the worker's
  for (int i = 0; i < 1000; ++i) {
    const auto memory = Allocate(kPage * (1 + i % 5));
    ASSERT_TRUE(Find(*memory, memory->bytes().data(), 1).has_value()) << i;
  }
  // The worker hears of the last of them by and by.
  for (const absl::Time limit = clocks::SteadyNow() + kLimit;
       Mappings() > 2 && clocks::SteadyNow() < limit;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(Mappings(), 2);
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(Staging(*own_), kPage);
  EXPECT_TRUE(Find(*kept, kept->bytes().data(), kPage).has_value());
}

TEST_F(SharedRowsTest, RowsThatAreInUseStayMapped) {
  const auto worker = MakeBackend();
  const auto mapped = Map(worker.get()).value();
  auto memory = Allocate(kPage);
  const v1::RowsPlace place = *Find(*memory, memory->bytes().data(), 1);
  auto rows = std::make_unique<MappedRows::Rows>(*mapped->Find(place, kPage));
  memory.reset();
  for (const absl::Time limit = clocks::SteadyNow() + kLimit;
       mapped->Find(place, 1).ok() && clocks::SteadyNow() < limit;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(mapped->Find(place, 1).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Mappings(), 1);
  EXPECT_EQ(rows->data[0], 0);
  rows.reset();
  EXPECT_EQ(Mappings(), 0);
}

// ---- Who may have it ----

TEST_F(SharedRowsTest, ATokenAdmitsOneWorker) {
  const auto worker = MakeBackend();
  const auto refused = [&](const std::string& socket, const std::string& token) {
    const absl::Status status = MappedRows::Connect(socket, token, worker.get()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  };
  std::string wrong = rows_->TokenOf(1);
  wrong.back() = static_cast<char>(wrong.back() + 1);
  refused(rows_->socket(), wrong);
  refused(rows_->socket(), "");
  refused(rows_->socket(), rows_->TokenOf(1) + "x");
  refused(rows_->socket(), rows_->TokenOf(0));  // of no worker
  refused(rows_->socket() + "x", rows_->TokenOf(1));
  EXPECT_FALSE(rows_->regions().AnyHere());
  auto mapped = Map(worker.get());
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  refused(rows_->socket(), rows_->TokenOf(1));
  EXPECT_TRUE(rows_->regions().AnyHere());
  mapped->reset();
  for (const absl::Time limit = clocks::SteadyNow() + kLimit;
       rows_->regions().AnyHere() && clocks::SteadyNow() < limit;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_FALSE(rows_->regions().AnyHere());
  refused(rows_->socket(), rows_->TokenOf(1));
}

TEST_F(SharedRowsTest, ManyThatSayNothingKeepNoWorkerOut) {
  std::vector<wire::OwnedDescriptor> silent;
  for (int i = 0; i < 7; ++i) silent.push_back(wire::ConnectRegionSocket(rows_->socket()).value());
  const auto worker = MakeBackend();
  EXPECT_TRUE(Map(worker.get()).ok());
}

}  // namespace
}  // namespace lossd::ranks::shared_rows_test

// ---- Chunks in shared memory ----
// Chunks whose rows lie in memory that leader and worker share: hidden states and their gradients leave the
// messages, and results are the same.

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
  slice.set_teacher_hidden("abcd");
  EXPECT_THAT(std::string(submit().message()),
              HasSubstr("4 bytes of hidden states of the teacher instead of 0"));
  slice.clear_teacher_hidden();
  start.set_teacher(7);
  EXPECT_THAT(std::string(submit().message()), HasSubstr("there is no head 7"));
  start.set_teacher(1);  // any head, as far as the place of its hidden states goes
  EXPECT_THAT(std::string(submit().message()),
              HasSubstr("0 bytes of hidden states of the teacher instead of"));
  slice.mutable_teacher_hidden_at()->set_region(region);
  slice.mutable_teacher_hidden_at()->set_offset(kChunkBytes);
  EXPECT_THAT(std::string(submit().message()), HasSubstr("of memory that has"));
  slice.clear_teacher_hidden_at();
  start.clear_teacher();
  slice.set_rows(std::numeric_limits<int64_t>::max());
  EXPECT_THAT(std::string(submit().message()), HasSubstr("too many rows"));
  slice.set_rows(-1);
  EXPECT_THAT(std::string(submit().message()), HasSubstr("too many rows"));
}

}  // namespace
}  // namespace lossd::ranks::shared_chunks_test
