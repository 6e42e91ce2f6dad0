// SPDX-License-Identifier: Apache-2.0
// Checkpoints on a full disk, and checkpoints whose files were cut short or have a wrong bit: refused with
// the name of what is wrong, and nothing else changes.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/tensorfile/safetensors.h"
#include "tests/faults/faults_test.h"
#include "tests/support/temp_folder.h"

namespace lossd::test::checkpoint_faults_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class CheckpointFaultsTest : public FaultsTest {
 protected:
  void Train() {
    const absl::Status status = TrainStep(trainer_, *direct_);
    ASSERT_TRUE(status.ok()) << status;
  }
  std::string HeadFolder() const { return server_.checkpoint_folder() + "/" + shape_.head; }
  void Restart() {
    server_.Kill();
    server_.Start();
    direct_ = client::Client::Connect({.target = server_.target()}).value();
  }
};

// A folder whose disk can be filled: a small file system of its own where the test may mount one, else a
// limit on the size of the files that the server writes.
class SmallDisk {
 public:
  static constexpr int64_t kBytes = int64_t{4} << 20;

  SmallDisk(const std::string& folder, pid_t server) : folder_(folder), server_(server) {
    fs::create_directories(folder_);
    mounted_ = mount("tmpfs", folder_.c_str(), "tmpfs", 0, absl::StrCat("size=", kBytes).c_str()) == 0;
  }
  ~SmallDisk() {
    if (mounted_) umount2(folder_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }

  // From now on about so many bytes fit.
  void LeaveFree(int64_t bytes) {
    if (!mounted_) return Limit(static_cast<rlim_t>(bytes));
    std::ofstream filler(folder_ + "/filler", std::ios::binary);
    const auto free = static_cast<int64_t>(fs::space(folder_).available);
    filler << std::string(static_cast<size_t>(std::max<int64_t>(free - bytes, 0)), 'x');
  }
  void Free() {
    if (!mounted_) return Limit(RLIM_INFINITY);
    fs::remove(folder_ + "/filler");
  }

 private:
  void Limit(rlim_t bytes) const {
    const rlimit limit = {.rlim_cur = bytes, .rlim_max = RLIM_INFINITY};
    EXPECT_EQ(prlimit(server_, RLIMIT_FSIZE, &limit, nullptr), 0);
  }

  const std::string folder_;
  const pid_t server_;
  bool mounted_ = false;
};

TEST_F(CheckpointFaultsTest, DiskIsFull) {
  SmallDisk disk(server_.checkpoint_folder(), server_.pid());
  std::cout << (disk.mounted() ? "a file system of its own\n" : "a limit on the size of files\n");
  Train();
  const auto first = direct_->SaveCheckpoint(shape_.head, "first");
  ASSERT_TRUE(first.ok()) << first.status();
  const auto bytes = static_cast<int64_t>(first->bytes());
  const SmallTrainer first_trainer = trainer_;
  const auto first_image = TakeImage(trainer_, *direct_, shape_);
  ASSERT_TRUE(first_image.ok()) << first_image.status();
  for (int64_t i = 0; i < Scaled(12); ++i) {
    disk.LeaveFree(i == 0 ? 0 : Draw(bytes - 8192));
    const auto saved = direct_->SaveCheckpoint(shape_.head, "second");
    ASSERT_FALSE(saved.ok());
    EXPECT_THAT(std::string(saved.status().message()),
                HasSubstr(disk.mounted() ? "No space left on device" : "File too large"));
    Count("checkpoints on a full disk");
    Train();
    disk.Free();
    EXPECT_THAT(NamesInHeadFolder(HeadFolder()), ::testing::ElementsAre("first"))
        << "something is left of it";
    ASSERT_TRUE(Undisturbed());
  }
  const auto second = direct_->SaveCheckpoint(shape_.head, "second");
  ASSERT_TRUE(second.ok()) << second.status();
  Restart();
  ASSERT_TRUE(direct_->LoadCheckpoint("head/second").ok());
  EXPECT_TRUE(Undisturbed());
  ASSERT_TRUE(direct_->LoadCheckpoint("head/first").ok());
  const auto image = TakeImage(first_trainer, *direct_, shape_);
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(Difference(*image, *first_image), "");
}

class DamagedCheckpointTest : public CheckpointFaultsTest {
 protected:
  static constexpr char kManifest[] = "/manifest.json";

  // A saved step, and half of the next one accumulated.
  void SetUp() override {
    Train();
    ASSERT_TRUE(direct_->SaveCheckpoint(shape_.head, "good").ok());
    const auto half = trainer_.Send(*direct_, 0, AnyTravel());
    ASSERT_TRUE(trainer_.Receive(0, *half).ok());
    for (const auto& entry : fs::directory_iterator(HeadFolder() + "/good")) {
      const std::string name = "/" + entry.path().filename().string();
      if (name == kManifest) continue;
      auto tensors = formats::SafetensorsReader::Open(entry.path());
      ASSERT_TRUE(tensors.ok()) << tensors.status();
      files_[name] = *std::move(tensors);
    }
    std::cout << files_.size() << " files of tensors\n";
  }

  // Loads the good checkpoint with another content of one file.
  absl::Status LoadWith(const std::string& file, const std::string& content) {
    const std::string bad = HeadFolder() + "/bad";
    fs::remove_all(bad);
    fs::copy(HeadFolder() + "/good", bad);
    WriteWholeFile(bad + file, content);
    return direct_->LoadCheckpoint("head/bad").status();
  }

  // Such a checkpoint must be refused by name.
  void ExpectRefusal(const absl::Status& status, const std::string& text = "head/bad") {
    // The latter if the manifest's version is hit.
    EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kDataLoss, absl::StatusCode::kFailedPrecondition))
        << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("head/bad"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }

  // Where the JSON text before `end` ends; blanks after it mean nothing.
  static int64_t EndOfJson(const std::string& content, size_t end) {
    return static_cast<int64_t>(content.rfind('}', end)) + 1;
  }

  // The step goes on where it was.
  void ExpectNothingChanged() {
    Train();
    EXPECT_TRUE(Undisturbed());
  }

  std::vector<std::string> FileNames() const {
    std::vector<std::string> names = {kManifest};
    for (const auto& [name, tensors] : files_) names.push_back(name);
    return names;
  }

  std::map<std::string, std::unique_ptr<formats::SafetensorsReader>> files_;  // of tensors
};

TEST_F(DamagedCheckpointTest, WrongBitInATensorIsRefusedByName) {
  for (int64_t i = 0; i < Scaled(150); ++i) {
    const auto& [file, reader] = *std::next(files_.begin(), Draw(static_cast<int64_t>(files_.size()) - 1));
    const auto& tensor = reader->tensors()[static_cast<size_t>(i) % reader->tensors().size()];
    std::string content = ReadWholeFile(HeadFolder() + "/good" + file);
    const int64_t at = tensor.begin + Draw(tensor.bytes - 1);
    content[static_cast<size_t>(at)] ^= static_cast<char>(1 << Draw(7));
    const absl::Status status = LoadWith(file, content);
    ExpectRefusal(status, absl::StrCat("tensor ", tensor.name, " "));
    ExpectRefusal(status, file.substr(1));
    ASSERT_FALSE(HasFailure()) << "bit of byte " << at;
    Count("flipped bits");
  }
  ExpectNothingChanged();
}

TEST_F(DamagedCheckpointTest, WrongBitInAHeaderIsRefused) {
  for (const std::string& file : FileNames()) {
    const std::string good = ReadWholeFile(HeadFolder() + "/good" + file);
    const bool is_manifest = file == kManifest;
    const int64_t most = EndOfJson(good, is_manifest ? good.size() : files_[file]->tensors()[0].begin);
    for (int64_t i = 0; i < Scaled(100); ++i) {
      std::string content = good;
      const int64_t at = Draw(most - 1), bit = Draw(7);
      content[static_cast<size_t>(at)] ^= static_cast<char>(1 << bit);
      const absl::Status status = LoadWith(file, content);
      Count("flipped bits");
      if (status.ok()) {  // a number's e that became an E: nothing is lost but what was accumulated
        ASSERT_TRUE(Undisturbed()) << file << ", bit " << bit << " of byte " << at;
        trainer_.Repeat();
        Count("flipped bits that mean nothing");
      } else {
        ExpectRefusal(status);
        ASSERT_FALSE(HasFailure()) << file << ", bit " << bit << " of byte " << at;
      }
    }
  }
  ExpectNothingChanged();
}

TEST_F(DamagedCheckpointTest, FilesThatAreMissingOrExchangedAreRefused) {
  const std::string bad = HeadFolder() + "/bad";
  for (auto file = files_.begin(); file != files_.end(); ++file) {
    fs::remove_all(bad);
    fs::copy(HeadFolder() + "/good", bad);
    fs::remove(bad + file->first);
    ExpectRefusal(direct_->LoadCheckpoint("head/bad").status(), file->first.substr(1));
    const auto next = std::next(file);
    if (next == files_.end()) break;
    fs::copy(HeadFolder() + "/good" + next->first, bad + file->first);
    fs::copy(HeadFolder() + "/good" + file->first, bad + next->first, fs::copy_options::overwrite_existing);
    ExpectRefusal(direct_->LoadCheckpoint("head/bad").status(), file->first.substr(1));
  }
  ExpectNothingChanged();
}

TEST_F(DamagedCheckpointTest, ShortFileIsRefused) {
  for (const std::string& file : FileNames()) {
    const std::string good = ReadWholeFile(HeadFolder() + "/good" + file);
    const int64_t most = file == kManifest ? EndOfJson(good, good.size()) : static_cast<int64_t>(good.size());
    for (int64_t i = 0; i < Scaled(30); ++i) {
      const int64_t size = i == 0 ? 0 : Draw(most - 1);
      ExpectRefusal(LoadWith(file, good.substr(0, static_cast<size_t>(size))));
      ASSERT_FALSE(HasFailure()) << file << ", " << size << " bytes";
      Count("files cut short");
    }
    ExpectRefusal(LoadWith(file, good + "x"));
  }
  ExpectNothingChanged();
}

}  // namespace
}  // namespace lossd::test::checkpoint_faults_test
