// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "examples/ngram_lm/training_run.h"
#include "tests/examples/local_head.h"
#include "tests/examples/random_seed.h"

namespace lossd::ngram_lm::trainer_test {
namespace {

constexpr int32_t kVocab = 17;
constexpr StageOneShape kShape{.tokens = kVocab + 1, .context = 2, .embedding = 6, .hidden = 20, .output = 9};

// A sequence in which a token determines the next one most of the time.
std::vector<int32_t> Sequence(std::mt19937_64* random, size_t size) {
  std::vector<int32_t> tokens = {1};
  while (tokens.size() < size) {
    const int32_t rule = (5 * tokens.back() + 1) % kVocab;
    const bool noise = (*random)() % 10 == 0;
    tokens.push_back(noise ? static_cast<int32_t>((*random)() % kVocab) : rule);
  }
  return tokens;
}

class TrainerTest : public testing::Test {
 protected:
  TrainerTest()
      : random_(FreshSeed()),
        train_(Sequence(&random_, 5000)),
        held_out_(Sequence(&random_, 400)),
        model_(kShape, random_()),
        head_(kVocab, kShape.output, random_()) {}

  Trainer MakeTrainer(const TrainerOptions& options) { return {options, train_, kVocab, &model_, &head_}; }

  std::mt19937_64 random_;
  const std::vector<int32_t> train_;
  const std::vector<int32_t> held_out_;
  StageOne model_;
  LocalHead head_;
};

TEST_F(TrainerTest, LearnsARuleFarBelowTheUnigramEntropy) {
  Trainer trainer = MakeTrainer({.microbatches = 3, .microbatch_rows = 32});
  FILE* out = std::tmpfile();
  RunOptions options;
  options.steps = 250;
  options.learning_rate = 5e-3f;
  options.head_learning_rate = 1e-2;
  options.evaluations = 4;
  const auto run = RunTraining(options, held_out_, &trainer, out);
  std::fclose(out);
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->steps, 250);
  EXPECT_EQ(run->tokens, 250 * 3 * 32);
  EXPECT_EQ(run->train.size(), 250);
  EXPECT_GE(run->held_out.size(), 4);
  EXPECT_NEAR(trainer.epochs(), 250 * 96 / 5000.0, 1e-9);
  const auto loss = trainer.Evaluate(held_out_, 400);
  ASSERT_TRUE(loss.ok());
  EXPECT_LT(*loss, UnigramEntropy(train_, held_out_, kVocab) - 1);
}

TEST_F(TrainerTest, MicrobatchesOfAStepAddUpToOneLargeMicrobatch) {
  // Without an update, the gradients of a step do not depend on how its rows are cut.
  LocalHead other_head = head_;
  StageOne other_model = model_;
  Trainer one({.microbatches = 1, .microbatch_rows = 60, .seed = 5}, train_, kVocab, &model_, &head_);
  Trainer many({.microbatches = 5, .microbatch_rows = 12, .seed = 5}, train_, kVocab, &other_model,
               &other_head);
  const auto loss_of_one = one.Step(0, 0);
  const auto loss_of_many = many.Step(0, 0);
  ASSERT_TRUE(loss_of_one.ok() && loss_of_many.ok());
  EXPECT_NEAR(*loss_of_one, *loss_of_many, 1e-6);
  for (size_t i = 0; i < model_.gradients().size(); ++i) {
    EXPECT_NEAR(model_.gradients()[i], other_model.gradients()[i], 1e-5) << i;
  }
}

TEST_F(TrainerTest, KeepsAsManyMicrobatchesInFlightAsAllowed) {
  for (int64_t in_flight : {1, 2, 3}) {
    LocalHead head(kVocab, kShape.output, 1);
    Trainer trainer({.microbatches = 5, .microbatch_rows = 4, .in_flight = in_flight}, train_, kVocab,
                    &model_, &head);
    ASSERT_TRUE(trainer.Step(1e-3f, 1e-3).ok());
    EXPECT_EQ(head.most_under_way(), in_flight);
    EXPECT_EQ(head.step(), 1);
  }
}

TEST_F(TrainerTest, EvaluatesUntrainedModelNearUniform) {
  Trainer trainer = MakeTrainer({});
  const auto loss = trainer.Evaluate(held_out_, 100);
  ASSERT_TRUE(loss.ok());
  EXPECT_NEAR(*loss, std::log(kVocab), 1.5);
  EXPECT_EQ(head_.step(), 0);
}

TEST_F(TrainerTest, ContinuesEverySequence) {
  Trainer trainer = MakeTrainer({});
  std::vector<std::vector<int32_t>> sequences = {{}, {3, 4, 5}};
  ASSERT_TRUE(trainer.Continue(4, &sequences).ok());
  EXPECT_EQ(sequences[0].size(), 4);
  EXPECT_EQ(sequences[1].size(), 7);
  EXPECT_EQ(sequences[1][2], 5);
  for (int32_t token : sequences[1]) EXPECT_LT(token, kVocab);
}

TEST_F(TrainerTest, GoesOnFromAStateAsIfNothingHadHappened) {
  const TrainerOptions options{.microbatches = 2, .microbatch_rows = 16, .seed = 3};
  Trainer trainer = MakeTrainer(options);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(trainer.Step(1e-2f, 1e-2).ok());
  const TrainerState state = trainer.State();
  LocalHead other_head = head_;
  StageOne other_model(kShape, 77);
  Trainer other(options, train_, kVocab, &other_model, &other_head);
  ASSERT_TRUE(other.Restore(state).ok());
  EXPECT_EQ(other.steps(), 5);
  for (int i = 0; i < 5; ++i) {
    const auto loss = trainer.Step(1e-2f, 1e-2), other_loss = other.Step(1e-2f, 1e-2);
    ASSERT_TRUE(loss.ok() && other_loss.ok());
    EXPECT_EQ(*loss, *other_loss);
  }
  EXPECT_TRUE(
      std::equal(model_.parameters().begin(), model_.parameters().end(), other_model.parameters().begin()));
}

TEST_F(TrainerTest, RefusesTheStateOfAnotherTraining) {
  Trainer trainer = MakeTrainer({.microbatches = 2, .microbatch_rows = 16, .seed = 3});
  Trainer other = MakeTrainer({.microbatches = 2, .microbatch_rows = 17, .seed = 3});
  const absl::Status status = other.Restore(trainer.State());
  EXPECT_EQ(status.message(), "the saved training has 32 tokens a step, this one 34");
}

TEST_F(TrainerTest, PassesTheHeadsErrorsOn) {
  Trainer trainer = MakeTrainer({.microbatch_rows = 8});
  head_.Break();
  EXPECT_EQ(trainer.Step(1e-3f, 1e-3).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(trainer.Evaluate(held_out_, 10).status().code(), absl::StatusCode::kUnavailable);
}

TEST(RateMultiplierTest, RisesThenFalls) {
  EXPECT_GT(RateMultiplier(0), 0);
  EXPECT_NEAR(RateMultiplier(0.03), 1, 1e-6);
  EXPECT_LT(RateMultiplier(0.01), RateMultiplier(0.02));
  EXPECT_GT(RateMultiplier(0.3), RateMultiplier(0.6));
  EXPECT_NEAR(RateMultiplier(1), 0.05, 1e-6);
}

}  // namespace
}  // namespace lossd::ngram_lm::trainer_test
