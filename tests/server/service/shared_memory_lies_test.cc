// SPDX-License-Identifier: Apache-2.0
// Clients that lie about shared memory: places, sizes, ids, and what they write while it is read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "client/cpp/shared_region.h"
#include "kernels/clocks/clock.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/small_head.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::shared_memory_lies_test {
namespace {

using client::internal::SharedRegion;
using ::testing::HasSubstr;

constexpr uint64_t kRowBytes = kSmallHidden * sizeof(float);

// A client that says whatever it likes.
class LiesTest : public ::testing::Test {
 protected:
  LiesTest() : client_(server_.Connect()) {
    EXPECT_TRUE(client_->CreateHead(SmallHead()).ok());
    region_ = OpenRegion();
  }
  std::shared_ptr<SharedRegion> OpenRegion() {
    auto region = SharedRegion::Open(client_->GetServer()->region_socket(), 64 << 10, absl::Seconds(60));
    EXPECT_TRUE(region.ok()) << region.status();
    return *std::move(region);
  }
  v1::OpenMicrobatch Open(const std::string& region) const {
    v1::OpenMicrobatch open = OpenSum(std::vector<int32_t>(kRows, 1));
    open.set_region(region);
    return open;
  }
  static v1::ComputeLossRequest Slice(uint64_t offset, uint64_t bytes, const std::string& payload = "") {
    v1::ComputeLossRequest request;
    request.mutable_slice()->mutable_rows()->set_end(kRows);
    request.mutable_slice()->mutable_in_region()->set_offset(offset);
    request.mutable_slice()->mutable_in_region()->set_bytes(bytes);
    request.set_payload(payload);
    return request;
  }
  LossAnswers Send(const std::string& region, const v1::ComputeLossRequest& slice) {
    const auto stream = client_->OpenLoss();
    stream->SendOpen(Open(region));
    stream->Send(slice);
    stream->HalfClose();
    return stream->Finish();
  }

  static constexpr int kRows = 8;
  static constexpr uint64_t kBytes = kRows * kRowBytes;
  TestServer server_;
  std::unique_ptr<TestClient> client_;
  std::shared_ptr<SharedRegion> region_;
};

TEST_F(LiesTest, AnHonestSliceIsAnsweredInItsPlace) {
  std::fill_n(reinterpret_cast<float*>(region_->At(512)), kRows * kSmallHidden, 0.25f);
  const LossAnswers answers = Send(region_->id(), Slice(512, kBytes));
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  ASSERT_EQ(answers.slices.size(), 1u);
  EXPECT_TRUE(answers.slices[0].result.in_region());
  EXPECT_EQ(answers.slices[0].payload, "");
  std::vector<float> in_region(kRows * kSmallHidden);
  std::memcpy(in_region.data(), region_->At(512), kBytes);

  const auto stream = client_->OpenLoss();
  stream->SendOpen(Open(""));
  stream->SendSlice(0, kRows, Bytes(std::vector<float>(kRows * kSmallHidden, 0.25f)));
  stream->HalfClose();
  const LossAnswers in_message = stream->Finish();
  ASSERT_TRUE(in_message.status.ok()) << in_message.status;
  EXPECT_EQ(Bytes(in_region), in_message.slices[0].payload);
}

TEST_F(LiesTest, PlacesOutsideTheRegionAreRefused) {
  const uint64_t size = region_->size(), most = ~uint64_t{0};
  const std::vector<std::pair<uint64_t, uint64_t>> places = {
      {size, kBytes},    {size - 256, kBytes},
      {most, kBytes},    {most - 255, kBytes},
      {most - 255, 256}, {0, most},
      {256, most - 255}, {0, 0},
      {0, size + 1},     {1, kBytes},
      {255, kBytes},     {uint64_t{1} << 63, uint64_t{1} << 63}};
  for (const auto& [offset, bytes] : places) {
    const LossAnswers answers = Send(region_->id(), Slice(offset, bytes));
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument) << offset << " " << bytes;
    EXPECT_THAT(std::string(answers.status.message()), HasSubstr("slice.in_region"))
        << offset << " " << bytes;
  }
  EXPECT_TRUE(Send(region_->id(), Slice(size / 256 * 256 - 1024, kBytes)).status.ok())
      << "the end of the region";
}

TEST_F(LiesTest, BytesHaveToFitTheRows) {
  for (const uint64_t bytes : {kBytes - 1, kBytes + 1, uint64_t{1}, uint64_t{16} << 10}) {
    EXPECT_EQ(Send(region_->id(), Slice(0, bytes)).status.code(), absl::StatusCode::kInvalidArgument)
        << bytes;
  }
  EXPECT_EQ(Send(region_->id(), Slice(0, kBytes, "x")).status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(LiesTest, ASliceInARegionNeedsOne) {
  const LossAnswers answers = Send("", Slice(0, kBytes));
  EXPECT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(answers.status.message()), HasSubstr("open.region"));
}

TEST_F(LiesTest, ARegionIsFoundByItsIdAlone) {
  std::string near = region_->id();
  near.back() = static_cast<char>(near.back() ^ 1);
  std::vector<std::string> messages;
  for (const std::string& id : {near, std::string(16, '\0'), std::string("x"), std::string(1000, 'a'),
                                region_->id().substr(0, 15), region_->id() + "x"}) {
    const LossAnswers answers = Send(id, Slice(0, kBytes));
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kUnavailable);
    messages.emplace_back(answers.status.message());
  }
  for (const std::string& message : messages)
    EXPECT_EQ(message, messages[0]) << "it tells something of a region";
  const std::string gone = OpenRegion()->id();  // and closed again
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  while (Send(gone, Slice(0, kBytes)).status.ok() && clocks::SteadyNow() < end)
    absl::SleepFor(absl::Milliseconds(2));
  EXPECT_EQ(std::string(Send(gone, Slice(0, kBytes)).status.message()), messages[0]);
}

// Whatever one client sends, nothing comes to another's memory, and nothing of another's comes back.
// ---- Gradients of retained rows, and tensors ----

class RetainedLiesTest : public LiesTest {
 protected:
  RetainedLiesTest() {
    v1::OpenMicrobatch open = Open("");
    open.set_microbatch_id(3);
    open.set_reduction(v1::REDUCTION_NONE);
    open.set_want_grad_hidden(false);
    open.set_retain(true);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, kRows, Bytes(std::vector<float>(kRows * kSmallHidden, 0.5f)));
    stream->HalfClose();
    EXPECT_TRUE(stream->Finish().status.ok());
  }
  v1::ComputeLossRequest Backward(uint64_t offset, uint64_t bytes) const {
    v1::ComputeLossRequest request;
    v1::OpenBackward* const open = request.mutable_backward();
    open->set_head("head");
    open->set_microbatch_id(3);
    open->mutable_rows()->set_end(kRows);
    open->set_want_grad_hidden(true);
    open->mutable_grad_loss()->Resize(kRows, 1);
    open->set_region(region_->id());
    open->mutable_in_region()->set_offset(offset);
    open->mutable_in_region()->set_bytes(bytes);
    return request;
  }
  LossAnswers Send(const v1::ComputeLossRequest& request) const {
    const auto stream = client_->OpenLoss();
    stream->Send(request);
    stream->HalfClose();
    return stream->Finish();
  }
  v1::ReadTensorRequest Read(uint64_t offset, uint64_t bytes) const {
    v1::ReadTensorRequest request;
    request.set_head("head");
    request.set_param(v1::PARAM_WEIGHT);
    request.set_region(region_->id());
    request.mutable_in_region()->set_offset(offset);
    request.mutable_in_region()->set_bytes(bytes);
    return request;
  }
};

TEST_F(RetainedLiesTest, HonestGradientsLieWhereTheyAreWanted) {
  const LossAnswers answers = Send(Backward(512, kBytes));
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  ASSERT_EQ(answers.slices.size(), 1u);
  EXPECT_TRUE(answers.slices[0].result.in_region());
  EXPECT_EQ(answers.slices[0].payload, "");
  v1::ComputeLossRequest request = Backward(0, kBytes);
  request.mutable_backward()->clear_region();
  request.mutable_backward()->clear_in_region();
  const LossAnswers in_message = Send(request);
  ASSERT_TRUE(in_message.status.ok()) << in_message.status;
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(region_->At(512)), kBytes),
            in_message.slices[0].payload);
}

// Not a byte behind the part is written, and the slice comes in a message.
TEST_F(RetainedLiesTest, APartThatIsTooSmallIsNotWrittenBehind) {
  std::fill_n(region_->At(0), region_->size(), uint8_t{0xa5});
  for (const uint64_t bytes : {kBytes - 1, uint64_t{1}}) {
    const LossAnswers answers = Send(Backward(256, bytes));
    ASSERT_TRUE(answers.status.ok()) << answers.status;
    EXPECT_FALSE(answers.slices[0].result.in_region());
    EXPECT_EQ(answers.slices[0].payload.size(), kBytes);
  }
  EXPECT_EQ(std::count(region_->At(0), region_->At(0) + region_->size(), 0xa5),
            static_cast<std::ptrdiff_t>(region_->size()));
}

TEST_F(RetainedLiesTest, PartsOutsideTheRegionAreRefused) {
  const uint64_t size = region_->size(), most = ~uint64_t{0};
  const uint64_t tensor = kSmallVocab * kRowBytes;
  for (const uint64_t offset :
       {size, size - 256, most, most - 255, uint64_t{1}, uint64_t{255}, uint64_t{1} << 63}) {
    const LossAnswers answers = Send(Backward(offset, kBytes));
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument) << offset;
    EXPECT_THAT(std::string(answers.status.message()), HasSubstr("backward.in_region")) << offset;
    const absl::Status read = client_->ReadTensor(Read(offset, tensor)).status();
    EXPECT_EQ(read.code(), absl::StatusCode::kInvalidArgument) << offset;
    EXPECT_THAT(std::string(read.message()), HasSubstr("in_region")) << offset;
  }
  for (const uint64_t bytes : {uint64_t{0}, size + 1, most}) {
    EXPECT_EQ(Send(Backward(0, bytes)).status.code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
  for (const uint64_t bytes : {uint64_t{0}, tensor - 1, tensor + 1, most}) {
    EXPECT_EQ(client_->ReadTensor(Read(0, bytes)).status().code(), absl::StatusCode::kInvalidArgument)
        << bytes;
  }
}

TEST_F(RetainedLiesTest, ARangeAndItsRegionComeTogether) {
  v1::ComputeLossRequest without_region = Backward(0, kBytes), without_range = without_region,
                         unwanted = without_region;
  without_region.mutable_backward()->clear_region();
  without_range.mutable_backward()->clear_in_region();
  unwanted.mutable_backward()->set_want_grad_hidden(false);
  for (const auto& request : {without_region, without_range, unwanted}) {
    const LossAnswers answers = Send(request);
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument) << request.DebugString();
    EXPECT_THAT(std::string(answers.status.message()), HasSubstr("backward.in_region"));
  }
  v1::ReadTensorRequest read = Read(0, kSmallVocab * kRowBytes);
  read.clear_region();
  EXPECT_EQ(client_->ReadTensor(read).status().code(), absl::StatusCode::kInvalidArgument);
  v1::ComputeLossRequest unknown = Backward(0, kBytes);
  unknown.mutable_backward()->set_region(std::string(16, 'x'));
  EXPECT_EQ(Send(unknown).status.code(), absl::StatusCode::kUnavailable);
  read = Read(0, kSmallVocab * kRowBytes);
  read.set_region(std::string(16, 'x'));
  EXPECT_EQ(client_->ReadTensor(read).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Send(Backward(0, kBytes)).status.ok()) << "nothing of that was used";
}

TEST_F(RetainedLiesTest, RowsOfATensorLieWhereTheyAreWanted) {
  const auto want = client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  ASSERT_TRUE(want.ok());
  const uint64_t bytes = kSmallVocab * kRowBytes;
  std::fill_n(region_->At(0), region_->size(), uint8_t{0xa5});
  const auto read = client_->ReadTensor(Read(512, bytes));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, "") << "nothing of it comes in messages";
  EXPECT_EQ(std::memcmp(region_->At(512), want->data(), bytes), 0);
  EXPECT_EQ(*region_->At(511), 0xa5);
  EXPECT_EQ(*region_->At(512 + bytes), 0xa5);
}

TEST_F(LiesTest, SessionsDoNotSeeEachOther) {
  const auto victim = OpenRegion();
  const std::vector<uint8_t> secret(victim->size(), 0xa5);
  std::memcpy(victim->At(0), secret.data(), secret.size());
  std::mt19937_64 rng(10);
  for (int i = 0; i < 200; ++i) {
    const uint64_t offset = rng() % 4 == 0 ? rng() : (rng() % 512) * 256;
    std::fill_n(region_->At(0), region_->size(), uint8_t{0});
    Send(region_->id(), Slice(offset, kBytes));
    ASSERT_EQ(std::memcmp(victim->At(0), secret.data(), secret.size()), 0);
    for (uint64_t k = 0; k < region_->size(); ++k) ASSERT_NE(region_->At(0)[k], 0xa5) << "at " << k;
  }
}

// Hidden states that change while they are computed spoil the results of their own slice at most.
TEST_F(LiesTest, MemoryThatChangesAllTheTimeHurtsNobodyElse) {
  std::atomic<bool> over = false;
  std::thread writer([&] {
    std::mt19937_64 rng(11);
    while (!over) {
      const uint64_t word = rng() % 3 == 0 ? 0x7fc000007f800000u : rng();  // NaN and infinity among them
      std::memcpy(region_->At(rng() % (kBytes / 8) * 8), &word, sizeof(word));
    }
  });
  std::mt19937_64 rng(12);
  const SmallRows rows = MakeSmallRows(64, rng);
  const auto honest =
      client::Client::Connect({.target = server_.target(), .transport = "shared_memory"}).value();
  std::vector<float> want(rows.hidden.size()), got(rows.hidden.size());
  ASSERT_TRUE(honest->ComputeLoss(SmallMicrobatch(rows, 0, 1), {.grad_hidden = want.data()}).ok());
  for (int i = 0; i < 100; ++i) {
    const absl::StatusCode code = Send(region_->id(), Slice(0, kBytes)).status.code();
    EXPECT_TRUE(code == absl::StatusCode::kOk || code == absl::StatusCode::kOutOfRange)
        << static_cast<int>(code);
    ASSERT_TRUE(honest->ComputeLoss(SmallMicrobatch(rows, 0, 1), {.grad_hidden = got.data()}).ok());
    for (size_t k = 0; k < got.size(); ++k) ASSERT_NEAR(got[k], want[k], 1e-4);
  }
  over = true;
  writer.join();
}

// Without its session a region is no more; a call that began before goes on with the memory.
TEST_F(LiesTest, ACallOutlivesItsSession) {
  std::fill_n(reinterpret_cast<float*>(region_->At(0)), kRows * kSmallHidden, 0.5f);
  const std::string id = region_->id();
  const auto stream = client_->OpenLoss();
  stream->SendOpen(Open(id));
  ASSERT_TRUE(stream->ReadOne());
  region_.reset();
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  while (Send(id, Slice(0, kBytes)).status.code() != absl::StatusCode::kUnavailable &&
         clocks::SteadyNow() < end)
    absl::SleepFor(absl::Milliseconds(2));
  stream->Send(Slice(0, kBytes));
  stream->HalfClose();
  EXPECT_TRUE(stream->Finish().status.ok());
  while (server_.server().stats().open_streams > 0 && clocks::SteadyNow() < end)
    absl::SleepFor(absl::Milliseconds(2));
}

}  // namespace
}  // namespace lossd::app::testing::shared_memory_lies_test
