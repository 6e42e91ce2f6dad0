// SPDX-License-Identifier: Apache-2.0
// Tests of the demo's trainer with a server process: it learns, and goes on exactly where it was saved.
#include "examples/ngram_lm/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::ngram_lm::trainer_test {
namespace {

constexpr int32_t kVocab = 17;

// A sequence in which a token determines the next one most of the time.
std::vector<int32_t> Sequence(uint64_t seed, size_t size) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens = {1};
  while (tokens.size() < size) {
    const int32_t rule = (5 * tokens.back() + 1) % kVocab;
    tokens.push_back(random() % 10 == 0 ? static_cast<int32_t>(random() % kVocab) : rule);
  }
  return tokens;
}

class TrainerTest : public testing::Test {
 protected:
  TrainerTest() : text_{Sequence(1, 5000), Sequence(2, 400), kVocab} {}

  TrainerOptions Options(int64_t microbatches, int64_t rows) const {
    TrainerOptions options;
    options.server = server_.target();
    options.shape = {.tokens = kVocab, .context = 2, .embedding = 6, .hidden = 20, .output = 9};
    options.microbatches = microbatches;
    options.microbatch_rows = rows;
    return options;
  }

  std::unique_ptr<Trainer> Open(const TrainerOptions& options) {
    absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Open(options, &text_);
    EXPECT_TRUE(trainer.ok()) << trainer.status();
    return trainer.ok() ? *std::move(trainer) : nullptr;
  }

  // The losses of so many steps.
  static std::vector<double> Train(Trainer* trainer, int steps) {
    std::vector<double> losses;
    for (int i = 0; i < steps; ++i) {
      const absl::StatusOr<double> loss = trainer->Step(1);
      EXPECT_TRUE(loss.ok()) << loss.status();
      losses.push_back(loss.value_or(0));
    }
    return losses;
  }

  static std::vector<float> Parameters(Trainer* trainer) {
    return {trainer->stage_one().parameters().begin(), trainer->stage_one().parameters().end()};
  }

  const Text text_;
  test::ServerProcess server_{LOSSD_BINARY, {"--deterministic"}};
  test::TempFolder folder_;
};

TEST_F(TrainerTest, LearnsARuleFarBelowTheUnigramEntropy) {
  const std::unique_ptr<Trainer> trainer = Open(Options(3, 32));
  const absl::StatusOr<double> before = trainer->Evaluate(100);
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_NEAR(*before, std::log(kVocab), 1.5);
  EXPECT_EQ(trainer->steps(), 0);
  Train(trainer.get(), 250);
  EXPECT_EQ(trainer->steps(), 250);
  const absl::StatusOr<double> after = trainer->Evaluate(400);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_LT(*after, UnigramEntropy(text_) - 1);
}

TEST_F(TrainerTest, MicrobatchesOfAStepAddUp) {
  // Between two steps of rate 0 nothing changes, so the gradients of a step are those of its rows.
  TrainerOptions options = Options(5, 12);
  const std::unique_ptr<Trainer> many = Open(options);
  ASSERT_TRUE(many->Step(0).ok());
  std::vector<double> sum(many->stage_one().gradients().size());
  for (size_t i = 0; i < sum.size(); ++i) sum[i] = many->stage_one().gradients()[i];
  // Steps of one microbatch draw the rows that a step of five draws.
  options.head = "one";
  options.microbatches = 1;
  const std::unique_ptr<Trainer> one = Open(options);
  for (int step = 0; step < 5; ++step) {
    ASSERT_TRUE(one->Step(0).ok());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] -= one->stage_one().gradients()[i] / 5;
  }
  for (size_t i = 0; i < sum.size(); ++i) EXPECT_NEAR(sum[i], 0, 1e-5) << i;
}

TEST_F(TrainerTest, ResumesExactly) {
  TrainerOptions options = Options(2, 16);
  options.state_file = folder_.File("state");
  test::WriteWholeFile(options.state_file + ".tmp", "half of a state");
  std::unique_ptr<Trainer> trainer = Open(options);
  Train(trainer.get(), 3);
  ASSERT_TRUE(trainer->Save().ok());
  const std::vector<double> losses = Train(trainer.get(), 5);
  const std::vector<float> parameters = Parameters(trainer.get());

  // Another trainer, while the head stands at a later step.
  trainer = Open(options);
  EXPECT_EQ(trainer->steps(), 3);
  EXPECT_EQ(Train(trainer.get(), 2), std::vector<double>(losses.begin(), losses.begin() + 2));

  // Another server process, in the middle of a training.
  server_.Kill();
  const absl::Status lost = trainer->Step(1).status();
  EXPECT_TRUE(ServerWasLost(lost)) << lost;
  server_.Start(server_.target());
  ASSERT_TRUE(trainer->GoBack().ok());
  EXPECT_EQ(trainer->steps(), 3);
  EXPECT_EQ(Train(trainer.get(), 5), losses);
  EXPECT_EQ(Parameters(trainer.get()), parameters);

  // The server's name for a checkpoint of this step is taken, by a save of a training that went back.
  ASSERT_TRUE(trainer->Save().ok());
  ASSERT_TRUE(trainer->Save().ok());
  EXPECT_EQ(Open(options)->steps(), 8);
}

TEST_F(TrainerTest, RefusesTheStateOfAnotherTrainingAndADamagedOne) {
  TrainerOptions options = Options(2, 16);
  options.state_file = folder_.File("state");
  Train(Open(options).get(), 1);
  TrainerOptions other = options;
  other.microbatch_rows = 17;
  const absl::Status refused = Trainer::Open(other, &text_).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              testing::EndsWith("a training with 5000 tokens, 32 a step, 551 parameters; "
                                "this one has 5000 tokens, 34 a step, 551 parameters"));
  const std::string good = test::ReadWholeFile(options.state_file);
  test::WriteWholeFile(options.state_file, good.substr(0, good.size() - 1));
  EXPECT_EQ(Trainer::Open(options, &text_).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TrainerTest, TwoTrainingsDoNotShareAHead) {
  const std::unique_ptr<Trainer> first = Open(Options(2, 16));
  EXPECT_EQ(Trainer::Open(Options(2, 16), &text_).status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(first->DeleteHead().ok());
  EXPECT_TRUE(Trainer::Open(Options(2, 16), &text_).ok());
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
