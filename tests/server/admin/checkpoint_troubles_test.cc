// SPDX-License-Identifier: Apache-2.0
// Saves that cannot be what they ought to be: the directory is gone, or the weights are of no use.
#include <unistd.h>

#include <filesystem>
#include <limits>

#include "tests/server/admin/checkpoints_fixture.h"

namespace lossd::admin::checkpoint_troubles_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

class CheckpointTroublesTest : public CheckpointsTest {
 protected:
  CheckpointTroublesTest() { server_.CreateHead(); }

  bool HasEvent(const std::string& kind, const std::string& text) {
    const metrics::EventLog::Reading reading = server_.metrics().events().After(0);
    for (const metrics::Event& event : reading.events) {
      if (event.kind == kind && event.text.find(text) != std::string::npos) return true;
    }
    return false;
  }
  absl::Status Step(uint64_t step, const std::function<void(v1::Optimizer*)>& change) {
    if (absl::Status status = server_.Accumulate("head", step); !status.ok()) return status;
    v1::ApplyStepRequest request = Instance::StepRequest("head", step);
    change(request.mutable_optimizer());
    return server_.operations().ApplyStep(request).status();
  }

  Instance server_{directory_, 7, &disk_, 1 << 20};
};

TEST_F(CheckpointTroublesTest, ADirectoryThatVanishesIsMadeAgain) {
  ASSERT_TRUE(server_.Save("a").ok());
  fs::remove_all(directory_);
  const auto saved = server_.Save("b");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_TRUE(fs::exists(directory_ + "/head/b/manifest.json"));
  EXPECT_TRUE(HasEvent("checkpoint_directory_made", "had vanished"));
}

// NOT_FOUND would be read as "the server has lost the head".
TEST_F(CheckpointTroublesTest, ADirectoryThatCannotBeMadeIsNoMissingHead) {
  ASSERT_TRUE(server_.Save("a").ok());
  fs::remove_all(directory_);
  test::WriteWholeFile(directory_, "in its place");
  const absl::Status status = server_.Save("b").status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(server_.metrics().RenderText(),
              HasSubstr("lossd_checkpoint_saves_total{result=\"failed\"} 1\n"));
  EXPECT_TRUE(HasEvent("checkpoint_failed", "not saved"));
  v1::SaveCheckpointRequest unknown;
  unknown.set_head("nobody");
  fs::remove(directory_);
  EXPECT_EQ(server_.operations().checkpoints().Save(unknown, {}).status().code(),
            absl::StatusCode::kNotFound);
}

// While a save is under way.
TEST_F(CheckpointTroublesTest, ADirectoryThatVanishesDuringASave) {
  ASSERT_TRUE(server_.Save("a").ok());
  disk_.CloseGate();
  absl::Status status;
  std::atomic<bool> writing{false};
  std::thread saver([&] {
    status = server_
                 .Save("b", {.on_progress =
                                 [&](const v1::SaveProgress& progress) {
                                   if (progress.phase() == v1::SAVE_PHASE_WRITING) writing = true;
                                 }})
                 .status();
  });
  while (!writing) absl::SleepFor(absl::Milliseconds(1));
  fs::remove_all(directory_);
  disk_.OpenGate();
  saver.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the checkpoint directory cannot be used: "));
  EXPECT_THAT(server_.metrics().RenderText(),
              HasSubstr("lossd_checkpoint_saves_total{result=\"failed\"} 1\n"));
  EXPECT_TRUE(server_.Save("c").ok());
}

TEST_F(CheckpointTroublesTest, OptionsBeyondFloatsAreRefused) {
  struct Case {
    std::function<void(v1::Optimizer*)> change;
    const char* field;
  };
  const Case cases[] = {
      {[](v1::Optimizer* o) { o->mutable_adamw()->set_learning_rate(1e308); },
       "optimizer.adamw.learning_rate"},
      {[](v1::Optimizer* o) { o->mutable_adamw()->set_learning_rate(3e37); },
       "optimizer.adamw.learning_rate"},
      {[](v1::Optimizer* o) { o->mutable_adamw()->set_weight_decay(1e300); }, "optimizer.adamw.weight_decay"},
      {[](v1::Optimizer* o) { o->mutable_adamw()->set_epsilon(1e39); }, "optimizer.adamw.epsilon"},
      {[](v1::Optimizer* o) { o->set_grad_multiplier(1e300); }, "optimizer.grad_multiplier"},
      {[](v1::Optimizer* o) { o->set_grad_multiplier(-1e300); }, "optimizer.grad_multiplier"},
      {[](v1::Optimizer* o) { o->set_grad_multiplier(1e30); }, "optimizer.grad_multiplier"},
      {[](v1::Optimizer* o) { o->mutable_sgd()->set_learning_rate(1e38); }, "optimizer.sgd.learning_rate"},
      {[](v1::Optimizer* o) { o->mutable_sgd()->set_momentum(1e39); }, "optimizer.sgd.momentum"},
      {[](v1::Optimizer* o) { o->mutable_sgd()->set_dampening(-1e39); }, "optimizer.sgd.dampening"},
  };
  const Weights before = server_.Read("head");
  ASSERT_TRUE(server_.Accumulate("head", 0).ok());
  for (const Case& each : cases) {
    v1::ApplyStepRequest request = Instance::StepRequest("head", 0);
    each.change(request.mutable_optimizer());
    const absl::Status status = server_.operations().ApplyStep(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << each.field << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(each.field));
  }
  EXPECT_EQ(server_.Read("head"), before);
  EXPECT_TRUE(server_.Apply("head", 0).ok()) << "nothing was changed, booked or lost";
}

// Weight decay that multiplies the weights by -1e9 in each step.
TEST_F(CheckpointTroublesTest, WeightsThatDivergeEndTheHead) {
  absl::Status status;
  uint64_t step = 0;
  for (; step < 10 && status.ok(); ++step) {
    v1::ApplyStepRequest request;
    request.set_head("head");
    request.set_step(step);
    request.mutable_optimizer()->mutable_sgd()->set_learning_rate(1e5);
    request.mutable_optimizer()->mutable_sgd()->set_weight_decay(1e5);
    status = server_.operations().ApplyStep(request).status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("values are not finite any more"));
  EXPECT_FALSE(server_.Save().ok()) << "they are not saved";
}

TEST_F(CheckpointTroublesTest, ASaveSaysThatWeightsAreNotFinite) {
  EXPECT_EQ(server_.Save("good")->not_finite(), 0u);
  const float bad[] = {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
  ASSERT_TRUE(server_.engine()
                  .OnDevice("head",
                            [&](head::Head& head) {
                              return head.WriteRows({kernels::Param::kBias, kernels::Role::kValue}, 3, 2,
                                                    kernels::DType::kFloat32,
                                                    {reinterpret_cast<const uint8_t*>(bad), sizeof(bad)});
                            })
                  .ok());
  const auto saved = server_.Save("bad");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->not_finite(), 2u);
  EXPECT_TRUE(HasEvent("checkpoint_not_finite", "head/bad has 2 values that are infinite or NaN"));
}

// Names that a client chooses do not drive other events out.
TEST_F(CheckpointTroublesTest, NamesThatAreTakenAreOneEvent) {
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(server_.Save(absl::StrCat("n", i)).ok());
  for (int i = 0; i < 400; ++i) {
    EXPECT_EQ(server_.Save(absl::StrCat("n", i % 20)).status().code(), absl::StatusCode::kAlreadyExists);
  }
  int64_t failed = 0;
  const metrics::EventLog::Reading reading = server_.metrics().events().After(0);
  for (const metrics::Event& event : reading.events) {
    failed += event.kind == "checkpoint_failed" ? 1 : 0;
  }
  EXPECT_EQ(failed, 1);
}

}  // namespace
}  // namespace lossd::admin::checkpoint_troubles_test
