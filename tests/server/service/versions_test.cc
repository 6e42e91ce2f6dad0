// SPDX-License-Identifier: Apache-2.0
// Versions of a head through the service: what answers say of them, and how calls end that meet a write or a
// change.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "tests/server/service/heads_fixture.h"

namespace lossd::app::testing::versions_test {
namespace {

constexpr auto kUnavailable = absl::StatusCode::kUnavailable;
constexpr auto kAborted = absl::StatusCode::kAborted;

class VersionsTest : public HeadsTest {
 protected:
  VersionsTest() { EXPECT_TRUE(client_->CreateHead(Request("head")).ok()); }

  v1::HeadState State(TestClient& client) { return client.DescribeHead("head")->state(); }
  v1::HeadState State() { return State(*client_); }
  // Rows [begin, end) of a weight of ones.
  static std::string Ones(uint64_t begin, uint64_t end) {
    return Bytes(std::vector<float>((end - begin) * kHidden, 1.0f));
  }
  // A write of which the server has the first half.
  std::unique_ptr<WriteStream> HalfWritten(TestClient& client) {
    const v1::HeadState before = State(client);
    v1::OpenTensor open;
    open.set_head("head");
    open.set_param(v1::PARAM_WEIGHT);
    auto write = client.OpenWrite();
    EXPECT_TRUE(write->Send(&open, Ones(0, kClasses / 2)));
    while (State(client).weights_version() == before.weights_version()) absl::SleepFor(absl::Milliseconds(1));
    return write;
  }
  static absl::StatusCode ReadCode(TestClient& client) {
    return client.Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE).status().code();
  }
  // A write that has ended is forgotten soon.
  static void ExpectReadableSoon(TestClient& client) {
    const absl::Time limit = clocks::SteadyNow() + absl::Minutes(2);
    absl::StatusCode code = ReadCode(client);
    while (code == kUnavailable && clocks::SteadyNow() < limit) {
      absl::SleepFor(absl::Milliseconds(5));
      code = ReadCode(client);
    }
    EXPECT_EQ(code, absl::StatusCode::kOk);
  }
};

TEST_F(VersionsTest, AnswersCarryThem) {
  const v1::HeadState created = State();
  EXPECT_GT(created.generation(), 0u);
  EXPECT_GT(created.weights_version(), 0u);
  const LossAnswers answers = Compute(*client_, "head", 0, 1, rng_);
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  for (const v1::HeadState& state : {answers.accepted->state(), answers.summary->state()}) {
    EXPECT_EQ(state.generation(), created.generation());
    EXPECT_EQ(state.weights_version(), created.weights_version());
  }
  const auto applied = Step(*client_, "head", 0);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_GT(applied->state().generation(), created.generation());
  EXPECT_GT(applied->state().weights_version(), created.weights_version());
  EXPECT_EQ(applied->state().weights_version(), State().weights_version());

  const auto saved = client_->SaveCheckpoint("head", "one");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->state().weights_version(), State().weights_version());
  const auto loaded = client_->LoadCheckpoint("head/one", "");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_GT(loaded->state().generation(), saved->state().generation());
  EXPECT_GT(loaded->state().weights_version(), saved->state().weights_version());
}

// A repeat is known by the generation that was applied, also after the checkpoint of it was loaded.
TEST_F(VersionsTest, ALoadedStepKnowsItsGeneration) {
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
  request.set_incarnation(State().incarnation());
  const uint64_t other = State().generation();
  ASSERT_TRUE(client_->ZeroGradients("head", 0).ok());
  const uint64_t applied = State().generation();
  request.set_generation(applied);
  ASSERT_TRUE(client_->ApplyStep(request).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("head", "one").ok());
  ASSERT_TRUE(client_->LoadCheckpoint("head/one", "").ok());
  EXPECT_TRUE(client_->ApplyStep(request)->repeated_call());
  request.set_generation(other);
  EXPECT_EQ(client_->ApplyStep(request).status().code(), kAborted);
}

TEST_F(VersionsTest, CallsThatWouldSeeAHalfWrittenTensorAreRefused) {
  const auto write = HalfWritten(*client_);
  EXPECT_EQ(ReadCode(*client_), kUnavailable);
  EXPECT_EQ(Train(*client_, "head", 0, 1, rng_).code(), kUnavailable);
  EXPECT_EQ(Step(*client_, "head", 0).status().code(), kUnavailable);
  EXPECT_EQ(client_->SaveCheckpoint("head", "half").status().code(), kUnavailable);
  EXPECT_EQ(client_->ListCheckpoints("head")->checkpoints_size(), 0);
  EXPECT_TRUE(client_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT).ok());
  EXPECT_TRUE(write->Send(nullptr, Ones(kClasses / 2, kClasses)));
  const auto written = write->Finish();
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->state().weights_version(), State().weights_version());
  EXPECT_EQ(ReadCode(*client_), absl::StatusCode::kOk);
  EXPECT_TRUE(Train(*client_, "head", 0, 1, rng_).ok());
  EXPECT_TRUE(Step(*client_, "head", 0).ok());
}

TEST_F(VersionsTest, AWriteThatIsCancelledEnds) {
  auto write = HalfWritten(*client_);
  const uint64_t begun = State().weights_version();
  write.reset();
  ExpectReadableSoon(*client_);
  EXPECT_GT(State().weights_version(), begun);
}

TEST_F(VersionsTest, AWriteThatIsRefusedEndsBeforeItsAnswer) {
  const auto write = HalfWritten(*client_);
  write->Send(nullptr, "no row");
  EXPECT_EQ(write->Finish().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadCode(*client_), absl::StatusCode::kOk);
}

TEST_F(VersionsTest, AWriteThatStopsHalfWayEndsBeforeItsAnswer) {
  const auto write = HalfWritten(*client_);
  EXPECT_EQ(write->Finish().status().code(), absl::StatusCode::kInvalidArgument) << "rows are missing";
  EXPECT_EQ(ReadCode(*client_), absl::StatusCode::kOk);
}

TEST_F(VersionsTest, AWriterThatSendsNothingMoreLosesItsCall) {
  ServerOptions options = SmallServer();
  options.timeouts.idle = absl::Seconds(2);
  TestServer impatient(options);
  const auto client = impatient.Connect();
  ASSERT_TRUE(client->CreateHead(Request("head")).ok());
  const auto write = HalfWritten(*client);
  ExpectReadableSoon(*client);
  EXPECT_EQ(write->Finish().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Train(*client, "head", 0, 1, rng_).ok());
}

TEST_F(VersionsTest, ACheckpointOrADeletionEndsAWrite) {
  ASSERT_TRUE(client_->SaveCheckpoint("head", "one").ok());
  const auto before = client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  auto write = HalfWritten(*client_);
  ASSERT_TRUE(client_->LoadCheckpoint("head/one", "").ok());
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *before);
  write->Send(nullptr, Ones(kClasses / 2, kClasses));
  EXPECT_EQ(write->Finish().status().code(), kAborted);
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *before);

  write = HalfWritten(*client_);
  ASSERT_TRUE(client_->DeleteHead("head").ok());
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  write->Send(nullptr, Ones(kClasses / 2, kClasses));
  EXPECT_EQ(write->Finish().status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadCode(*client_), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace lossd::app::testing::versions_test
