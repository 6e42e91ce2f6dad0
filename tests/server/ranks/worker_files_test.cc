// SPDX-License-Identifier: Apache-2.0
// A worker's work on files, asked for by a leader that may say anything.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/head/checkpoint.h"
#include "server/head/disk.h"
#include "server/head/file_sites.h"
#include "server/ranks/worker.h"
#include "tests/server/head/checkpoint_fixture.h"
#include "tests/support/temp_folder.h"

namespace lossd::ranks::worker_files_test {
namespace {

namespace fs = std::filesystem;

using ::testing::HasSubstr;

constexpr char kFolder[] = ".tmp-a-0123abcd";
constexpr char kNonce[] = "0123456789abcdef0123456789abcdef";

class WorkerFilesTest : public ::testing::Test {
 protected:
  WorkerFilesTest() {
    fs::create_directories(absl::StrCat(root_, "/head/", kFolder));
    EXPECT_TRUE(head::WriteSmallFile(head::Disk::Real(), InFolder(head::kNonceFile), kNonce).ok());
  }
  ~WorkerFilesTest() override { files_.End(); }

  std::string InFolder(const std::string& name) const {
    return absl::StrCat(root_, "/head/", kFolder, "/", name);
  }
  static v1::Request Save(uint64_t id, const std::string& head, const std::string& folder) {
    v1::Request request;
    request.set_id(id);
    request.set_head(1);
    request.mutable_save_files()->set_head_name(head);
    request.mutable_save_files()->set_folder(folder);
    return request;
  }
  static v1::Request GoOn(uint64_t id, uint64_t with, std::vector<std::pair<int64_t, int64_t>> files,
                          uint32_t first, uint32_t all) {
    v1::Request request;
    request.set_id(id);
    v1::GoOn* const go_on = request.mutable_go_on();
    go_on->set_request(with);
    go_on->set_first(first);
    go_on->set_all(all);
    for (const auto& [begin, end] : files) {
      v1::FileClasses* const classes = go_on->add_files();
      classes->set_begin(begin);
      classes->set_end(end);
    }
    return request;
  }
  static v1::Request Cancel(uint64_t id, uint64_t which) {
    v1::Request request;
    request.set_id(id);
    request.set_cancel_files(which);
    return request;
  }

  // The answer to a request, when it comes.
  v1::Answer AwaitAnswer(uint64_t request) {
    absl::MutexLock lock(&mutex_);
    v1::Answer answer;
    const auto there = [&] {
      mutex_.AssertHeld();
      for (const v1::FromWorker& message : said_) {
        if (message.has_answer() && message.answer().request() == request) {
          answer = message.answer();
          return true;
        }
      }
      return false;
    };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(60))) << request;
    return answer;
  }
  v1::FilesProgress AwaitReady(uint64_t request) {
    absl::MutexLock lock(&mutex_);
    v1::FilesProgress progress;
    const auto there = [&] {
      mutex_.AssertHeld();
      for (const v1::FromWorker& message : said_) {
        if (message.has_files() && message.files().request() == request && message.files().ready()) {
          progress = message.files();
          return true;
        }
      }
      return false;
    };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(60))) << request;
    return progress;
  }
  std::vector<std::string> FilesBelow(const std::string& path) {
    std::vector<std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(path)) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    return files;
  }

  test::TempFolder folder_;
  const std::string root_ = folder_.File("checkpoints");
  head::MemoryKernels kernels_{{.hidden_size = 4, .vocab_size = 10}};
  absl::Mutex mutex_;
  std::vector<v1::FromWorker> said_ ABSL_GUARDED_BY(mutex_);
  WorkerFiles files_{{.rank = 2, .directory = root_},
                     {.on_driver = [](std::function<void()> task) { task(); },
                      .find = [this](uint64_t id) { return id == 1 ? &kernels_ : nullptr; },
                      .send =
                          [this](v1::FromWorker message) {
                            absl::MutexLock lock(&mutex_);
                            said_.push_back(std::move(message));
                          }}};
};

TEST_F(WorkerFilesTest, ShowsWhatItSeesAndWritesItsFiles) {
  files_.Handle(Save(1, "head", kFolder));
  const v1::FilesProgress ready = AwaitReady(1);
  EXPECT_EQ(ready.nonce(), kNonce);
  EXPECT_EQ(
      *head::ReadSmallFile(absl::StrCat(root_, "/head/", kFolder), head::ProofFile(2), ready.token().size()),
      ready.token());
  files_.Handle(GoOn(2, 1, {{5, 8}, {8, 10}}, 1, 3));
  EXPECT_EQ(AwaitAnswer(2).status().code(), 0) << AwaitAnswer(2).status().message();
  const v1::Answer answer = AwaitAnswer(1);
  ASSERT_EQ(answer.status().code(), 0) << answer.status().message();
  ASSERT_EQ(answer.lines_size(), 2);
  EXPECT_EQ(fs::file_size(InFolder("tensors-00002-of-00003.safetensors")),
            static_cast<uintmax_t>(answer.lines(0).file_bytes()));
  EXPECT_TRUE(fs::exists(InFolder("tensors-00003-of-00003.safetensors")));
  EXPECT_FALSE(fs::exists(InFolder(head::ProofFile(2)))) << "it has served its purpose";
}

TEST_F(WorkerFilesTest, WritesNowhereElse) {
  const std::string outside = folder_.File("outside");
  fs::create_directories(absl::StrCat(outside, "/", kFolder));
  fs::create_directories(absl::StrCat(root_, "/real/.tmp-there-01234567"));
  for (const std::string& folder : {absl::StrCat(outside, "/", kFolder),
                                    absl::StrCat(root_, "/real/.tmp-there-01234567"), root_, outside}) {
    EXPECT_TRUE(
        head::WriteSmallFile(head::Disk::Real(), absl::StrCat(folder, "/", head::kNonceFile), kNonce).ok());
  }
  fs::create_directory_symlink(outside, root_ + "/linked");
  fs::create_directory_symlink(root_ + "/real", root_ + "/inside");
  fs::create_directory_symlink(absl::StrCat(outside, "/", kFolder), root_ + "/real/.tmp-link-01234567");
  fs::create_directories(root_ + "/real/finished");
  const std::vector<std::string> before = FilesBelow(folder_.path());
  const std::pair<std::string, std::string> places[] = {
      {"..", kFolder},
      {"../outside", kFolder},
      {outside, kFolder},
      {"/", kFolder},
      {"", kFolder},
      {".", kFolder},
      {"head/../../outside", kFolder},
      {std::string("head\0x", 6), kFolder},
      {"head", ""},
      {"head", "."},
      {"head", ".."},
      {"head", "../../outside"},
      {"head", ".tmp-"},
      {"head", ".tmp-/../../../outside"},
      {"head", absl::StrCat(".tmp-a/../", kFolder)},
      {"head", std::string(".tmp-a\0b", 8)},
      {"head", ".tmp-" + std::string(2000, 'a')},
      {"head", absl::StrCat(outside, "/", kFolder)},
      {"real", "finished"},               // a checkpoint, not a temporary folder
      {"linked", kFolder},                // a link to the outside
      {"inside", ".tmp-there-01234567"},  // a link that stays inside
      {"real", ".tmp-link-01234567"},     // a folder that is a link
      {"missing", kFolder},
  };
  uint64_t id = 10;
  for (const auto& [head, folder] : places) {
    SCOPED_TRACE(absl::StrCat(head, " ", folder));
    files_.Handle(Save(++id, head, folder));
    const v1::Answer answer = AwaitAnswer(id);
    EXPECT_NE(answer.status().code(), 0);
    EXPECT_FALSE(answer.status().message().empty());
    EXPECT_EQ(FilesBelow(folder_.path()), before);
  }
}

// A link in the place of a file is not written through.
TEST_F(WorkerFilesTest, FollowsNoLinkInTheFolder) {
  fs::create_symlink(folder_.File("victim"), InFolder("tensors-00002-of-00002.safetensors"));
  files_.Handle(Save(1, "head", kFolder));
  AwaitReady(1);
  files_.Handle(GoOn(2, 1, {{5, 10}}, 1, 2));
  const v1::Answer answer = AwaitAnswer(1);
  EXPECT_NE(answer.status().code(), 0);
  EXPECT_THAT(answer.status().message(), HasSubstr(absl::StrCat("head/", kFolder)));
  EXPECT_FALSE(fs::exists(folder_.File("victim")));

  fs::create_symlink(folder_.File("victim"), InFolder(".proof-2"));
  files_.Handle(Save(3, "head", kFolder));
  EXPECT_NE(AwaitAnswer(3).status().code(), 0);
  EXPECT_FALSE(fs::exists(folder_.File("victim")));
}

TEST_F(WorkerFilesTest, FilesThatCannotBeAreRefused) {
  const std::vector<v1::Request> wrong = {
      GoOn(0, 0, {}, 0, 2),
      GoOn(0, 0, {{0, 5}}, 2, 2),
      GoOn(0, 0, {{0, 5}}, 4'294'967'295, 2),
      GoOn(0, 0, {{0, 5}, {5, 10}}, 1, 2),
      GoOn(0, 0, {{0, 5}}, 0, 100'000),
      GoOn(0, 0, {{-1, 5}}, 0, 2),
      GoOn(0, 0, {{5, 5}}, 0, 2),
      GoOn(0, 0, {{0, 11}}, 0, 2),
      GoOn(0, 0, {{9, 3}}, 0, 2),
  };
  uint64_t id = 100;
  for (v1::Request go_on : wrong) {
    SCOPED_TRACE(go_on.ShortDebugString());
    files_.Handle(Save(++id, "head", kFolder));
    AwaitReady(id);
    go_on.mutable_go_on()->set_request(id);
    const uint64_t save = id;
    go_on.set_id(++id);
    files_.Handle(go_on);
    EXPECT_EQ(AwaitAnswer(save).status().code(), static_cast<int>(absl::StatusCode::kInternal));
  }
  for (const std::string& file : FilesBelow(root_)) EXPECT_THAT(file, ::testing::Not(HasSubstr("tensors-")));
}

TEST_F(WorkerFilesTest, ACancelledSaveEndsAndOthersAreBounded) {
  for (uint64_t id = 1; id <= WorkerFiles::kMostJobs; ++id) {
    fs::create_directories(absl::StrCat(root_, "/head/.tmp-", id));
    EXPECT_TRUE(head::WriteSmallFile(head::Disk::Real(),
                                     absl::StrCat(root_, "/head/.tmp-", id, "/", head::kNonceFile), kNonce)
                    .ok());
    files_.Handle(Save(id, "head", absl::StrCat(".tmp-", id)));
    AwaitReady(id);
  }
  files_.Handle(Save(50, "head", kFolder));
  EXPECT_EQ(AwaitAnswer(50).status().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  files_.Handle(GoOn(51, 49, {{0, 5}}, 0, 2));
  EXPECT_EQ(AwaitAnswer(51).status().code(), static_cast<int>(absl::StatusCode::kNotFound));
  files_.Handle(Cancel(52, 1));
  EXPECT_EQ(AwaitAnswer(52).status().code(), 0);
  EXPECT_EQ(AwaitAnswer(1).status().code(), static_cast<int>(absl::StatusCode::kCancelled));
  EXPECT_FALSE(fs::exists(root_ + "/head/.tmp-1/.proof-2"));
}

// The paths of a load are a client's in the end; the reader checks them (disk_test).
TEST_F(WorkerFilesTest, LoadsNoOtherCheckpoint) {
  const head::CheckpointSubject subject = {.head = "head", .config = kernels_.config()};
  const auto source = [&](kernels::TensorId id, int64_t row, int64_t rows, absl::Span<uint8_t> out) {
    return kernels_.ReadTensor(id, row, rows, kernels::DType::kFloat32, out);
  };
  ASSERT_TRUE(head::SaveCheckpoint(root_, "a", subject, source).ok());
  const auto load = [&](uint64_t id, const std::string& checkpoint, const std::string& content_digest) {
    v1::Request request;
    request.set_id(id);
    request.set_head(1);
    request.mutable_load_files()->set_checkpoint(checkpoint);
    request.mutable_load_files()->set_content_digest(content_digest);
    request.mutable_load_files()->set_replicas(1);
    files_.Handle(request);
  };
  const std::string digest = (*head::CheckpointReader::Open(root_, "head/a"))->content_digest();
  load(1, "head/a", "0123456789abcdef");
  EXPECT_EQ(AwaitAnswer(1).status().code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  load(2, "../outside/a", digest);
  EXPECT_EQ(AwaitAnswer(2).status().code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  load(3, "head/missing", digest);
  EXPECT_EQ(AwaitAnswer(3).status().code(), static_cast<int>(absl::StatusCode::kNotFound));
  load(4, "head/a", digest);
  AwaitReady(4);
  files_.Handle(GoOn(5, 4, {}, 0, 0));
  EXPECT_EQ(AwaitAnswer(4).status().code(), 0) << AwaitAnswer(4).status().message();
}

}  // namespace
}  // namespace lossd::ranks::worker_files_test
