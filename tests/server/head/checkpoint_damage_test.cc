// SPDX-License-Identifier: Apache-2.0
// Checkpoints that were damaged, or change while they are loaded: they are refused, and the head is
// untouched.
#include <fcntl.h>
#include <unistd.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "server/head/checkpoint.h"
#include "server/head/manifest.h"
#include "tests/server/head/checkpoint_fixture.h"
#include "tests/support/effort.h"

namespace lossd::head::checkpoint_damage_test {
namespace {

using kernels::Param;
using kernels::Role;
using testing::AllOf;
using testing::HasSubstr;

TEST_F(CheckpointTest, FailingSinkIsReported) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  const auto sink = [](kernels::TensorId, int64_t, int64_t, absl::Span<const uint8_t>) {
    return absl::UnavailableError("device lost");
  };
  EXPECT_EQ(CheckpointReader::Open(root_, "lm/x").value()->Load(sink), absl::UnavailableError("device lost"));
}

// Whichever bit of whichever file flips: the head is not touched, and damaged data name their file, its
// classes and their tensor.
class FlippedBitsTest : public CheckpointTest, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Sharded, FlippedBitsTest, testing::Bool());

TEST_P(FlippedBitsTest, AreFound) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  const bool sharded = GetParam();
  ASSERT_TRUE(Save(subject, head, "x", sharded ? Sharded() : SaveOptions{}).ok());
  int flips = 0;
  int harmless = 0;
  for (const std::string& file : FilesIn(root_ + "/lm/x")) {
    const bool is_manifest = file == "manifest.json";
    const std::string path = root_ + "/lm/x/" + file;
    std::vector<formats::SafetensorsInfo> tensors;
    if (!is_manifest) tensors = formats::SafetensorsReader::Open(path).value()->tensors();
    const std::string whole = test::ReadWholeFile(path);
    const size_t header = is_manifest ? 0 : static_cast<size_t>(tensors[0].begin);
    const test::Places places(4);
    for (auto at = static_cast<size_t>(places.first); at < whole.size();
         at += static_cast<size_t>(places.stride)) {
      if (at > 2000 && at + 8 < header && at % 50 != 0) continue;  // blanks
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
      EXPECT_THAT(std::string(status.message()), HasSubstr(is_manifest ? "manifest" : file + " (classes ["));
      for (const formats::SafetensorsInfo& tensor : tensors) {
        const auto byte = static_cast<int64_t>(at);
        if (byte < tensor.begin || byte >= tensor.begin + tensor.bytes) continue;
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
    const test::Places places(4);
    for (auto length = static_cast<size_t>(places.first); length + 1 < whole.size();
         length += static_cast<size_t>(places.stride)) {  // without the manifest's last newline it is whole
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

class DamagedShardTest : public CheckpointTest {
 protected:
  DamagedShardTest() {
    EXPECT_TRUE(Save(subject_, head_, "x", Sharded()).ok());
    EXPECT_TRUE(Save(subject_, other_, "y", Sharded()).ok());
  }

  static std::string Shard(const std::string& checkpoint, int number) {
    return absl::StrCat("/lm/", checkpoint, "/tensors-0000", number, "-of-00004.safetensors");
  }
  std::string Path(const std::string& checkpoint, int number) { return root_ + Shard(checkpoint, number); }

  // The load fails, before the sink was called, and says so.
  void ExpectRefused(const std::string& why) {
    int calls = 0;
    const absl::Status status = Load("lm/x", head_, &calls);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("checkpoint lm/x: " + why));
    EXPECT_EQ(calls, 0);
  }

  const CheckpointSubject subject_ = SomeSubject();
  Head head_ = RandomHead(subject_);
  Head other_ = RandomHead(subject_);
};

TEST_F(DamagedShardTest, Missing) {
  fs::remove(Path("x", 3));
  ExpectRefused("tensors-00003-of-00004.safetensors (classes [4, 6)): the tensor file is missing");
}

TEST_F(DamagedShardTest, Truncated) {
  const std::string whole = test::ReadWholeFile(Path("x", 2));
  test::WriteWholeFile(Path("x", 2), whole.substr(0, whole.size() - 4));
  ExpectRefused(absl::StrCat("tensors-00002-of-00004.safetensors (classes [2, 4)): the tensor file has ",
                             whole.size() - 4, " bytes, not ", whole.size()));
}

// Both have two classes and no tensor of the norm, so they differ in nothing but in what they say of
// themselves.
TEST_F(DamagedShardTest, Swapped) {
  ASSERT_EQ(fs::file_size(Path("x", 2)), fs::file_size(Path("x", 3)));
  fs::rename(Path("x", 2), root_ + "/kept");
  fs::rename(Path("x", 3), Path("x", 2));
  fs::rename(root_ + "/kept", Path("x", 3));
  ExpectRefused(
      "tensors-00002-of-00004.safetensors (classes [2, 4)): the tensor file says that it holds other "
      "classes");
}

TEST_F(DamagedShardTest, OfAnotherCheckpoint) {
  fs::copy_file(Path("y", 4), Path("x", 4), fs::copy_options::overwrite_existing);
  ExpectRefused(
      "tensors-00004-of-00004.safetensors (classes [6, 7)): the checksum of tensor weight does not match");
}

// Shards of a checkpoint that has fewer of them.
TEST_F(DamagedShardTest, OfAnotherDivision) {
  ASSERT_TRUE(Save(subject_, head_, "z", {.shards = {.most_bytes = 400, .threads = 2}}).ok());
  ASSERT_EQ(FilesIn(root_ + "/lm/z").size(), 3u);
  fs::copy_file(root_ + "/lm/z/tensors-00002-of-00002.safetensors", Path("x", 4),
                fs::copy_options::overwrite_existing);
  ExpectRefused("tensors-00004-of-00004.safetensors (classes [6, 7)): the tensor file has ");
}

TEST_F(DamagedShardTest, ALink) {
  test::TempFolder outside;
  fs::rename(Path("x", 2), outside.File("shard"));
  fs::create_symlink(outside.File("shard"), Path("x", 2));
  EXPECT_EQ(CheckpointReader::Open(root_, "lm/x").status().code(), absl::StatusCode::kInvalidArgument);
}

// A head that is new: its rows may come first, and the error after them.
TEST_F(DamagedShardTest, FoundWithoutVerifyingFirst) {
  std::string whole = test::ReadWholeFile(Path("x", 4));
  whole.back() = static_cast<char>(whole.back() + 1);
  test::WriteWholeFile(Path("x", 4), whole);
  int calls = 0;
  const absl::Status status = Load("lm/x", head_, &calls, {.verify_first = false});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr("tensors-00004-of-00004.safetensors (classes [6, 7)): the checksum of tensor class_weights"));
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
  fewer.shards[0].tensors.pop_back();
  expect_refused(fewer, "13 tensors in the file, 12 in the manifest, and 13 in such a file");
  more.shards[0].tensors.push_back(more.shards[0].tensors.back());
  expect_refused(more, "13 tensors in the file, 14 in the manifest");
  std::swap(other.shards[0].tensors[0], other.shards[0].tensors[1]);
  expect_refused(other, "tensor weight is not what the manifest says");
}

TEST_F(CheckpointTest, FilesThatChangeWhileLoadingAreFound) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  const std::string path = root_ + "/lm/x/tensors.safetensors";
  const auto size = static_cast<int64_t>(fs::file_size(path));
  const auto last_byte = static_cast<uint8_t>(test::ReadWholeFile(path).back());
  const auto write_last = [&](uint8_t byte) {
    const int file = open(path.c_str(), O_WRONLY);
    EXPECT_EQ(pwrite(file, &byte, 1, size - 1), 1);
    close(file);
  };
  const auto sink = [&](kernels::TensorId id, int64_t, int64_t, absl::Span<const uint8_t>) {
    if (id.param == Param::kWeight && id.role == Role::kValue)
      write_last(static_cast<uint8_t>(last_byte + 1));
    return absl::OkStatus();
  };
  // What was read before the change is right; reading runs ahead, so that the change may come too late.
  absl::Status status;
  for (int i = 0; i < 1000 && status.ok(); ++i) {
    write_last(last_byte);
    status = CheckpointReader::Open(root_, "lm/x").value()->Load(sink);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("class_weights"));
}

TEST_F(CheckpointTest, AnotherFormatVersionIsRefused) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  const std::string path = root_ + "/lm/x/manifest.json";
  auto manifest = nlohmann::ordered_json::parse(test::ReadWholeFile(path));
  for (const int version : {2, 5}) {
    manifest["version"] = version;
    test::WriteWholeFile(path, manifest.dump());
    const absl::Status status = CheckpointReader::Open(root_, "lm/x").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("lm/x"), HasSubstr(absl::StrCat("has version ", version))));
  }
}

}  // namespace
}  // namespace lossd::head::checkpoint_damage_test
