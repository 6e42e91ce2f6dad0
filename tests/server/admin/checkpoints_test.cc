// SPDX-License-Identifier: Apache-2.0
// Checkpoints beside training, on the CPU backend: what is saved is one step boundary however slow the disk
// is, steps wait no longer than for the reading, and training goes on from a checkpoint as if nothing had
// been.
#include "server/admin/checkpoints.h"

#include "tests/server/admin/checkpoints_fixture.h"

namespace lossd::admin::checkpoints_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// While the disk does nothing at all, steps go on, because the whole checkpoint is in memory.
TEST_F(CheckpointsTest, StepsWaitForTheReadingOnly) {
  Instance server(directory_, 7, &disk_, int64_t{1} << 30);
  server.CreateHead();
  server.Train("head", 0, 3);
  const Weights at_step_3 = server.Read("head");
  disk_.CloseGate();
  std::atomic<bool> read_all{false};
  absl::StatusOr<v1::SaveCheckpointResponse> saved;
  std::thread saver([&] {
    saved = server.Save("", {.on_progress = [&](const v1::SaveProgress& progress) {
                          if (progress.phase() == v1::SAVE_PHASE_WRITING) read_all = true;
                        }});
  });
  while (!read_all) absl::SleepFor(absl::Milliseconds(1));
  server.Train("head", 3, 9);
  EXPECT_NE(server.Read("head"), at_step_3);
  EXPECT_THAT(server.metrics().RenderText(), testing::Not(HasSubstr("lossd_checkpoint_buffered_bytes 0\n")));
  disk_.OpenGate();
  saver.join();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->checkpoint(), "head/step-0000000003");
  EXPECT_LT(saved->read_seconds(), saved->seconds());
  ASSERT_TRUE(server.Load("head/step-0000000003", "three").ok());
  EXPECT_EQ(server.Read("three"), at_step_3);
  EXPECT_THAT(server.metrics().RenderText(), HasSubstr("lossd_checkpoint_buffered_bytes 0\n"));
}

// With a buffer of two slices the reading takes as long as the disk does. Rows flow, steps wait.
TEST_F(CheckpointsTest, RowsFlowWhileTheReadingWaitsForTheDisk) {
  Instance server(directory_, 7, &disk_, /*buffer_bytes=*/0);
  server.CreateHead();
  server.Train("head", 0, 1);
  const Weights before = server.Read("head");
  absl::StatusOr<v1::SaveCheckpointResponse> saved;
  std::atomic<bool> reading{false};
  disk_.delay_us = 100;
  std::thread saver([&] {
    saved = server.Save("", {.on_progress = [&](const v1::SaveProgress& progress) {
                          if (reading)
                            return;  // a slow save reports again, perhaps after the gate was opened
                          disk_.CloseGate();
                          reading = true;
                        }});
  });
  while (!reading) absl::SleepFor(absl::Milliseconds(1));
  absl::Status status = server.Accumulate("head", 1);
  EXPECT_TRUE(status.ok()) << status;
  absl::Notification applied;
  std::thread stepper([&] {
    status = server.Apply("head", 1).status();
    applied.Notify();
  });
  EXPECT_FALSE(applied.WaitForNotificationWithTimeout(absl::Milliseconds(100)));
  disk_.OpenGate();
  saver.join();
  stepper.join();
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_NE(server.Read("head"), before);
  ASSERT_TRUE(server.Load("head/step-0000000001", "copy").ok());
  EXPECT_EQ(server.Read("copy"), before);
}

// A trainer that never rests, saves that come at any time, buffers of any size: each checkpoint is exactly
// one of the states between two steps.
TEST_F(CheckpointsTest, EverySaveIsOfOneStepBoundary) {
  kernels::testing::Rng rng = kernels::testing::FreshRng();
  disk_.delay_us = 200;
  std::map<std::string, uint64_t> saves;  // checkpoint -> step
  std::map<uint64_t, Weights> states;     // by step
  uint64_t step = 0;
  for (int round = 0; round < 3; ++round) {
    Instance server(directory_, 7 + static_cast<uint64_t>(round), &disk_,
                    kernels::testing::UniformInt(rng, 0, 120'000));
    if (round == 0) {
      server.CreateHead();
    } else {
      ASSERT_TRUE(server.Save("none").status().code() == absl::StatusCode::kNotFound);
      ASSERT_TRUE(server.Load(saves.rbegin()->first, "head").ok());
      step = saves.rbegin()->second;
    }
    states[step] = server.Read("head");
    std::atomic<bool> stop{false};
    std::thread trainer([&] {
      while (!stop) {
        server.Train("head", step, step + 1);
        ++step;
        const Weights now = server.Read("head");
        const auto [it, is_new] = states.emplace(step, now);
        EXPECT_TRUE(is_new || it->second == now) << "another run had other weights after step " << step;
      }
    });
    for (int i = 0; i < 6; ++i) {
      absl::SleepFor(absl::Milliseconds(kernels::testing::UniformInt(rng, 0, 10)));
      const auto saved = server.Save(absl::StrCat("save-", round, "-", i));
      EXPECT_TRUE(saved.ok()) << saved.status();
      if (saved.ok()) saves[saved->checkpoint()] = saved->state().step();
    }
    stop = true;
    trainer.join();
    for (const auto& [checkpoint, saved_step] : saves) {
      ASSERT_TRUE(server.Load(checkpoint, "copy").ok());
      EXPECT_EQ(server.Read("copy"), states[saved_step]) << checkpoint << " of step " << saved_step;
    }
    if (HasFailure()) break;
  }
  EXPECT_EQ(saves.size(), 18u);
}

// Weights that may be half-updated are not kept, or pruning would leave nothing but them.
TEST_F(CheckpointsTest, WeightsNobodyTrustsAreNotSaved) {
  Instance server(directory_, 7, &disk_, 1 << 20, /*keep=*/1);
  server.CreateHead();
  server.Train("head", 0, 2);
  ASSERT_TRUE(server.Save().ok());
  const Weights kept = server.Read("head");
  ASSERT_TRUE(server.engine().BeginLoad("head", {.step = 9, .updates = 9}, std::nullopt).ok());
  EXPECT_TRUE(absl::IsUnavailable(server.Save().status()));
  EXPECT_TRUE(absl::IsUnavailable(server.Save("named").status()));
  ASSERT_TRUE(server.Load("head/step-0000000002", "").ok());
  EXPECT_EQ(server.Read("head"), kept);
  server.Train("head", 2, 3);
  EXPECT_TRUE(server.Save().ok());
}

// Training that goes on from a checkpoint in another process ends with the same bits, and steps that were
// applied before are not applied again.
TEST_F(CheckpointsTest, ResumesBitForBit) {
  v1::ApplyStepResponse last;
  Weights expected, at_save;
  {
    Instance server(directory_, 7, &disk_, 1 << 20);
    server.CreateHead();
    server.Train("head", 0, 4);
    ASSERT_TRUE(server.Accumulate("head", 4).ok());
    last = *server.Apply("head", 4);
    EXPECT_EQ(last.applied_incarnation(), 7u);
    at_save = server.Read("head");
    ASSERT_TRUE(server.Save().ok());
    server.Train("head", 5, 12);
    expected = server.Read("head");
  }
  Instance server(directory_, 8, &disk_, 1 << 20);
  const auto loaded = server.Load("head/step-0000000005", "");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->state().step(), 5u);
  EXPECT_EQ(loaded->state().incarnation(), 8u);

  // The answer to step 4 was lost on its way.
  const auto repeated = server.Apply("head", 4);
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->repeated_call());
  EXPECT_EQ(repeated->grad_norm(), last.grad_norm());
  EXPECT_EQ(repeated->rows(), last.rows());
  EXPECT_EQ(repeated->microbatches(), last.microbatches());
  EXPECT_EQ(repeated->state().step(), 5u);
  EXPECT_EQ(repeated->state().incarnation(), 8u);
  EXPECT_EQ(repeated->applied_incarnation(), 7u);
  EXPECT_EQ(server.Read("head"), at_save) << "applied twice";
  // The same from a client that names the process that has its gradients.
  v1::ApplyStepRequest named = Instance::StepRequest("head", 4);
  named.set_incarnation(7);
  EXPECT_TRUE(server.operations().ApplyStep(named).ok());
  named.set_incarnation(8);
  EXPECT_EQ(server.operations().ApplyStep(named).status().code(), absl::StatusCode::kFailedPrecondition);
  v1::ApplyStepRequest other = Instance::StepRequest("head", 4);
  other.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.5);
  EXPECT_EQ(server.operations().ApplyStep(other).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(server.Apply("head", 3).status().code(), absl::StatusCode::kFailedPrecondition);

  server.Train("head", 5, 12);
  EXPECT_EQ(server.Read("head"), expected);
  EXPECT_EQ(server.engine().Describe("head")->updates, 12u);

  // The same into a head that has gone on meanwhile.
  ASSERT_TRUE(server.Load("head/step-0000000005", "").ok());
  EXPECT_TRUE(server.Apply("head", 4)->repeated_call());
  server.Train("head", 5, 12);
  EXPECT_EQ(server.Read("head"), expected);
}

TEST_F(CheckpointsTest, KeepsTheNewest) {
  Instance server(directory_, 7, &disk_, 1 << 20, /*keep=*/2);
  server.CreateHead();
  for (uint64_t step = 0; step < 3; ++step) {
    const auto saved = server.Save();
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_EQ(saved->pruned_size(), step < 2 ? 0 : 1);
    server.Train("head", step, step + 1);
  }
  EXPECT_EQ(server.Save("mine")->pruned_size(), 0);
  v1::SaveCheckpointRequest request;
  request.set_head("head");
  request.set_keep(1);
  const auto saved = server.operations().checkpoints().Save(request, {});
  EXPECT_THAT(saved->pruned(), ElementsAre("head/step-0000000002", "head/step-0000000001"));
  server.Train("head", 3, 4);
  request.set_keep(0);
  EXPECT_THAT(server.operations().checkpoints().Save(request, {})->pruned(), IsEmpty());

  v1::ListCheckpointsRequest list;
  list.set_head("head");
  const auto listed = server.operations().ListCheckpoints(list);
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->checkpoints_size(), 3);
  EXPECT_EQ(listed->checkpoints(0).checkpoint(), "head/step-0000000004");
  EXPECT_EQ(listed->checkpoints(0).step(), 4u);
  EXPECT_EQ(listed->checkpoints(0).incarnation(), 7u);
  EXPECT_EQ(listed->checkpoints(0).spec().vocab_size(), kClasses);
  EXPECT_TRUE(listed->checkpoints(0).automatic());
  EXPECT_THAT(server.metrics().RenderText(), HasSubstr("lossd_checkpoint_last_step{head=\"head\"} 4\n"));
}

TEST_F(CheckpointsTest, FullDisksAndCancelledSavesAreCounted) {
  Instance server(directory_, 7, &disk_, 1 << 20);
  server.CreateHead();
  disk_.full = true;
  const absl::Status full = server.Save().status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("-of-00004.safetensors: write "));
  disk_.full = false;
  EXPECT_EQ(server.Save("", {.cancelled = [] { return true; }}).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_THAT(server.operations().ListCheckpoints({})->checkpoints(), IsEmpty());
  EXPECT_TRUE(server.Save().ok());
  EXPECT_EQ(server.Save().status().code(), absl::StatusCode::kAlreadyExists) << "the same again";
  const std::string metrics = server.metrics().RenderText();
  for (const char* line : {"lossd_checkpoint_saves_total{result=\"ok\"} 1\n",
                           "lossd_checkpoint_saves_total{result=\"failed\"} 1\n",
                           "lossd_checkpoint_saves_total{result=\"cancelled\"} 1\n",
                           "lossd_checkpoint_saves_total{result=\"exists\"} 1\n"}) {
    EXPECT_THAT(metrics, HasSubstr(line));
  }
  server.operations().checkpoints().CancelSaves();
  EXPECT_EQ(server.Save("late").status().code(), absl::StatusCode::kCancelled);
}

TEST_F(CheckpointsTest, LeftoversGoAtTheStart) {
  Instance server(directory_, 7, &disk_, 1 << 20);
  server.operations().checkpoints().RemoveLeftovers();
  EXPECT_FALSE(std::filesystem::exists(directory_)) << "made without need";
  std::filesystem::create_directories(directory_ + "/head/.tmp-x-1");
  Instance next(directory_, 8, &disk_, 1 << 20);
  next.operations().checkpoints().RemoveLeftovers();
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/head/.tmp-x-1"));
}

}  // namespace
}  // namespace lossd::admin::checkpoints_test
