// SPDX-License-Identifier: Apache-2.0
// Checkpoints through the service: what is saved comes back, damaged files do not.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "proto/wire/status_details.h"
#include "tests/server/service/heads_fixture.h"
#include "tests/support/head_folder.h"

namespace lossd::app::testing::head_checkpoints_test {
namespace {

// Save, go on, load: the head is as it was, and so are the steps that follow.
TEST_F(HeadsTest, CheckpointRoundTrip) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  kernels::testing::Rng batches(1);
  for (uint64_t step = 0; step < 3; ++step) {
    ASSERT_TRUE(Train(*client_, "head", step, 1, batches).ok());
    ASSERT_TRUE(Step(*client_, "head", step).ok());
  }
  const auto saved_values = ReadAll(*client_, "head");
  const auto saved = client_->SaveCheckpoint("head", "");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->checkpoint(), "head/step-0000000003");
  EXPECT_GT(saved->bytes(), kHidden * kClasses * 12);
  EXPECT_EQ(client_->SaveCheckpoint("head", "").status().code(), absl::StatusCode::kAlreadyExists);

  kernels::testing::Rng next_batches(2);
  ASSERT_TRUE(Train(*client_, "head", 3, 1, next_batches).ok());
  ASSERT_TRUE(Step(*client_, "head", 3).ok());
  const auto later_values = ReadAll(*client_, "head");
  EXPECT_NE(later_values, saved_values);

  // Into the same head; gradients of the open step are discarded.
  ASSERT_TRUE(Train(*client_, "head", 4, 1, batches).ok());
  const auto loaded = client_->LoadCheckpoint(saved->checkpoint(), "");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->state().step(), 3u);
  EXPECT_EQ(loaded->step_rows(), 0u);
  EXPECT_EQ(ReadAll(*client_, "head"), saved_values);
  EXPECT_EQ(*client_->GradNorm("head"), 0.0);

  // As a new head.
  const auto copy = client_->LoadCheckpoint(saved->checkpoint(), "copy");
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(ReadAll(*client_, "copy"), saved_values);
  for (const char* head : {"head", "copy"}) {
    kernels::testing::Rng same_batches(2);
    ASSERT_TRUE(Train(*client_, head, 3, 1, same_batches).ok());
    ASSERT_TRUE(Step(*client_, head, 3).ok());
    EXPECT_EQ(ReadAll(*client_, head), later_values) << head;
  }
}

TEST_F(HeadsTest, CheckpointOfAnotherShapeIsRefused) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("head", "first").ok());
  v1::CreateHeadRequest other = Request("other");
  other.mutable_spec()->set_vocab_size(kClasses + 1);
  ASSERT_TRUE(client_->CreateHead(other).ok());
  const auto before = ReadAll(*client_, "other");
  EXPECT_EQ(client_->LoadCheckpoint("head/first", "other").status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReadAll(*client_, "other"), before);
}

TEST_F(HeadsTest, CheckpointsKeepLogitsGradientsAndLimit) {
  v1::CreateHeadRequest request = Request("small");
  request.mutable_spec()->set_logits(v1::LOGITS_RECOMPUTED);
  request.mutable_spec()->set_gradients(v1::GRADIENTS_AUTO);
  request.mutable_spec()->set_workspace_bytes(128 << 10);
  ASSERT_TRUE(client_->CreateHead(request).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("small", "one").ok());
  const auto copy = client_->LoadCheckpoint("small/one", "copy");
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->spec().logits(), v1::LOGITS_RECOMPUTED);
  EXPECT_EQ(copy->spec().gradients(), v1::GRADIENTS_AUTO);
  EXPECT_EQ(copy->spec().workspace_bytes(), 128u << 10);
  // A head that is there keeps its own.
  ASSERT_TRUE(client_->CreateHead(Request("plain")).ok());
  const auto plain = client_->LoadCheckpoint("small/one", "plain");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->spec().logits(), v1::LOGITS_STORED);
  EXPECT_EQ(plain->spec().gradients(), v1::GRADIENTS_EXACT);
  EXPECT_EQ(plain->spec().workspace_bytes(), 0u);
}

TEST_F(HeadsTest, DamagedCheckpointIsRefused) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("head", "first").ok());
  const auto before = ReadAll(*client_, "head");
  for (const auto& entry :
       std::filesystem::directory_iterator(server_.checkpoint_directory() + "/head/first")) {
    if (entry.path().extension() != ".safetensors") continue;
    std::string content = test::ReadWholeFile(entry.path());
    content[content.size() - 5] ^= 1;
    test::WriteWholeFile(entry.path(), content);
  }
  EXPECT_EQ(client_->LoadCheckpoint("head/first", "").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(client_->LoadCheckpoint("head/first", "fresh").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadAll(*client_, "head"), before);
  EXPECT_EQ(client_->DescribeHead("fresh").status().code(), absl::StatusCode::kNotFound);
}

// Progress comes, a call that ends early does not end its save unless it says so, and saves are listed.
TEST_F(HeadsTest, SavesThroughTheService) {
  v1::CreateHeadRequest large = Request("large");
  large.mutable_spec()->set_vocab_size(200'000);
  ASSERT_TRUE(client_->CreateHead(large).ok());
  v1::SaveCheckpointRequest request;
  request.set_head("large");
  request.set_name("whole");
  uint64_t total = 0;
  const auto saved = client_->SaveCheckpoint(request, [&](const v1::SaveProgress& progress) {
    EXPECT_LE(progress.written_bytes(), progress.read_bytes());
    EXPECT_LE(progress.read_bytes(), progress.total_bytes());
    total = std::max(total, progress.total_bytes());
    return true;
  });
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(total, 4 * (3 * (kHidden * 200'000 + 200'000 + 2 * kHidden) + 200'000));
  EXPECT_GT(saved->bytes(), total);

  request.set_name("left-alone");
  EXPECT_EQ(client_->SaveCheckpoint(request, [](const v1::SaveProgress&) { return false; }).status().code(),
            absl::StatusCode::kCancelled);
  // Saves take turns: once this one is done, that one is.
  ASSERT_TRUE(client_->SaveCheckpoint("large", "last").ok());
  const auto list = client_->ListCheckpoints("large");
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ(list->checkpoints_size(), 3);
  EXPECT_TRUE(client_->LoadCheckpoint("large/left-alone", "copy").ok());
  EXPECT_EQ(client_->ListCheckpoints("no/name").status().code(), absl::StatusCode::kInvalidArgument);

  request.set_name("cancelled");
  request.set_cancel_with_call(true);
  EXPECT_EQ(client_->SaveCheckpoint(request, [](const v1::SaveProgress&) { return false; }).status().code(),
            absl::StatusCode::kCancelled);
  ASSERT_TRUE(client_->SaveCheckpoint("large", "after").ok());
  EXPECT_EQ(client_->ListCheckpoints("")->checkpoints_size(), 4);
}

// The errors name field and value.
TEST_F(HeadsTest, WrongDeletionsSayWhatIsWrong) {
  const auto expect = [&](const std::string& checkpoint, const std::string& id, absl::StatusCode code,
                          const std::string& field, const std::string& value) {
    const absl::Status status = client_->DeleteCheckpoint(checkpoint, id).status();
    EXPECT_EQ(status.code(), code) << status;
    const v1::ErrorDetail detail = wire::GetErrorDetail(status).value_or(v1::ErrorDetail());
    EXPECT_EQ(detail.field(), field);
    EXPECT_EQ(detail.value(), value);
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  expect("../up", "x", kInvalid, "checkpoint", "../up");
  expect("", "x", kInvalid, "checkpoint", "");
  expect("head/none", "x", absl::StatusCode::kNotFound, "checkpoint", "head/none");
  expect("head/none", "", kInvalid, "deletion_id", "nothing");
  expect("head/none", std::string(65, 'x'), kInvalid, "deletion_id", "65 characters");
}

// Through the service: once for an id, and the names that are left.
TEST_F(HeadsTest, CheckpointsAreDeleted) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  const auto saved = client_->SaveCheckpoint("head", "one");
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_TRUE(client_->SaveCheckpoint("head", "two").ok());
  const auto deleted = client_->DeleteCheckpoint("head/one", "a");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->bytes(), saved->bytes());
  EXPECT_FALSE(deleted->repeated_call());
  ASSERT_TRUE(client_->SaveCheckpoint("head", "one").ok());
  EXPECT_TRUE(client_->DeleteCheckpoint("head/one", "a")->repeated_call());
  EXPECT_EQ(client_->ListCheckpoints("head")->checkpoints_size(), 2);
  EXPECT_EQ(client_->DeleteCheckpoint("head/two", "a").status().code(),
            absl::StatusCode::kFailedPrecondition);
  // The head does not need its checkpoints, nor they the head.
  ASSERT_TRUE(client_->DeleteHead("head").ok());
  EXPECT_TRUE(client_->DeleteCheckpoint("head/one", "b").ok());
  EXPECT_TRUE(client_->DeleteCheckpoint("head/two", "c").ok());
  EXPECT_EQ(client_->ListCheckpoints("")->checkpoints_size(), 0);
  EXPECT_EQ(client_->DeleteCheckpoint("head/two", "d").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(test::NamesInHeadFolder(server_.checkpoint_directory() + "/head").empty());
}

}  // namespace
}  // namespace lossd::app::testing::head_checkpoints_test
