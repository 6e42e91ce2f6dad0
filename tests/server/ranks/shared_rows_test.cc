// SPDX-License-Identifier: Apache-2.0
// Memory that the leader shares with a worker: who may have it, where rows lie in it, and how it ends. Leader
// and worker are in this process.
#include "server/ranks/shared_rows.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/staging_adopter.h"
#include "server/memory/shared_memory.h"
#include "server/ranks/mapped_rows.h"
#include "tests/server/connections/await_closing.h"

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
  const auto theirs = memory::SharedMemory::Create(2 * kPage).value();
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
  connections::AwaitClosing();
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
