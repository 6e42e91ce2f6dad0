// SPDX-License-Identifier: Apache-2.0
// Tests of head_operations.h: the log of choices, the history of a head, locks by name, and resets of heads
// with real weights.
#include "server/admin/head_operations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/errors/field_error.h"
#include "server/admin/checkpoints.h"
#include "server/log/log.h"
#include "tests/server/admin/checkpoints_fixture.h"

namespace lossd::admin::head_operations_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- Choice log ----

std::string Logged(log::LogLevel least) {
  log::Configure(least, log::LogFormat::kText);
  const kernels::Choice choices[] = {
      {.what = "loss", .choice = "after the logits product", .reason = "few rows"},
      {.what = "chunk", .choice = "up to 8 rows", .workspace_bytes = 4096}};
  ::testing::internal::CaptureStderr();
  LogChoices("head computes", "main", choices);
  return ::testing::internal::GetCapturedStderr();
}

TEST(ChoiceLogTest, HasAnEventForEachChoice) {
  const std::string text = Logged(log::LogLevel::kDebug);
  EXPECT_THAT(text, HasSubstr("DEBUG head computes head=main what=loss choice=\"after the logits product\" "
                              "reason=\"few rows\" workspace_bytes=0\n"));
  EXPECT_THAT(text, HasSubstr("what=chunk choice=\"up to 8 rows\" reason=\"\" workspace_bytes=4096\n"));
}

TEST(ChoiceLogTest, IsForDebuggingOnly) { EXPECT_EQ(Logged(log::LogLevel::kInfo), ""); }

// ---- Head history ----
// What a head says of where its values come from, and what a call is told that names another step.

class HeadHistoryTest : public CheckpointsTest {
 protected:
  HeadHistoryTest() { server_.CreateHead(); }

  Instance server_{directory_, 7, &disk_, 1 << 20};
};

TEST_F(HeadHistoryTest, AHeadKnowsItsRunAndItsCheckpoint) {
  const auto history = [](Instance& server, const std::string& head = "head") {
    v1::DescribeHeadRequest request;
    request.set_head(head);
    return server.operations().DescribeHead(request)->history();
  };
  EXPECT_EQ(history(server_).SerializeAsString(), "");
  ASSERT_TRUE(server_.Accumulate("head", 0).ok());
  v1::ApplyStepRequest request = Instance::StepRequest("head", 0);
  request.set_run("host:17");
  ASSERT_TRUE(server_.operations().ApplyStep(request).ok());
  EXPECT_EQ(history(server_).run(), "host:17");
  EXPECT_NEAR(static_cast<double>(history(server_).applied_unix_seconds()),
              static_cast<double>(absl::ToUnixSeconds(absl::Now())), 30.0);
  EXPECT_EQ(history(server_).checkpoint(), "");
  ASSERT_TRUE(server_.Save("first").ok());
  v1::HeadHistory saved = history(server_);
  EXPECT_EQ(saved.checkpoint(), "head/first");
  EXPECT_EQ(saved.checkpoint_step(), 1u);
  EXPECT_FALSE(saved.loaded());
  server_.Train("head", 1, 3);
  EXPECT_EQ(history(server_).run(), "") << "the trainer named none";
  EXPECT_EQ(history(server_).checkpoint(), "head/first");
  EXPECT_EQ(history(server_).checkpoint_step(), 1u);

  Instance other(directory_, 8, &disk_, 1 << 20);
  ASSERT_TRUE(other.Load("head/first", "copy").ok());
  v1::HeadHistory loaded = history(other, "copy");
  EXPECT_TRUE(loaded.loaded());
  loaded.set_loaded(false);
  EXPECT_EQ(loaded.SerializeAsString(), saved.SerializeAsString());
  v1::ListCheckpointsRequest list;
  EXPECT_EQ(other.operations().ListCheckpoints(list)->checkpoints(0).run(), "host:17");
}

// A save that ends after the head has got other values says nothing of these.
TEST_F(HeadHistoryTest, ASaveOfValuesThatAreGoneIsNotInTheHistory) {
  server_.Train("head", 0, 1);
  v1::ResetHeadRequest reset;
  reset.set_head("head");
  reset.set_scope(v1::RESET_SCOPE_ALL);
  reset.set_reset_id("a");
  disk_.CloseGate();
  absl::Notification read;
  Checkpoints::SaveCallbacks callbacks;
  callbacks.on_progress = [&](const v1::SaveProgress& progress) {
    if (progress.phase() == v1::SAVE_PHASE_WRITING && !read.HasBeenNotified()) read.Notify();
  };
  std::thread saver([&] { EXPECT_TRUE(server_.Save("late", callbacks).ok()); });
  read.WaitForNotification();
  EXPECT_TRUE(server_.operations().ResetHead(reset).ok());
  disk_.OpenGate();
  saver.join();
  EXPECT_EQ(server_.engine().Describe("head")->history.checkpoint, "");
}

TEST_F(HeadHistoryTest, ACallForAnotherStepIsToldWhoTrainsOrWhatWasLoaded) {
  v1::ApplyStepRequest request = Instance::StepRequest("head", 0);
  request.set_run("host:17");
  ASSERT_TRUE(server_.Accumulate("head", 0).ok());
  ASSERT_TRUE(server_.operations().ApplyStep(request).ok());
  ASSERT_TRUE(server_.Save("one").ok());
  server_.Train("head", 1, 2);
  const auto message = [&](uint64_t step, const std::string& run, Instance& server) {
    v1::ApplyStepRequest other = Instance::StepRequest("head", step);
    other.set_run(run);
    return std::string(server.operations().ApplyStep(other).status().message());
  };
  EXPECT_THAT(message(9, "host:18", server_), HasSubstr("step is not the open step, which is 2, got 9; "));
  EXPECT_THAT(message(9, "host:18", server_),
              ContainsRegex("a program that names no run applied step 1 [0-9]+ seconds? ago"));
  request.set_step(2);
  ASSERT_TRUE(server_.Accumulate("head", 2).ok());
  ASSERT_TRUE(server_.operations().ApplyStep(request).ok());
  EXPECT_THAT(
      message(1, "host:18", server_),
      ContainsRegex("another program trains this head: run host:17 applied step 2 [0-9]+ seconds? ago"));
  EXPECT_THAT(message(1, "host:17", server_), HasSubstr("this run, host:17, applied step 2"));
  Instance restored(directory_, 8, &disk_, 1 << 20);
  ASSERT_TRUE(restored.Load("head/one", "").ok());
  EXPECT_THAT(message(3, "host:17", restored),
              ContainsRegex("this head came back from a checkpoint: the server loaded head/one of step 1, "
                            "saved [0-9]+ seconds? "
                            "ago, trained by run host:17"));
  EXPECT_THAT(message(3, "host:17", restored), Not(HasSubstr("another program")));
}

// ---- Locks by name ----

TEST(NamedLocksTest, OneHolderPerName) {
  NamedLocks locks;
  int counters[2] = {};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        const NamedLocks::Guard guard = locks.Lock(absl::StrCat("name", t % 2));
        ++counters[t % 2];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counters[0], 4000);
  EXPECT_EQ(counters[1], 4000);
}

TEST(NamedLocksTest, LetsGoEarly) {
  NamedLocks locks;
  NamedLocks::Guard first = locks.Lock("a");
  first.Unlock();
  NamedLocks::Guard second = locks.Lock("a");
  first.Unlock();
}

TEST(NamedLocksTest, OtherNamesDoNotWait) {
  NamedLocks locks;
  const NamedLocks::Guard guard = locks.Lock("a");
  absl::Notification done;
  std::thread other([&] {
    const NamedLocks::Guard second = locks.Lock("b");
    done.Notify();
  });
  EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(20)));
  other.join();
}

// ---- Resets ----
// Resets of heads, optimizers that begin, and what a head says of where its values come from; with real
// weights.

std::string FieldIn(const absl::Status& status) {
  return errors::GetFieldViolation(status).value_or(errors::FieldViolation()).field;
}

v1::ResetHeadRequest Reset(v1::ResetScope scope, const std::string& id) {
  v1::ResetHeadRequest request;
  request.set_head("head");
  request.set_scope(scope);
  request.set_reset_id(id);
  return request;
}

class ResetsTest : public CheckpointsTest {
 protected:
  ResetsTest() { server_.CreateHead(); }

  // One step of the same rows, with AdamW or SGD with momentum.
  static v1::ApplyStepRequest StepOf(const std::string& head, uint64_t step, bool adamw) {
    v1::ApplyStepRequest request = Instance::StepRequest(head, step);
    if (adamw) return request;
    v1::Sgd& sgd = *request.mutable_optimizer()->mutable_sgd();
    sgd.set_learning_rate(0.1);
    sgd.set_momentum(0.9);
    sgd.set_dampening(0.25);
    return request;
  }
  // A head "fresh" that never stepped, with the values that "head" has now, at the same step.
  void MakeFresh() {
    ASSERT_TRUE(server_.Save("now").ok());
    ASSERT_TRUE(server_.Load("head/now", "fresh").ok());
    const auto snapshot = server_.engine().Describe("fresh");
    for (const kernels::TensorId id : head::CheckpointTensors(snapshot->config)) {
      if (id.role == kernels::Role::kValue) continue;
      const kernels::TensorShape shape = kernels::ShapeOf(snapshot->config, id.param);
      const std::vector<uint8_t> zeros(static_cast<size_t>(shape.elements()) * 4);
      const absl::Status written = server_.engine().OnDevice("fresh", [&](head::Head& head) {
        return head.WriteRows(id, 0, shape.rows, kernels::DType::kFloat32, zeros);
      });
      ASSERT_TRUE(written.ok()) << written;
    }
    ASSERT_TRUE(
        server_.engine().BeginLoad("fresh", {.step = snapshot->state.step, .updates = 0}, std::nullopt).ok());
    ASSERT_TRUE(server_.engine().EndLoad("fresh").ok());
  }

  Instance server_{directory_, 7, &disk_, 1 << 20};
};

TEST_F(ResetsTest, AnOptimizerThatBeginsIsThatOfAHeadThatNeverStepped) {
  for (const bool adamw : {true, false}) {
    const uint64_t step = server_.engine().Describe("head")->state.step;
    for (uint64_t i = 0; i < 3; ++i) {
      ASSERT_TRUE(server_.Accumulate("head", step + i).ok());
      ASSERT_TRUE(server_.operations().ApplyStep(StepOf("head", step + i, adamw)).ok());
    }
    server_.engine().DeleteHead("fresh").IgnoreError();
    MakeFresh();
    for (const std::string head : {"head", "fresh"}) {
      for (uint64_t i = 3; i < 6; ++i) {
        ASSERT_TRUE(server_.Accumulate(head, step + i).ok());
        v1::ApplyStepRequest request = StepOf(head, step + i, adamw);
        request.set_begin_optimizer(head == "head" && i == 3);
        const auto applied = server_.operations().ApplyStep(request);
        ASSERT_TRUE(applied.ok()) << applied.status();
      }
      EXPECT_EQ(server_.engine().Describe(head)->updates, 3u);
    }
    EXPECT_EQ(server_.Read("head"), server_.Read("fresh")) << (adamw ? "AdamW" : "SGD");
    std::filesystem::remove_all(directory_ + "/head");
  }
}

TEST_F(ResetsTest, AStepThatIsRefusedBeginsNothing) {
  server_.Train("head", 0, 2);
  const Weights before = server_.Read("head");
  ASSERT_TRUE(server_.Accumulate("head", 2).ok());
  v1::ApplyStepRequest request = Instance::StepRequest("head", 2);
  request.set_begin_optimizer(true);
  request.set_expected_rows(kRows + 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(server_.operations().ApplyStep(request).status()));
  EXPECT_EQ(server_.Read("head"), before);
  EXPECT_EQ(server_.engine().Describe("head")->updates, 2u);
}

TEST_F(ResetsTest, ARepeatOfAStepThatBeganIsAnsweredAndAnotherOneIsNot) {
  server_.Train("head", 0, 2);
  ASSERT_TRUE(server_.Accumulate("head", 2).ok());
  v1::ApplyStepRequest request = Instance::StepRequest("head", 2);
  request.set_begin_optimizer(true);
  ASSERT_TRUE(server_.operations().ApplyStep(request).ok());
  const Weights applied = server_.Read("head");
  const auto repeated = server_.operations().ApplyStep(request);
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->repeated_call());
  request.set_begin_optimizer(false);
  EXPECT_EQ(FieldIn(server_.operations().ApplyStep(request).status()), "begin_optimizer");
  EXPECT_EQ(server_.Read("head"), applied);
  // A server that restores the head knows it, too.
  ASSERT_TRUE(server_.Save("saved").ok());
  Instance restored(directory_, 8, &disk_, 1 << 20);
  ASSERT_TRUE(restored.Load("head/saved", "").ok());
  EXPECT_EQ(FieldIn(restored.operations().ApplyStep(request).status()), "begin_optimizer");
  request.set_begin_optimizer(true);
  EXPECT_TRUE(restored.operations().ApplyStep(request)->repeated_call());
}

TEST_F(ResetsTest, ARepeatOfALazyStepIsLazy) {
  server_.Train("head", 0, 2);
  ASSERT_TRUE(server_.Accumulate("head", 2).ok());
  v1::ApplyStepRequest request = Instance::StepRequest("head", 2);
  request.mutable_optimizer()->set_lazy_rows(true);
  ASSERT_TRUE(server_.operations().ApplyStep(request).ok());
  const Weights applied = server_.Read("head");
  EXPECT_TRUE(server_.operations().ApplyStep(request)->repeated_call());
  ASSERT_TRUE(server_.Save("saved").ok());
  Instance restored(directory_, 8, &disk_, 1 << 20);
  ASSERT_TRUE(restored.Load("head/saved", "").ok());
  EXPECT_TRUE(restored.operations().ApplyStep(request)->repeated_call());
  request.mutable_optimizer()->set_lazy_rows(false);
  EXPECT_EQ(FieldIn(server_.operations().ApplyStep(request).status()), "optimizer");
  EXPECT_EQ(FieldIn(restored.operations().ApplyStep(request).status()), "optimizer");
  EXPECT_EQ(server_.Read("head"), applied);
}

TEST_F(ResetsTest, AResetOfTheOptimizerKeepsTheValues) {
  server_.Train("head", 0, 3);
  MakeFresh();
  ASSERT_TRUE(server_.Accumulate("head", 3).ok());  // is discarded
  const uint64_t generation = server_.engine().Describe("head")->state.generation;
  const auto reset = server_.operations().ResetHead(Reset(v1::RESET_SCOPE_OPTIMIZER, "a"));
  ASSERT_TRUE(reset.ok()) << reset.status();
  EXPECT_FALSE(reset->repeated_call());
  EXPECT_EQ(reset->head().state().step(), 3u);
  EXPECT_EQ(reset->head().updates(), 0u);
  EXPECT_EQ(reset->head().step_rows(), 0u);
  EXPECT_NE(reset->head().state().generation(), generation);
  EXPECT_EQ(server_.Read("head"), server_.Read("fresh"));
  server_.Train("head", 3, 5);
  server_.Train("fresh", 3, 5);
  EXPECT_EQ(server_.Read("head"), server_.Read("fresh"));
}

TEST_F(ResetsTest, AResetHeadIsAHeadThatWasJustCreated) {
  const Weights created = server_.Read("head");
  server_.Train("head", 0, 1);
  const Weights once = server_.Read("head");
  server_.Train("head", 1, 3);
  ASSERT_TRUE(server_.Save("three").ok());
  ASSERT_TRUE(server_.Accumulate("head", 3).ok());
  const auto reset = server_.operations().ResetHead(Reset(v1::RESET_SCOPE_ALL, "a"));
  ASSERT_TRUE(reset.ok()) << reset.status();
  EXPECT_EQ(reset->head().state().step(), 0u);
  EXPECT_EQ(reset->head().updates(), 0u);
  EXPECT_EQ(reset->head().history().checkpoint(), "");
  EXPECT_EQ(reset->head().history().applied_unix_seconds(), 0);
  EXPECT_EQ(server_.Read("head"), created);
  // Nothing is known of a step before.
  const auto repeat = server_.Apply("head", 2);
  EXPECT_TRUE(absl::IsFailedPrecondition(repeat.status())) << repeat.status();
  EXPECT_THAT(std::string(repeat.status().message()),
              ContainsRegex("the head was reset [0-9]+ seconds? ago"));
  server_.Train("head", 0, 1);
  EXPECT_EQ(server_.Read("head"), once);
}

TEST_F(ResetsTest, ValuesThatAResetNames) {
  v1::ResetHeadRequest seeded = Reset(v1::RESET_SCOPE_ALL, "seed");
  seeded.mutable_kaiming_uniform()->set_seed(5);
  const Weights created = server_.Read("head");
  server_.Train("head", 0, 2);
  ASSERT_TRUE(server_.operations().ResetHead(seeded).ok());
  EXPECT_NE(server_.Read("head"), created);
  v1::ResetHeadRequest zeros = Reset(v1::RESET_SCOPE_ALL, "zeros");
  zeros.mutable_zeros();
  ASSERT_TRUE(server_.operations().ResetHead(zeros).ok());
  EXPECT_THAT(server_.Read("head").front(), ::testing::Each(0.0f));  // the weight
  // From a file, which a checkpoint is.
  server_.Train("head", 0, 2);
  ASSERT_TRUE(server_.Save("saved").ok());
  const Weights saved = server_.Read("head");
  v1::ResetHeadRequest file = Reset(v1::RESET_SCOPE_ALL, "file");
  file.mutable_tensor_file()->set_path("head/saved");
  file.mutable_tensor_file()->set_weight("weight");
  file.mutable_tensor_file()->set_bias("bias");
  file.mutable_tensor_file()->set_norm_gain("norm.gain");
  server_.Train("head", 2, 4);
  const auto reset = server_.operations().ResetHead(file);
  ASSERT_TRUE(reset.ok()) << reset.status();
  EXPECT_EQ(server_.Read("head").front(), saved.front());
}

TEST_F(ResetsTest, AFileThatCannotBeReadChangesNothing) {
  server_.Train("head", 0, 2);
  ASSERT_TRUE(server_.Save("saved").ok());
  ASSERT_TRUE(server_.Accumulate("head", 2).ok());
  const Weights before = server_.Read("head");
  v1::ResetHeadRequest file = Reset(v1::RESET_SCOPE_ALL, "file");
  file.mutable_tensor_file()->set_path("head/none");
  file.mutable_tensor_file()->set_weight("weight");
  file.mutable_tensor_file()->set_bias("bias");
  file.mutable_tensor_file()->set_norm_gain("norm.gain");
  EXPECT_TRUE(absl::IsNotFound(server_.operations().ResetHead(file).status()));
  file.mutable_tensor_file()->set_path("head/saved");
  file.mutable_tensor_file()->set_weight("weights");
  EXPECT_EQ(FieldIn(server_.operations().ResetHead(file).status()), "tensor_file.weight");
  EXPECT_EQ(server_.Read("head"), before);
  EXPECT_TRUE(server_.Apply("head", 2).ok()) << "the open step is as it was";
}

TEST_F(ResetsTest, EachResetIsDoneOnce) {
  server_.Train("head", 0, 2);
  const auto first = server_.operations().ResetHead(Reset(v1::RESET_SCOPE_ALL, "once"));
  ASSERT_TRUE(first.ok()) << first.status();
  server_.Train("head", 0, 2);
  const Weights trained = server_.Read("head");
  const auto again = server_.operations().ResetHead(Reset(v1::RESET_SCOPE_ALL, "once"));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->repeated_call());
  EXPECT_EQ(again->head().SerializeAsString(), first->head().SerializeAsString());
  // What is said and what is meant without a word are the same.
  v1::ResetHeadRequest same = Reset(v1::RESET_SCOPE_ALL, "once");
  same.mutable_kaiming_uniform();
  EXPECT_TRUE(server_.operations().ResetHead(same)->repeated_call());
  same.mutable_kaiming_uniform()->set_seed(1);
  EXPECT_EQ(FieldIn(server_.operations().ResetHead(same).status()), "reset_id");
  EXPECT_EQ(FieldIn(server_.operations().ResetHead(Reset(v1::RESET_SCOPE_OPTIMIZER, "once")).status()),
            "reset_id");
  EXPECT_EQ(server_.Read("head"), trained);
  // A head of the same name that comes later has been reset by nobody.
  v1::DeleteHeadRequest deletion;
  deletion.set_head("head");
  ASSERT_TRUE(server_.operations().DeleteHead(deletion).ok());
  server_.CreateHead();
  EXPECT_FALSE(server_.operations().ResetHead(Reset(v1::RESET_SCOPE_ALL, "once"))->repeated_call());
}

TEST_F(ResetsTest, TheLastResetsOfAHeadAreRemembered) {
  for (size_t i = 0; i <= ResetLog::kRemembered; ++i) {
    ASSERT_TRUE(
        server_.operations().ResetHead(Reset(v1::RESET_SCOPE_OPTIMIZER, absl::StrCat("reset ", i))).ok());
  }
  EXPECT_TRUE(server_.operations().ResetHead(Reset(v1::RESET_SCOPE_OPTIMIZER, "reset 1"))->repeated_call());
  EXPECT_FALSE(server_.operations().ResetHead(Reset(v1::RESET_SCOPE_OPTIMIZER, "reset 0"))->repeated_call());
  EXPECT_FALSE(server_.operations().ResetHead(Reset(v1::RESET_SCOPE_OPTIMIZER, "reset 1"))->repeated_call());
}

TEST_F(ResetsTest, BadResetsNameTheFieldAndChangeNothing) {
  server_.Train("head", 0, 2);
  const Weights before = server_.Read("head");
  const auto field = [&](const v1::ResetHeadRequest& request) {
    const absl::Status status = server_.operations().ResetHead(request).status();
    EXPECT_FALSE(status.ok());
    return FieldIn(status);
  };
  EXPECT_EQ(field(Reset(v1::RESET_SCOPE_UNSPECIFIED, "a")), "scope");
  EXPECT_EQ(field(Reset(static_cast<v1::ResetScope>(7), "a")), "scope");
  EXPECT_EQ(field(Reset(v1::RESET_SCOPE_ALL, "")), "reset_id");
  EXPECT_EQ(field(Reset(v1::RESET_SCOPE_ALL, std::string(65, 'a'))), "reset_id");
  EXPECT_EQ(field(Reset(v1::RESET_SCOPE_ALL, "a\nb")), "reset_id");
  v1::ResetHeadRequest request = Reset(v1::RESET_SCOPE_OPTIMIZER, "a");
  request.mutable_zeros();
  EXPECT_EQ(field(request), "init");
  request = Reset(v1::RESET_SCOPE_ALL, "a");
  request.set_incarnation(6);
  EXPECT_EQ(field(request), "incarnation");
  request = Reset(v1::RESET_SCOPE_ALL, "a");
  request.set_head("none");
  EXPECT_EQ(field(request), "head");
  EXPECT_EQ(server_.Read("head"), before);
  request = Reset(v1::RESET_SCOPE_ALL, std::string(64, 'a'));
  request.set_incarnation(7);
  EXPECT_TRUE(server_.operations().ResetHead(request).ok());
}

TEST_F(ResetsTest, AFrozenHeadHasNoOptimizerToReset) {
  v1::CreateHeadRequest create;
  create.mutable_spec()->set_name("head2");
  create.mutable_spec()->set_hidden_size(kHidden);
  create.mutable_spec()->set_vocab_size(kClasses);
  create.mutable_spec()->set_frozen(true);
  ASSERT_TRUE(server_.operations().CreateHead(create).ok());
  const Weights created = server_.Read("head2");
  v1::ResetHeadRequest request = Reset(v1::RESET_SCOPE_OPTIMIZER, "a");
  request.set_head("head2");
  EXPECT_THAT(std::string(server_.operations().ResetHead(request).status().message()), HasSubstr("frozen"));
  request = Reset(v1::RESET_SCOPE_ALL, "b");
  request.set_head("head2");
  request.mutable_kaiming_uniform()->set_seed(3);
  ASSERT_TRUE(server_.operations().ResetHead(request).ok());
  EXPECT_NE(server_.Read("head2"), created);
  request = Reset(v1::RESET_SCOPE_ALL, "c");
  request.set_head("head2");
  ASSERT_TRUE(server_.operations().ResetHead(request).ok());
  EXPECT_EQ(server_.Read("head2"), created);
}

// Whatever runs beside it, the head is at the end what it is with the resets before or after.
TEST_F(ResetsTest, ResetsTakeTurnsWithStepsSavesAndLoads) {
  server_.Train("head", 0, 3);
  ASSERT_TRUE(server_.Save("three").ok());
  std::atomic<bool> stop = false;
  std::thread trainer([&] {
    while (!stop) {
      const uint64_t step = server_.engine().Describe("head")->state.step;
      if (server_.Accumulate("head", step).ok()) server_.Apply("head", step).IgnoreError();
    }
  });
  std::thread saver([&] {
    for (int i = 0; !stop; ++i) server_.Save(absl::StrCat("save-", i)).IgnoreError();
  });
  int done = 0;
  for (int i = 0; i < 40; ++i) {
    const auto reset = server_.operations().ResetHead(
        Reset(i % 2 == 0 ? v1::RESET_SCOPE_ALL : v1::RESET_SCOPE_OPTIMIZER, absl::StrCat("reset ", i)));
    EXPECT_TRUE(reset.ok() || absl::IsFailedPrecondition(reset.status())) << reset.status();
    if (reset.ok()) ++done;
    if (i % 10 == 5) {
      EXPECT_TRUE(server_.Load("head/three", "").ok());
    }
  }
  stop = true;
  trainer.join();
  saver.join();
  EXPECT_GT(done, 0);
  ASSERT_TRUE(server_.operations().ResetHead(Reset(v1::RESET_SCOPE_ALL, "last")).ok());
  Instance other(directory_ + "2", 8, &disk_, 1 << 20);
  other.CreateHead();
  EXPECT_EQ(server_.Read("head"), other.Read("head"));
  server_.Train("head", 0, 2);
  other.Train("head", 0, 2);
  EXPECT_EQ(server_.Read("head"), other.Read("head"));
}

}  // namespace
}  // namespace lossd::admin::head_operations_test
