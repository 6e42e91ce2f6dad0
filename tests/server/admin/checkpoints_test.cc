// SPDX-License-Identifier: Apache-2.0
// Checkpoints beside training, on the CPU backend: what is saved is one step boundary however slow the disk
// is, steps wait no longer than for the reading, and training goes on from a checkpoint as if nothing had
// been; deletions, heads whose life takes a turn, and saves that cannot be what they ought to be.
#include "server/admin/checkpoints.h"

#include <unistd.h>

#include <filesystem>
#include <limits>

#include "kernels/errors/field_error.h"
#include "tests/server/admin/checkpoints_fixture.h"
#include "tests/support/temp_folder.h"

namespace lossd::admin::checkpoints_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

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

// ---- Deletions ----
// DeleteCheckpoint beside loads and saves, and its repeats.

class CheckpointDeletionsTest : public CheckpointsTest {
 protected:
  CheckpointDeletionsTest() {
    server_.CreateHead();
    server_.Train("head", 0, 2);
  }

  absl::StatusOr<v1::DeleteCheckpointResponse> Delete(const std::string& checkpoint, const std::string& id) {
    v1::DeleteCheckpointRequest request;
    request.set_checkpoint(checkpoint);
    request.set_deletion_id(id);
    return server_.operations().DeleteCheckpoint(request);
  }
  std::vector<std::string> Listed() {
    std::vector<std::string> names;
    const v1::ListCheckpointsResponse list = *server_.operations().ListCheckpoints({});
    for (const auto& info : list.checkpoints()) names.push_back(info.checkpoint());
    return names;
  }
  std::vector<std::string> Files() { return test::NamesInHeadFolder(directory_ + "/head"); }

  Instance server_{directory_, 7, &disk_, 1 << 20};
};

TEST_F(CheckpointDeletionsTest, ARepeatIsAnsweredWithTheStoredResult) {
  const auto saved = server_.Save("one");
  ASSERT_TRUE(saved.ok()) << saved.status();
  const auto first = Delete("head/one", "a");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->bytes(), saved->bytes());
  EXPECT_FALSE(first->repeated_call());
  EXPECT_THAT(Listed(), IsEmpty());
  // Another checkpoint of that name stays.
  ASSERT_TRUE(server_.Save("one").ok());
  const auto repeat = Delete("head/one", "a");
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->repeated_call());
  EXPECT_EQ(repeat->bytes(), first->bytes());
  EXPECT_THAT(Listed(), testing::ElementsAre("head/one"));
  // The id stands for one checkpoint.
  const absl::Status other = Delete("head/two", "a").status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition) << other;
  EXPECT_THAT(std::string(other.message()),
              AllOf(HasSubstr("deletion_id"), HasSubstr("head/one"), HasSubstr("head/two")));
  EXPECT_FALSE(Delete("head/one", "b")->repeated_call());
  EXPECT_THAT(Listed(), IsEmpty());
  EXPECT_THAT(server_.metrics().RenderText(),
              HasSubstr("lossd_checkpoint_removals_total{cause=\"client\"} 2\n"));
}

TEST_F(CheckpointDeletionsTest, WhatIsRefusedIsNotRemembered) {
  EXPECT_EQ(Delete("head/one", "a").status().code(), absl::StatusCode::kNotFound);
  for (const std::string& id : {std::string(), std::string(65, 'x'), std::string("a\nb"), std::string("\x7f"),
                                std::string("\xc3"), std::string("a\0b", 3)}) {
    const absl::Status status = Delete("head/one", id).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(errors::GetFieldViolation(status)->field, "deletion_id");
  }
  EXPECT_EQ(errors::GetFieldViolation(Delete("../x", "a").status())->field, "checkpoint");
  ASSERT_TRUE(server_.Save("one").ok());
  EXPECT_FALSE(Delete("head/one", "a")->repeated_call());
  ASSERT_TRUE(server_.Save("two").ok());
  EXPECT_TRUE(Delete("head/two", std::string(63, 'x') + "\xc3\xa4").ok());
}

TEST_F(CheckpointDeletionsTest, RemembersTheLastThousand) {
  Checkpoints& checkpoints = server_.operations().checkpoints();
  ASSERT_TRUE(server_.Save("0").ok());
  const std::string folder = directory_ + "/head/";
  std::filesystem::copy(folder + "0", folder + "kept", std::filesystem::copy_options::recursive);
  for (size_t i = 0; i <= CheckpointDeletions::kMostRemembered; ++i) {
    std::filesystem::create_directory(folder + "x");
    std::filesystem::copy(folder + "kept/manifest.json", folder + "x/manifest.json");
    v1::DeleteCheckpointRequest request;
    request.set_checkpoint("head/x");
    request.set_deletion_id(absl::StrCat(i));
    const auto deleted = checkpoints.Delete(request);
    ASSERT_TRUE(deleted.ok()) << deleted.status();
  }
  EXPECT_EQ(Delete("head/x", "0").status().code(), absl::StatusCode::kNotFound) << "the oldest";
  EXPECT_TRUE(Delete("head/x", "1")->repeated_call());
  EXPECT_TRUE(Delete("head/x", absl::StrCat(CheckpointDeletions::kMostRemembered))->repeated_call());
}

TEST_F(CheckpointDeletionsTest, CallsAtTheSameTimeRemoveOnce) {
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(server_.Save("one").ok());
    std::atomic<int> first{0}, repeated{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        const auto deleted = Delete("head/one", absl::StrCat("same-", round));
        ASSERT_TRUE(deleted.ok()) << deleted.status();
        ++(deleted->repeated_call() ? repeated : first);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(first, 1);
    EXPECT_EQ(repeated, 3);
  }
}

// The load gets what was saved; its files go when it has ended.
TEST_F(CheckpointDeletionsTest, ALoadUnderWayKeepsItsFiles) {
  ASSERT_TRUE(server_.Save("one").ok());
  const Weights saved = server_.Read("head");
  server_.Train("head", 2, 4);
  int loaded = 0;
  for (int round = 0; round < 10; ++round) {
    if (round > 0) {
      ASSERT_TRUE(server_.Load("head/kept", "").ok());
      ASSERT_TRUE(server_.Save("one").ok());
    } else {
      std::filesystem::copy(directory_ + "/head/one", directory_ + "/head/kept",
                            std::filesystem::copy_options::recursive);
    }
    absl::Status status;
    std::thread loader([&] { status = server_.Load("head/one", "copy").status(); });
    absl::SleepFor(absl::Microseconds(300 * round));
    const auto deleted = Delete("head/one", absl::StrCat("load-", round));
    loader.join();
    ASSERT_TRUE(deleted.ok()) << deleted.status();
    if (status.ok()) {
      EXPECT_EQ(server_.Read("copy"), saved);
      ++loaded;
    } else {
      EXPECT_TRUE(absl::IsNotFound(status)) << status;
    }
    EXPECT_THAT(Files(), testing::ElementsAre("kept")) << "files of a deleted checkpoint stayed";
  }
  EXPECT_GT(loaded, 0);
}

// Files that another process reads go with the next save at the latest.
TEST_F(CheckpointDeletionsTest, FilesThatStayedGoWithTheNextLoadOrSave) {
  ASSERT_TRUE(server_.Save("one").ok());
  ASSERT_TRUE(server_.Save("two").ok());
  {
    const auto reader = head::CheckpointReader::Open(directory_, "head/one");
    ASSERT_TRUE(reader.ok()) << reader.status();
    ASSERT_TRUE(Delete("head/one", "a").ok());
    EXPECT_THAT(Files(), SizeIs(2));
  }
  ASSERT_TRUE(server_.Load("head/two", "").ok());
  EXPECT_THAT(Files(), testing::ElementsAre("two"));
}

// There is no such checkpoint until the save has ended; the save is not disturbed.
TEST_F(CheckpointDeletionsTest, ASaveUnderWayIsNotRemovedHalfWay) {
  disk_.CloseGate();
  absl::StatusOr<v1::SaveCheckpointResponse> saved;
  std::atomic<bool> begun{false};
  std::thread saver(
      [&] { saved = server_.Save("one", {.on_progress = [&](const v1::SaveProgress&) { begun = true; }}); });
  while (!begun) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(Delete("head/one", "a").status().code(), absl::StatusCode::kNotFound);
  disk_.OpenGate();
  saver.join();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_TRUE(server_.Load("head/one", "copy").ok());
  EXPECT_TRUE(Delete("head/one", "a").ok());
  EXPECT_THAT(Files(), IsEmpty());
}

// ---- Turns in the life of a head ----
// Checkpoints of a head whose life takes a turn: it goes back and is trained again, or it is deleted during a
// save.

// The head goes back to an earlier step and is trained to the same step in another way. Both checkpoints of
// that step are there, each with the weights that it had.
TEST_F(CheckpointsTest, AStepThatWasTrainedAgain) {
  Instance server(directory_, 7, &disk_, 1 << 20);
  server.CreateHead();
  const auto train = [&](uint64_t step, uint64_t history) {
    ASSERT_TRUE(server.Accumulate("head", step, history).ok());
    ASSERT_TRUE(server.Apply("head", step).ok());
  };
  train(0, 1);
  ASSERT_EQ(server.Save()->checkpoint(), "head/step-0000000001");
  train(1, 1);
  ASSERT_EQ(server.Save()->checkpoint(), "head/step-0000000002");
  const Weights first = server.Read("head");
  v1::LoadCheckpointRequest back;
  back.set_checkpoint("head/step-0000000001");
  ASSERT_TRUE(server.operations().LoadCheckpoint(back).ok());
  EXPECT_EQ(server.Save().status().code(), absl::StatusCode::kAlreadyExists) << "what was loaded";
  train(1, 2);
  const Weights second = server.Read("head");
  ASSERT_NE(first, second);
  const auto saved = server.Save();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_THAT(saved->checkpoint(), testing::MatchesRegex("head/step-0000000002-[0-9a-f]{16}"));
  for (const auto& [checkpoint, weights] :
       {std::pair(std::string("head/step-0000000002"), first), std::pair(saved->checkpoint(), second)}) {
    back.set_checkpoint(checkpoint);
    ASSERT_TRUE(server.operations().LoadCheckpoint(back).ok());
    EXPECT_EQ(server.Read("head"), weights) << checkpoint;
  }
}

// A head that is deleted while its save waits for the disk leaves no series behind.
TEST_F(CheckpointsTest, MetricsOfAHeadThatIsDeletedDuringItsSave) {
  Instance server(directory_, 7, &disk_, 1 << 20);
  server.CreateHead();
  disk_.CloseGate();
  absl::Status saved;
  absl::Notification read;
  std::thread saver([&] {
    saved = server
                .Save("", {.on_progress =
                               [&](const v1::SaveProgress& progress) {
                                 if (progress.phase() == v1::SAVE_PHASE_WRITING && !read.HasBeenNotified())
                                   read.Notify();
                               }})
                .status();
  });
  read.WaitForNotification();
  v1::DeleteHeadRequest request;
  request.set_head("head");
  EXPECT_TRUE(server.operations().DeleteHead(request).ok());
  disk_.OpenGate();
  saver.join();
  EXPECT_TRUE(saved.ok()) << saved;
  EXPECT_THAT(server.metrics().RenderText(), testing::Not(HasSubstr("head=\"head\"")));
}

// ---- Troubles ----
// Saves that cannot be what they ought to be: the directory is gone, or the weights are of no use.

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

// A client that saves under a name that is taken, over and over.
TEST_F(CheckpointTroublesTest, AClientsFailuresLeaveNoTroubleOfTheDiskOut) {
  ASSERT_TRUE(server_.Save("a").ok());
  log::Configure(log::LogLevel::kError, log::LogFormat::kText);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 300; ++i)
    EXPECT_EQ(server_.Save("a").status().code(), absl::StatusCode::kAlreadyExists);
  disk_.full = true;
  EXPECT_EQ(server_.Save("b").status().code(), absl::StatusCode::kResourceExhausted);
  const std::string lines = testing::internal::GetCapturedStderr();
  EXPECT_LT(std::count(lines.begin(), lines.end(), '\n'), 290) << "they are bounded";
  EXPECT_THAT(lines, HasSubstr("checkpoint not saved head=head error=\""));
  EXPECT_THAT(lines, HasSubstr("No space left on device"));
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
}  // namespace lossd::admin::checkpoints_test
