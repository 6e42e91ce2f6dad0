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

namespace lossd::head {
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

}  // namespace
}  // namespace lossd::head
