// SPDX-License-Identifier: Apache-2.0
// Tests of file_sites.h and shard_files.h: saves in which another process writes some of the files, work in
// parallel, and files that are read ahead.
#include "server/head/shard_files.h"

#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "server/head/disk.h"
#include "server/head/file_sites.h"
#include "tests/server/head/checkpoint_fixture.h"

namespace lossd::head::shard_files_test {
namespace {

using ::testing::HasSubstr;

// ---- Sites ----

// The second half of a head, by rows: classes from 8 on.
constexpr kernels::RemotePart kSecondHalf = {.rank = 1, .head = 1, .replica = {1, 2}};

// Another process, and what it does wrong.
struct Conduct {
  std::string nonce, token;  // that it says, not empty: instead of the right ones
  absl::Status proof, write;
  bool writes_proof = true;
  std::function<void(const std::string& folder, std::vector<ManifestShard>& lines)> after = nullptr;
};

struct Seen {
  absl::Status noted = absl::UnknownError("nothing");
  size_t files = 0;
  bool cancelled = false;
};

class PlayedSite final : public SaveSite {
 public:
  PlayedSite(std::string root, Head* head, Conduct conduct, Seen* seen)
      : root_(std::move(root)), head_(head), conduct_(std::move(conduct)), seen_(seen) {}

  int rank() const override { return 1; }
  const kernels::RemotePart& part() const override { return kSecondHalf; }
  void StartProof(const std::string& head, const std::string& folder) override {
    folder_ = absl::StrCat(root_, "/", head, "/", folder);
  }
  absl::StatusOr<FolderProof> AwaitProof(absl::Time) override {
    if (!conduct_.proof.ok()) return conduct_.proof;
    const auto nonce = ReadSmallFile(folder_, kNonceFile, kNonceBytes);
    EXPECT_TRUE(nonce.ok()) << nonce.status();
    const std::string token = "a token";
    if (conduct_.writes_proof) {
      EXPECT_TRUE(WriteSmallFile(Disk::Real(), absl::StrCat(folder_, "/", ProofFile(1)), token).ok());
    }
    return FolderProof{conduct_.nonce.empty() ? *nonce : conduct_.nonce,
                       conduct_.token.empty() ? token : conduct_.token};
  }
  void NoteProof(const absl::Status& status) override { seen_->noted = status; }

  void StartWriting(const std::vector<PlannedFile>& files, size_t first, size_t all, int) override {
    seen_->files = files.size();
    EXPECT_EQ(files.front().name, ShardFile(first, all));
    ShardFiles shards(head_->config(), files, {.slice_bytes = 60, .threads = 1});
    std::thread disk([&] {
      auto lines = shards.Write(folder_);
      EXPECT_TRUE(lines.ok()) << lines.status();
      lines_ = *std::move(lines);
      shards.End(absl::OkStatus());
    });
    EXPECT_TRUE(shards
                    .Read([&](kernels::TensorId id, int64_t row, int64_t rows, absl::Span<uint8_t> out) {
                      return head_->ReadRows(id, row, rows, kernels::DType::kFloat32, out);
                    })
                    .ok());
    shards.Close(absl::OkStatus());
    EXPECT_TRUE(shards.AwaitEnd().ok());
    disk.join();
    if (conduct_.after) conduct_.after(folder_, lines_);
  }
  bool AwaitRead(absl::Time) override { return true; }
  absl::StatusOr<std::vector<ManifestShard>> Await() override {
    if (seen_->cancelled) return absl::CancelledError("rank 1: the save was cancelled");
    if (!conduct_.write.ok()) return conduct_.write;
    return lines_;
  }
  SaveProgress progress() override { return {}; }
  bool failed() const override { return false; }
  void Cancel() override { seen_->cancelled = true; }

 private:
  const std::string root_;
  Head* const head_;
  const Conduct conduct_;
  Seen* const seen_;
  std::string folder_;
  std::vector<ManifestShard> lines_;
};

class CheckpointSitesTest : public CheckpointTest {
 protected:
  CheckpointSubject SubjectOfTwo() {
    CheckpointSubject subject = SomeSubject();
    subject.config.vocab_size = 16;
    return subject;
  }

  absl::StatusOr<SavedCheckpoint> SaveWith(Conduct conduct) {
    rows_.clear();
    seen_ = Seen();
    std::vector<std::unique_ptr<SaveSite>> sites;
    sites.push_back(std::make_unique<PlayedSite>(root_, &head_, std::move(conduct), &seen_));
    const auto source = [&](kernels::TensorId id, int64_t row, int64_t rows, absl::Span<uint8_t> out) {
      if (id.param == kernels::Param::kWeight) rows_[id.role] = std::max(rows_[id.role], row + rows);
      return head_.ReadRows(id, row, rows, kernels::DType::kFloat32, out);
    };
    return SaveCheckpoint(root_, "a", subject_, source, Sharded(), std::move(sites));
  }

  void ExpectSaved() {
    auto kernels = std::make_unique<MemoryKernels>(subject_.config);
    Head loaded("lm", std::move(kernels));
    int calls = 0;
    const absl::Status status = Load("lm/a", loaded, &calls);
    ASSERT_TRUE(status.ok()) << status;
    ExpectSameButGradients(loaded, head_);
    for (const std::string& file : FilesIn(root_ + "/lm/a")) EXPECT_NE(file[0], '.') << file;
  }
  void ExpectNothingLeft() { EXPECT_TRUE(FilesIn(root_ + "/lm").empty()); }

  const CheckpointSubject subject_ = SubjectOfTwo();
  Head head_ = RandomHead(subject_);
  Seen seen_;
  std::map<kernels::Role, int64_t> rows_;  // of the weight, that were read here: up to this one
};

TEST_F(CheckpointSitesTest, WritesItsClassesWhichAreNotReadHere) {
  const auto saved = SaveWith({});
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_TRUE(seen_.noted.ok());
  EXPECT_GT(seen_.files, 1u);
  EXPECT_EQ(rows_[kernels::Role::kValue], 8);
  ExpectSaved();
}

TEST_F(CheckpointSitesTest, WhoDoesNotSeeTheFolderTakesNoPart) {
  const Conduct conducts[] = {{.nonce = std::string(kNonceBytes, 'x')},
                              {.token = "another"},
                              {.token = "longer than what is there"},
                              {.proof = absl::NotFoundError("lm/.tmp: open folder: no such folder")},
                              {.writes_proof = false}};
  for (const Conduct& conduct : conducts) {
    const auto saved = SaveWith(conduct);
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_FALSE(seen_.noted.ok());
    EXPECT_EQ(seen_.files, 0u);
    EXPECT_EQ(rows_[kernels::Role::kValue], 16);
    ExpectSaved();
    fs::remove_all(root_ + "/lm/a");
  }
}

TEST_F(CheckpointSitesTest, ACheckpointOfOneFileIsWrittenHere) {
  std::vector<std::unique_ptr<SaveSite>> sites;
  sites.push_back(std::make_unique<PlayedSite>(root_, &head_, Conduct(), &seen_));
  const auto source = [&](kernels::TensorId id, int64_t row, int64_t rows, absl::Span<uint8_t> out) {
    return head_.ReadRows(id, row, rows, kernels::DType::kFloat32, out);
  };
  ASSERT_TRUE(SaveCheckpoint(root_, "a", subject_, source, {}, std::move(sites)).ok());
  EXPECT_TRUE(absl::IsUnknown(seen_.noted)) << "nobody has asked it";
  ExpectSaved();
}

// Whatever it says: no checkpoint comes of files that are not what they should be.
TEST_F(CheckpointSitesTest, WhatItWritesIsRead) {
  using Lines = std::vector<ManifestShard>;
  const auto path = [](const std::string& folder, const Lines& lines, size_t i) {
    return absl::StrCat(folder, "/", lines[i].file);
  };
  const std::pair<const char*, std::function<void(const std::string&, Lines&)>> wrongs[] = {
      {"a byte less",
       [&](const std::string& folder, Lines& lines) {
         fs::resize_file(path(folder, lines, 1), static_cast<uintmax_t>(lines[1].file_bytes - 1));
       }},
      {"a byte less, and it says so",
       [&](const std::string& folder, Lines& lines) {
         fs::resize_file(path(folder, lines, 1), static_cast<uintmax_t>(--lines[1].file_bytes));
       }},
      {"a bit",
       [&](const std::string& folder, Lines& lines) {
         std::fstream file(path(folder, lines, 0), std::ios::in | std::ios::out | std::ios::binary);
         file.seekg(lines[0].file_bytes - 1);
         const int byte = file.get();
         file.seekp(lines[0].file_bytes - 1);
         file.put(static_cast<char>(byte ^ 1));
       }},
      {"no file", [&](const std::string& folder, Lines& lines) { fs::remove(path(folder, lines, 0)); }},
      {"a link",
       [&](const std::string& folder, Lines& lines) {
         fs::rename(path(folder, lines, 0), root_ + "/elsewhere");
         fs::create_symlink(root_ + "/elsewhere", path(folder, lines, 0));
       }},
      {"other classes",
       [&](const std::string& folder, Lines& lines) {
         fs::rename(path(folder, lines, 0), folder + "/x");
         fs::rename(path(folder, lines, 1), path(folder, lines, 0));
         fs::rename(folder + "/x", path(folder, lines, 1));
         std::swap(lines[0].tensors, lines[1].tensors);
         std::swap(lines[0].file_bytes, lines[1].file_bytes);
       }},
      {"another checksum",
       [](const std::string&, Lines& lines) { lines[1].tensors[0].checksum = "0123456789abcdef"; }},
      {"a line less", [](const std::string&, Lines& lines) { lines.pop_back(); }},
      {"a tensor less", [](const std::string&, Lines& lines) { lines[0].tensors.pop_back(); }},
  };
  for (const auto& [what, after] : wrongs) {
    SCOPED_TRACE(what);
    const auto saved = SaveWith({.after = after});
    EXPECT_FALSE(saved.ok());
    EXPECT_FALSE(saved.status().message().empty());
    ExpectNothingLeft();
    fs::remove(root_ + "/elsewhere");
  }
  ASSERT_TRUE(SaveWith({}).ok());
  ExpectSaved();
}

TEST_F(CheckpointSitesTest, ItsErrorIsTheSaves) {
  const auto saved = SaveWith({.write = absl::ResourceExhaustedError("rank 1: the disk is full")});
  EXPECT_TRUE(absl::IsResourceExhausted(saved.status()));
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr("rank 1: the disk is full"));
  ExpectNothingLeft();
}

// What this process cannot read ends the others' work too.
TEST_F(CheckpointSitesTest, AnErrorHereEndsTheOthers) {
  std::vector<std::unique_ptr<SaveSite>> sites;
  sites.push_back(std::make_unique<PlayedSite>(root_, &head_, Conduct(), &seen_));
  const auto source = [&](kernels::TensorId, int64_t, int64_t, absl::Span<uint8_t>) {
    return absl::AbortedError("the head has changed");
  };
  const auto saved = SaveCheckpoint(root_, "a", subject_, source, Sharded(), std::move(sites));
  EXPECT_TRUE(absl::IsAborted(saved.status())) << saved.status();
  EXPECT_TRUE(seen_.cancelled);
  ExpectNothingLeft();
}

// ---- Threads ----

TEST(RunInThreadsTest, EveryTaskOnce) {
  for (const int threads : {0, 1, 3, 8}) {
    for (const size_t tasks : {0, 1, 5, 200}) {
      std::vector<std::atomic<int>> runs(tasks);
      EXPECT_TRUE(RunInThreads(threads, tasks, [&](size_t task) {
                    ++runs[task];
                    return absl::OkStatus();
                  }).ok());
      for (const auto& count : runs) EXPECT_EQ(count, 1);
    }
  }
}

// Whichever thread is faster.
TEST(RunInThreadsTest, TheErrorOfTheLowestTask) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<size_t> begun{0};
    const absl::Status status = RunInThreads(4, 100, [&](size_t task) -> absl::Status {
      ++begun;
      if (task == 5) absl::SleepFor(absl::Milliseconds(1));
      return task < 5 ? absl::OkStatus() : absl::DataLossError(std::to_string(task));
    });
    EXPECT_EQ(status, absl::DataLossError("5"));
    EXPECT_LT(begun, 100u) << "went on after an error";
  }
}

// ---- Files that are read ahead ----

constexpr absl::Duration kShort = absl::Milliseconds(20);

ReadAhead::Block Filled(ReadAhead& ahead, uint8_t value, size_t bytes) {
  std::optional<ReadAhead::Block> block = ahead.Take(absl::InfiniteFuture());
  EXPECT_TRUE(block.has_value());
  block->bytes = bytes;
  std::fill(block->span().begin(), block->span().end(), value);
  return *std::move(block);
}

TEST(ReadAheadTest, BlocksComeInOrderAndBuffersAreUsedAgain) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  constexpr int kBlocks = 2000;
  constexpr size_t kBytes = 64;
  ReadAhead ahead(kBytes, 3);
  std::atomic<int> outstanding{0};
  std::thread consumer([&] {
    std::mt19937 random(seed);
    for (int i = 0; i < kBlocks; ++i) {
      std::optional<ReadAhead::Block> block = ahead.Next();
      ASSERT_TRUE(block.has_value());
      EXPECT_EQ(block->part.row_begin, i);
      EXPECT_EQ(block->bytes, 1 + static_cast<size_t>(i) % kBytes);
      for (const uint8_t byte : block->span()) EXPECT_EQ(byte, static_cast<uint8_t>(i));
      if (random() % 100 == 0) absl::SleepFor(absl::Microseconds(random() % 300));
      EXPECT_LE(outstanding--, 3);
      ahead.GiveBack(*std::move(block));
    }
    EXPECT_FALSE(ahead.Next().has_value());
    ahead.End(ahead.closed_with());
  });
  std::set<uint8_t*> buffers;
  for (int i = 0; i < kBlocks; ++i) {
    ReadAhead::Block block = Filled(ahead, static_cast<uint8_t>(i), 1 + static_cast<size_t>(i) % kBytes);
    block.part.row_begin = i;
    buffers.insert(block.buffer.get());
    ++outstanding;
    ahead.Put(std::move(block));
  }
  ahead.Close(absl::OkStatus());
  EXPECT_TRUE(ahead.WaitUntilEnded(absl::InfiniteFuture()));
  EXPECT_TRUE(ahead.result().ok());
  consumer.join();
  EXPECT_LE(buffers.size(), 3u);
}

TEST(ReadAheadTest, TheProducerIsHeldBack) {
  ReadAhead ahead(1, 2);
  ahead.Put(Filled(ahead, 1, 1));
  ahead.Put(Filled(ahead, 2, 1));
  EXPECT_FALSE(ahead.Take(clocks::SteadyNow() + kShort).has_value());
  ahead.GiveBack(*ahead.Next());
  EXPECT_TRUE(ahead.Take(clocks::SteadyNow() + kShort).has_value());
  EXPECT_FALSE(ahead.WaitUntilEnded(clocks::SteadyNow() + kShort));
}

TEST(ReadAheadTest, AFailedConsumerEndsTheProducer) {
  ReadAhead ahead(1, 2);
  ahead.Put(Filled(ahead, 1, 1));
  ahead.End(absl::DataLossError("disk"));
  EXPECT_FALSE(ahead.Take(absl::InfiniteFuture()).has_value());
  EXPECT_EQ(ahead.result(), absl::DataLossError("disk"));
}

TEST(ReadAheadTest, AFailedProducerDropsWhatIsThere) {
  ReadAhead ahead(1, 2);
  ahead.Put(Filled(ahead, 1, 1));
  ahead.Close(absl::UnavailableError("device"));
  EXPECT_FALSE(ahead.Next().has_value());
  EXPECT_EQ(ahead.closed_with(), absl::UnavailableError("device"));
}

}  // namespace
}  // namespace lossd::head::shard_files_test
