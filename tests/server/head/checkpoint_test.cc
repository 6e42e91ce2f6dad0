// Checkpoints of heads in memory: what is saved comes back, and nothing that was damaged does.
#include "server/head/checkpoint.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "server/head/checkpoint_store.h"
#include "server/head/manifest.h"
#include "tests/server/head/checkpoint_fixture.h"
#include "tests/server/head/watched_disk.h"

namespace lossd::head {
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

 private:
  absl::Status BeforeWrite(const std::string& path, absl::Span<const uint8_t> bytes) override {
    const auto size = static_cast<int64_t>(bytes.size());
    if (room_ >= 0 && size > room_) return formats::FileError(path, "write", ENOSPC);
    if (room_ >= 0) room_ -= size;
    return absl::OkStatus();
  }
  absl::Status BeforeSync(const std::string& path) override {
    return sync_fails_ ? formats::FileError(path, "fsync", EIO) : absl::OkStatus();
  }

  int64_t room_;
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
        const absl::StatusOr<SavedCheckpoint> result = Save(subject, saved, name, options);
        ASSERT_TRUE(result.ok()) << result.status();
        const std::string path = root_ + "/lm/" + name;
        EXPECT_EQ(result->bytes,
                  fs::file_size(path + "/manifest.json") + fs::file_size(path + "/tensors.safetensors"));
        EXPECT_THAT(FilesIn(path), ElementsAre("manifest.json", "tensors.safetensors"));

        EXPECT_EQ(CheckpointReader::Open(root_, "lm/" + name).value()->subject(), subject);
        Head loaded("lm", std::make_unique<MemoryKernels>(subject.config));
        int calls = 0;
        const absl::Status status = Load("lm/" + name, loaded, &calls, static_cast<int64_t>(1 + Below(500)));
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

TEST_F(CheckpointTest, FullDiskLeavesNothing) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  SaveOptions options;
  options.slice_bytes = 100;
  const int64_t needed = Save(subject, head, "whole", options)->bytes;
  for (int64_t room = 0; room < needed; room += 1 + static_cast<int64_t>(Below(200))) {
    SmallDisk disk(room);
    options.disk = &disk;
    const absl::Status status = Save(subject, head, "x", options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("No space left on device"));
    EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("whole"));
  }
  SmallDisk large_enough(needed);
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
  const rlimit small{.rlim_cur = 1500, .rlim_max = before.rlim_max};
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
}

TEST_F(CheckpointTest, CancelledSaveLeavesNothing) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  SaveOptions options;
  options.slice_bytes = 50;
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

TEST_F(CheckpointTest, FailingSinkIsReported) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  const auto sink = [](kernels::TensorId, int64_t, int64_t, absl::Span<const uint8_t>) {
    return absl::UnavailableError("device lost");
  };
  EXPECT_EQ(CheckpointReader::Open(root_, "lm/x").value()->Load(sink), absl::UnavailableError("device lost"));
}

// Whichever bit of whichever file flips: the head is not touched, and damaged data name their tensor.
TEST_F(CheckpointTest, FlippedBitsAreFound) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  const auto tensors =
      formats::SafetensorsReader::Open(root_ + "/lm/x/tensors.safetensors").value()->tensors();
  int flips = 0;
  int harmless = 0;
  for (const char* file : {"manifest.json", "tensors.safetensors"}) {
    const std::string path = root_ + "/lm/x/" + file;
    const std::string whole = test::ReadWholeFile(path);
    for (size_t at = 0; at < whole.size(); ++at) {
      std::string damaged = whole;
      const int bit = static_cast<int>(Below(8));
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      test::WriteWholeFile(path, damaged);
      ++flips;
      Head untouched("lm", std::make_unique<MemoryKernels>(subject.config));
      int calls = 0;
      const absl::Status status = Load("lm/x", untouched, &calls);
      if (status.ok()) {
        ++harmless;
        // Another spelling of the same JSON, e.g. 1E-06 for 1e-06.
        EXPECT_EQ(CheckpointReader::Open(root_, "lm/x").value()->subject(), subject) << file << " " << at;
        ExpectSameButGradients(untouched, head);
        continue;
      }
      EXPECT_THAT(status.code(),
                  testing::AnyOf(absl::StatusCode::kDataLoss, absl::StatusCode::kFailedPrecondition))
          << status;
      EXPECT_EQ(calls, 0) << file << " byte " << at << " bit " << bit;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(std::string(file) == "manifest.json" ? "manifest" : "tensor"));
      for (const formats::SafetensorsInfo& tensor : tensors) {
        const auto byte = static_cast<int64_t>(at);
        if (std::string(file) != "tensors.safetensors" || byte < tensor.begin ||
            byte >= tensor.begin + tensor.bytes)
          continue;
        EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("tensor ", tensor.name, " ")));
      }
    }
    test::WriteWholeFile(path, whole);
  }
  std::cout << flips << " bits flipped, " << harmless << " of them without a change of meaning" << std::endl;
  int calls = 0;
  EXPECT_TRUE(Load("lm/x", head, &calls).ok());
}

TEST_F(CheckpointTest, TruncatedAndLengthenedFilesAreFound) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  for (const char* file : {"manifest.json", "tensors.safetensors"}) {
    const std::string path = root_ + "/lm/x/" + file;
    const std::string whole = test::ReadWholeFile(path);
    int calls = 0;
    for (size_t length = 0; length + 1 < whole.size();
         ++length) {  // without the manifest's last newline it is whole
      test::WriteWholeFile(path, whole.substr(0, length));
      EXPECT_EQ(Load("lm/x", head, &calls).code(), absl::StatusCode::kDataLoss) << file << " " << length;
    }
    test::WriteWholeFile(path, whole + "x");
    EXPECT_EQ(Load("lm/x", head, &calls).code(), absl::StatusCode::kDataLoss);
    fs::remove(path);
    EXPECT_THAT(Load("lm/x", head, &calls).code(),
                testing::AnyOf(absl::StatusCode::kDataLoss, absl::StatusCode::kNotFound));
    EXPECT_EQ(calls, 0);
    test::WriteWholeFile(path, whole);
  }
}

TEST_F(CheckpointTest, TensorsOfAnotherCheckpointAreFound) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject), other = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  ASSERT_TRUE(Save(subject, other, "y").ok());
  fs::copy_file(root_ + "/lm/y/tensors.safetensors", root_ + "/lm/x/tensors.safetensors",
                fs::copy_options::overwrite_existing);
  int calls = 0;
  const absl::Status status = Load("lm/x", head, &calls);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor weight "));
  EXPECT_EQ(calls, 0);
}

// Its checksum is right: whoever can write there can compute it.
TEST_F(CheckpointTest, AManifestOfOtherTensorsIsRefused) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  const std::string path = root_ + "/lm/x/manifest.json";
  const absl::StatusOr<Manifest> manifest = DecodeManifest(test::ReadWholeFile(path));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  const auto expect_refused = [&](const Manifest& changed, const std::string& why) {
    test::WriteWholeFile(path, EncodeManifest(changed));
    int calls = 0;
    const absl::Status status = Load("lm/x", head, &calls);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    EXPECT_EQ(calls, 0);
  };
  Manifest fewer = *manifest, more = *manifest, other = *manifest;
  fewer.tensors.pop_back();
  expect_refused(fewer, "13 tensors in the file, 12 in the manifest, and 13 in such a head");
  more.tensors.push_back(more.tensors.back());
  expect_refused(more, "13 tensors in the file, 14 in the manifest");
  std::swap(other.tensors[0], other.tensors[1]);
  expect_refused(other, "tensor weight is not what the manifest says");
}

TEST_F(CheckpointTest, FilesThatChangeWhileLoadingAreFound) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  const std::string path = root_ + "/lm/x/tensors.safetensors";
  const auto size = static_cast<int64_t>(fs::file_size(path));
  const auto last_byte = static_cast<uint8_t>(test::ReadWholeFile(path).back());
  const auto sink = [&](kernels::TensorId id, int64_t, int64_t, absl::Span<const uint8_t>) {
    if (id.param != Param::kWeight || id.role != Role::kValue) return absl::OkStatus();
    const int file = open(path.c_str(), O_WRONLY);
    const uint8_t other_byte = static_cast<uint8_t>(last_byte + 1);
    EXPECT_EQ(pwrite(file, &other_byte, 1, size - 1), 1);
    close(file);
    return absl::OkStatus();
  };
  const absl::Status status = CheckpointReader::Open(root_, "lm/x").value()->Load(sink);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("class_weights"));
}

TEST_F(CheckpointTest, AnotherFormatVersionIsRefused) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  const std::string path = root_ + "/lm/x/manifest.json";
  auto manifest = nlohmann::ordered_json::parse(test::ReadWholeFile(path));
  for (const int version : {2, 4}) {
    manifest["version"] = version;
    test::WriteWholeFile(path, manifest.dump());
    const absl::Status status = CheckpointReader::Open(root_, "lm/x").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("lm/x"), HasSubstr(absl::StrCat("has version ", version))));
  }
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
}  // namespace lossd::head
