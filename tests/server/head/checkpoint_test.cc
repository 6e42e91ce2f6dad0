// SPDX-License-Identifier: Apache-2.0
// Checkpoints of heads in memory: what is saved comes back, and a save that fails leaves nothing.
#include "server/head/checkpoint.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/head/checkpoint_store.h"
#include "tests/server/head/checkpoint_fixture.h"
#include "tests/server/head/faulty_disk.h"

namespace lossd::head::checkpoint_test {
namespace {

using kernels::HeadConfig;
using kernels::Param;
using kernels::Role;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Fails like a full disk once `room` bytes are used up over all files; -1: never. `sync_fails`: writing
// goes well, but not the fsync. `on_create`: called before a file is made.
class SmallDisk final : public WatchedDisk {
 public:
  explicit SmallDisk(int64_t room, bool sync_fails = false) : room_(room), sync_fails_(sync_fails) {}

  std::function<void()> on_create = [] {};

  absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateFile(const std::string& path) override {
    on_create();
    return WatchedDisk::CreateFile(path);
  }
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateLargeFile(const std::string& path) override {
    on_create();
    return WatchedDisk::CreateLargeFile(path);
  }

 private:
  absl::Status BeforeWrite(const std::string& path, absl::Span<const uint8_t> bytes) override {
    const auto size = static_cast<int64_t>(bytes.size());
    absl::MutexLock lock(&mutex_);
    if (room_ >= 0 && size > room_) return formats::FileError(path, "write", ENOSPC);
    if (room_ >= 0) room_ -= size;
    return absl::OkStatus();
  }
  absl::Status BeforeSync(const std::string& path) override {
    return sync_fails_ ? formats::FileError(path, "fsync", EIO) : absl::OkStatus();
  }

  absl::Mutex mutex_;
  int64_t room_ ABSL_GUARDED_BY(mutex_);
  const bool sync_fails_;
};

TEST_F(CheckpointTest, RoundTripOfEveryKindOfHead) {
  int count = 0;
  for (const auto norm : {kernels::Norm::kNone, kernels::Norm::kLayerNorm, kernels::Norm::kRmsNorm}) {
    for (const auto state : {kernels::OptimizerState::kNone, kernels::OptimizerState::kMomentum,
                             kernels::OptimizerState::kAdam}) {
      for (int flags = 0; flags < 8; ++flags) {
        CheckpointSubject subject = SomeSubject();
        subject.config = {.hidden_size = static_cast<int64_t>(1 + Below(40)),
                          .vocab_size = static_cast<int64_t>(1 + Below(60)),
                          .has_bias = (flags & 1) != 0,
                          .has_class_weights = (flags & 2) != 0,
                          .norm = norm,
                          .norm_epsilon = std::ldexp(static_cast<float>(1 + Below(1 << 20)), -30),
                          .compute_dtype = kernels::DType::kBFloat16,
                          .optimizer_state = state,
                          .trainable = (flags & 4) != 0};
        Head saved = RandomHead(subject);
        const std::string name = absl::StrCat("c", ++count);
        SaveOptions options;
        options.slice_bytes = static_cast<int64_t>(1 + Below(500));
        options.buffer_bytes = static_cast<int64_t>(Below(2) << 25);
        options.shards = {.most_bytes = static_cast<int64_t>(1 + Below(40'000)),
                          .threads = static_cast<int>(1 + Below(4))};
        const size_t shards = DivideClasses(subject.config, options.shards).size();
        const absl::StatusOr<SavedCheckpoint> result = Save(subject, saved, name, options);
        ASSERT_TRUE(result.ok()) << result.status();
        const std::string path = root_ + "/lm/" + name;
        std::vector<std::string> files = {"manifest.json"};
        for (size_t shard = 0; shard < shards; ++shard) files.push_back(ShardFile(shard, shards));
        EXPECT_EQ(FilesIn(path), files);
        uintmax_t bytes = 0;
        for (const std::string& file : files) bytes += fs::file_size(path + "/" + file);
        EXPECT_EQ(result->bytes, bytes);

        EXPECT_EQ(CheckpointReader::Open(root_, "lm/" + name).value()->subject(), subject);
        Head loaded("lm", std::make_unique<MemoryKernels>(subject.config));
        int calls = 0;
        const absl::Status status = Load("lm/" + name, loaded, &calls,
                                         {.slice_bytes = static_cast<int64_t>(1 + Below(500)),
                                          .buffer_bytes = static_cast<int64_t>(Below(10'000)),
                                          .threads = static_cast<int>(1 + Below(4)),
                                          .verify_first = Below(2) == 0});
        ASSERT_TRUE(status.ok()) << status;
        ExpectSameButGradients(loaded, saved);
      }
    }
  }
}

TEST_F(CheckpointTest, ManifestSaysWhatItIs) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "first").ok());
  const auto manifest = nlohmann::json::parse(test::ReadWholeFile(root_ + "/lm/first/manifest.json"));
  EXPECT_EQ(manifest["version"], 3);
  EXPECT_EQ(manifest["automatic"], false);
  EXPECT_EQ(manifest["last_step"], nullptr);
  EXPECT_EQ(manifest["step"], subject.step);
  EXPECT_EQ(manifest["head"]["norm"], "layernorm");
  EXPECT_EQ(manifest["head"]["logits"], "stored");
  EXPECT_EQ(manifest["head"]["gradients"], "exact");
  EXPECT_EQ(manifest["tensors"].size(), 13u);
  EXPECT_EQ(manifest["tensors"][1]["name"], "weight.moment1");
  EXPECT_EQ(manifest["tensors"][1]["bytes"], 5 * 7 * 4);
  auto tensors = formats::SafetensorsReader::Open(root_ + "/lm/first/tensors.safetensors");
  ASSERT_TRUE(tensors.ok());
  EXPECT_THAT((*tensors)->Find("weight").value()->shape, ElementsAre(7, 5));
  EXPECT_THAT((*tensors)->Find("norm.shift.moment2").value()->shape, ElementsAre(5));
}

// Every shard says which classes it has, in the manifest and in itself.
TEST_F(CheckpointTest, ManifestNamesTheShards) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "first", Sharded()).ok());
  const auto manifest = nlohmann::json::parse(test::ReadWholeFile(root_ + "/lm/first/manifest.json"));
  EXPECT_EQ(manifest["version"], 4);
  EXPECT_FALSE(manifest.contains("file"));
  const auto& shards = manifest["shards"];
  ASSERT_EQ(shards.size(), 4u);
  EXPECT_EQ(shards[0]["classes"], nlohmann::json::array({0, 2}));
  EXPECT_EQ(shards[3]["classes"], nlohmann::json::array({6, 7}));
  EXPECT_EQ(shards[0]["tensors"].size(), 13u);
  EXPECT_EQ(shards[3]["tensors"].size(), 7u) << "without the norm's";
  EXPECT_EQ(shards[3]["file"], "tensors-00004-of-00004.safetensors");
  auto tensors = formats::SafetensorsReader::Open(root_ + "/lm/first/tensors-00002-of-00004.safetensors");
  ASSERT_TRUE(tensors.ok());
  EXPECT_THAT((*tensors)->Find("weight").value()->shape, ElementsAre(2, 5));
  EXPECT_THAT((*tensors)->metadata(), ElementsAre(testing::Pair("classes", "[2, 4) of 7")));
  const auto list = ListCheckpoints(root_, "lm");
  ASSERT_TRUE(list.ok());
  int64_t bytes = 0;
  for (const std::string& file : FilesIn(root_ + "/lm/first")) {
    bytes += static_cast<int64_t>(fs::file_size(root_ + "/lm/first/" + file));
  }
  EXPECT_EQ(list->at(0).bytes, bytes);
}

// Version 3, as a server wrote it that knew no other.
TEST_F(CheckpointTest, AnOldCheckpoint) {
  fs::create_directory(root_ + "/old");
  fs::copy(std::string(LOSSD_TEST_DATA) + "/one-file", root_ + "/old/one-file");
  const auto reader = CheckpointReader::Open(root_, "old/one-file");
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->subject().step, 1u);
  EXPECT_EQ((*reader)->subject().last_step->rows, 64);
  Head loaded("old", std::make_unique<MemoryKernels>((*reader)->subject().config));
  int calls = 0;
  ASSERT_TRUE(Load("old/one-file", loaded, &calls).ok());
  const auto file = formats::SafetensorsReader::Open(root_ + "/old/one-file/tensors.safetensors");
  ASSERT_TRUE(file.ok());
  EXPECT_EQ((*file)->tensors().size(), 9u);
  for (const kernels::TensorId id : CheckpointTensors(loaded.config())) {
    const auto info = (*file)->Find(TensorName(id));
    ASSERT_TRUE(info.ok()) << info.status();
    const std::vector<float>& values = static_cast<MemoryKernels&>(loaded.kernels()).tensor(id);
    std::vector<uint8_t> saved(static_cast<size_t>((*info)->bytes));
    ASSERT_TRUE((*file)->ReadBytes(**info, 0, absl::MakeSpan(saved)).ok());
    ASSERT_EQ(saved.size(), values.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(saved.data(), values.data(), saved.size()), 0) << TensorName(id);
  }
  // And it is written so that such a server reads it.
  ASSERT_TRUE(Save((*reader)->subject(), loaded, "again").ok());
  auto manifest = nlohmann::ordered_json::parse(test::ReadWholeFile(root_ + "/old/again/manifest.json"));
  auto old = nlohmann::ordered_json::parse(test::ReadWholeFile(root_ + "/old/one-file/manifest.json"));
  EXPECT_EQ(manifest["save_number"], 1);  // which an earlier server passes over
  manifest.erase("save_number");
  for (const char* field : {"saved_at", "checksum", "file_bytes"}) {
    manifest.erase(field);
    old.erase(field);
  }
  old["head"]["split"] = "any";  // what it means that an old one does not say
  EXPECT_EQ(manifest.dump(), old.dump());
}

// What is written in one way holds the same as what is written in another.
TEST_F(CheckpointTest, ShardsHoldTheSame) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "one").ok());
  for (int threads = 1; threads <= 5; ++threads) {
    const std::string name = absl::StrCat("in-", threads);
    const SaveOptions options{.shards = {.most_bytes = 100 * threads, .threads = threads}};
    ASSERT_TRUE(Save(subject, head, name, options).ok());
    Head one("lm", std::make_unique<MemoryKernels>(subject.config));
    Head other("lm", std::make_unique<MemoryKernels>(subject.config));
    int calls = 0;
    ASSERT_TRUE(Load("lm/one", one, &calls).ok());
    ASSERT_TRUE(Load("lm/" + name, other, &calls, {.threads = 6 - threads}).ok());
    ExpectSameButGradients(one, head);
    ExpectSameButGradients(other, head);
  }
}

TEST_F(CheckpointTest, NeverOverwrites) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject), other = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "same").ok());
  EXPECT_EQ(Save(subject, other, "same").status().code(), absl::StatusCode::kAlreadyExists);
  fs::create_directory(root_ + "/lm/empty");
  EXPECT_EQ(Save(subject, other, "empty").status().code(), absl::StatusCode::kAlreadyExists);
  // Taken while this save is writing.
  SmallDisk disk(-1);
  disk.on_create = [&] { fs::create_directory(root_ + "/lm/late"); };
  SaveOptions options;
  options.disk = &disk;
  EXPECT_EQ(Save(subject, other, "late", options).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("empty", "late", "same"));
  Head loaded("lm", std::make_unique<MemoryKernels>(subject.config));
  int calls = 0;
  ASSERT_TRUE(Load("lm/same", loaded, &calls).ok());
  ExpectSameButGradients(loaded, head);
}

TEST_F(CheckpointTest, BadNames) {
  CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  for (const char* name : {".", "..", "../x", "a/b", ".tmp-x"}) {
    EXPECT_EQ(Save(subject, head, name).status().code(), absl::StatusCode::kInvalidArgument) << name;
    CheckpointSubject renamed = subject;
    renamed.head = name;
    EXPECT_EQ(Save(renamed, head, "x").status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  for (const char* checkpoint : {"", "lm", "lm/", "/x", "lm/..", "../x", "lm/a/b", "/lm/x", "./x"}) {
    EXPECT_EQ(CheckpointReader::Open(root_, checkpoint).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(CheckpointReader::Open(root_, "lm/x").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(FilesIn(root_), IsEmpty());
}

TEST_F(CheckpointTest, StaysBelowTheDirectory) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  test::TempFolder outside;
  fs::create_directory_symlink(outside.path(), root_ + "/lm");
  EXPECT_EQ(Save(subject, head, "x").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(FilesIn(outside.path()), IsEmpty());
  fs::create_directory(outside.File("x"));
  test::WriteWholeFile(outside.File("x/manifest.json"), "{}");
  EXPECT_EQ(CheckpointReader::Open(root_, "lm/x").status().code(), absl::StatusCode::kInvalidArgument);
}

// The disk is full at any place, of whichever file.
TEST_F(CheckpointTest, FullDiskLeavesNothing) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  SaveOptions options = Sharded();
  const int64_t needed = Save(subject, head, "whole", options)->bytes;
  for (int64_t room = 0; room < needed; room += 1 + static_cast<int64_t>(Below(200))) {
    SmallDisk disk(room);
    options.disk = &disk;
    const absl::Status status = Save(subject, head, "x", options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("No space left on device"));
    EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("whole"));
  }
  // Failed saves have taken numbers too, and those have up to 16 digits.
  SmallDisk large_enough(needed + 15);
  options.disk = &large_enough;
  EXPECT_TRUE(Save(subject, head, "x", options).ok());
}

TEST_F(CheckpointTest, FailingSyncLeavesNothing) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  SmallDisk disk(-1, /*sync_fails=*/true);
  SaveOptions options;
  options.disk = &disk;
  const absl::Status status = Save(subject, head, "x", options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Input/output error"));
  EXPECT_THAT(FilesIn(root_ + "/lm"), IsEmpty());
}

// A limit on the size of files makes the operating system itself refuse to write.
TEST_F(CheckpointTest, RefusedWriteLeavesNothing) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 4500, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = Save(subject, head, "x").status();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("File too large"));
  EXPECT_THAT(FilesIn(root_ + "/lm"), IsEmpty());
}

TEST_F(CheckpointTest, FailingSourceLeavesNothing) {
  const CheckpointSubject subject = SomeSubject();
  int calls = 0;
  const auto source = [&](kernels::TensorId, int64_t, int64_t, absl::Span<uint8_t>) {
    return ++calls < 3 ? absl::OkStatus() : absl::UnavailableError("device lost");
  };
  EXPECT_EQ(SaveCheckpoint(root_, "x", subject, source).status(), absl::UnavailableError("device lost"));
  EXPECT_THAT(FilesIn(root_ + "/lm"), IsEmpty());
  calls = 0;
  EXPECT_EQ(SaveCheckpoint(root_, "x", subject, source, Sharded()).status(),
            absl::UnavailableError("device lost"));
  EXPECT_THAT(FilesIn(root_ + "/lm"), IsEmpty());
}

TEST_F(CheckpointTest, CancelledSaveLeavesNothing) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  SaveOptions options = Sharded();
  int asked = 0;
  const int most = static_cast<int>(Below(20));
  int read_ends = 0;
  options.on_read = [&] { ++read_ends; };
  options.cancelled = [&] { return asked++ >= most; };
  EXPECT_EQ(Save(subject, head, "x", options).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(read_ends, 1);
  EXPECT_THAT(FilesIn(root_ + "/lm"), IsEmpty());
}

// Without a name the checkpoint is the server's.
TEST_F(CheckpointTest, AutomaticNames) {
  CheckpointSubject subject = SomeSubject();
  subject.step = 12;
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "").ok());
  EXPECT_EQ(Save(subject, head, "").status().code(), absl::StatusCode::kAlreadyExists);
  subject.step = 12'345'678'901;
  ASSERT_TRUE(Save(subject, head, "").ok());
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("step-0000000012", "step-12345678901"));
}

TEST_F(CheckpointTest, SavesLockTheirFolder) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  SmallDisk disk(-1);
  disk.on_create = [&] { EXPECT_TRUE(PrepareCheckpointDirectory(root_).ok()); };
  SaveOptions options;
  options.disk = &disk;
  EXPECT_TRUE(Save(subject, head, "x", options).ok());
}

TEST(CheckLoadableTest, NamesTheFirstDifference) {
  const HeadConfig saved{.hidden_size = 8, .vocab_size = 9};
  EXPECT_TRUE(CheckLoadable(saved, saved).ok());
  HeadConfig head = saved;
  head.compute_dtype = kernels::DType::kBFloat16;
  EXPECT_TRUE(CheckLoadable(saved, head).ok());
  const auto message = [&](auto change) {
    HeadConfig changed = saved;
    change(changed);
    const absl::Status status = CheckLoadable(saved, changed);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    return std::string(status.message());
  };
  EXPECT_THAT(message([](HeadConfig& c) { c.hidden_size = 7; }), HasSubstr("hidden_size 8, the head has 7"));
  EXPECT_THAT(message([](HeadConfig& c) { c.vocab_size = 7; }), HasSubstr("vocab_size 9"));
  EXPECT_THAT(message([](HeadConfig& c) { c.has_bias = true; }), HasSubstr("bias"));
  EXPECT_THAT(message([](HeadConfig& c) { c.has_class_weights = true; }), HasSubstr("class_weights"));
  EXPECT_THAT(message([](HeadConfig& c) { c.norm = kernels::Norm::kRmsNorm; }), HasSubstr("rmsnorm"));
  EXPECT_THAT(message([](HeadConfig& c) { c.norm_epsilon = 1; }), HasSubstr("norm_epsilon"));
  EXPECT_THAT(message([](HeadConfig& c) { c.optimizer_state = kernels::OptimizerState::kNone; }),
              HasSubstr("optimizer_state adam, the head has none"));
  EXPECT_THAT(message([](HeadConfig& c) { c.trainable = false; }), HasSubstr("frozen"));
}

}  // namespace
}  // namespace lossd::head::checkpoint_test
