// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/trainer_state.h"

#include <gtest/gtest.h>

#include "tests/support/temp_folder.h"

namespace lossd::ngram_lm::trainer_state_test {
namespace {

class TrainerStateTest : public testing::Test {
 protected:
  static TrainerState AnyState() {
    TrainerState state;
    state.seed = 5;
    state.tokens_per_step = 96;
    state.train_tokens = 1000;
    state.parameters = {1.5f, -0.0f, 1e-40f};
    state.adam = {7, {1, 2, 3}, {4, 5, 6}};
    state.checkpoint = "demo/step-0000000007";
    return state;
  }

  test::TempFolder folder_;
  const std::string path_ = folder_.File("state");
};

TEST_F(TrainerStateTest, ComesBackAsItWas) {
  TrainerState state = AnyState();
  ASSERT_TRUE(SaveState(state, path_).ok());
  state.adam.steps = 8;
  state.checkpoint = "demo/step-8-2";
  ASSERT_TRUE(SaveState(state, path_).ok()) << "replaces the one before";
  const auto loaded = LoadState(path_);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->seed, 5);
  EXPECT_EQ(loaded->tokens_per_step, 96);
  EXPECT_EQ(loaded->train_tokens, 1000);
  EXPECT_EQ(loaded->parameters, state.parameters);
  EXPECT_EQ(loaded->adam.steps, 8);
  EXPECT_EQ(loaded->adam.moment1, state.adam.moment1);
  EXPECT_EQ(loaded->adam.moment2, state.adam.moment2);
  EXPECT_EQ(loaded->checkpoint, "demo/step-8-2");
}

TEST_F(TrainerStateTest, LeftoverOfAnInterruptedSaveDoesNotMatter) {
  test::WriteWholeFile(path_ + ".tmp", "half of it");
  ASSERT_TRUE(SaveState(AnyState(), path_).ok());
  EXPECT_TRUE(LoadState(path_).ok());
}

TEST_F(TrainerStateTest, MissingAndDamagedFilesAreRefused) {
  EXPECT_EQ(LoadState(path_).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(SaveState(AnyState(), path_).ok());
  const std::string good = test::ReadWholeFile(path_);
  test::WriteWholeFile(path_, good.substr(0, good.size() - 1));
  EXPECT_EQ(LoadState(path_).status().code(), absl::StatusCode::kInvalidArgument)
      << LoadState(path_).status();
}

}  // namespace
}  // namespace lossd::ngram_lm::trainer_state_test
