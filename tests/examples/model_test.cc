// SPDX-License-Identifier: Apache-2.0
// Tests of examples/ngram_lm: the optimizer, the rows, the corpus, the model, the plot, the tokenizer, and
// the state of a trainer.
#include "examples/ngram_lm/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "examples/ngram_lm/corpus.h"
#include "examples/ngram_lm/trainer.h"
#include "examples/ngram_lm/training_run.h"
#include "tests/examples/random_seed.h"
#include "tests/support/temp_folder.h"

// ---- Adam ----

namespace lossd::ngram_lm::adam_test {
namespace {

// Algorithm 1 of the paper, word for word, in double precision.
struct Reference {
  double m = 0, v = 0, parameter = 0;
  int t = 0;

  void Step(double learning_rate, double g, const Adam::Options& o) {
    ++t;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, t));
    const double v_hat = v / (1 - std::pow(o.beta2, t));
    parameter -= learning_rate * m_hat / (std::sqrt(v_hat) + o.epsilon);
  }
};

TEST(AdamTest, FollowsTheReference) {
  std::mt19937_64 random(FreshSeed());
  std::normal_distribution<float> normal;
  constexpr size_t kSize = 37;
  const Adam::Options options{.beta1 = 0.8f, .beta2 = 0.97f, .epsilon = 1e-3f};
  Adam adam(kSize, options);
  std::vector<Reference> reference(kSize);
  std::vector<float> parameters(kSize), gradients(kSize);
  for (size_t i = 0; i < kSize; ++i) reference[i].parameter = parameters[i] = normal(random);
  for (int step = 0; step < 50; ++step) {
    const float rate = 0.01f * static_cast<float>(step % 7);
    for (size_t i = 0; i < kSize; ++i) {
      gradients[i] = normal(random);
      reference[i].Step(rate, gradients[i], options);
    }
    adam.Step(rate, gradients, absl::MakeSpan(parameters));
  }
  // fp32 against double over 50 steps of at most 0.06 each.
  for (size_t i = 0; i < kSize; ++i) EXPECT_NEAR(parameters[i], reference[i].parameter, 2e-5) << i;
}

TEST(AdamTest, FirstStepHasTheSizeOfTheLearningRate) {
  Adam adam(2, {});
  std::vector<float> parameters = {1, 1};
  adam.Step(0.25f, {3e-3f, -40}, absl::MakeSpan(parameters));
  EXPECT_NEAR(parameters[0], 0.75, 1e-5);
  EXPECT_NEAR(parameters[1], 1.25, 1e-5);
}

TEST(AdamTest, GoesOnFromAState) {
  std::mt19937_64 random(FreshSeed());
  std::normal_distribution<float> normal;
  constexpr size_t kSize = 5;
  Adam adam(kSize, Adam::Options{});
  std::vector<float> parameters(kSize), gradients(kSize);
  const auto step = [&gradients](Adam& optimizer, std::vector<float>& values) {
    optimizer.Step(0.1f, gradients, absl::MakeSpan(values));
  };
  for (float& g : gradients) g = normal(random);
  for (int i = 0; i < 3; ++i) step(adam, parameters);
  Adam other(kSize, Adam::Options{});
  other.Restore(adam.state());
  std::vector<float> other_parameters = parameters;
  for (float& g : gradients) g = normal(random);
  step(adam, parameters);
  step(other, other_parameters);
  EXPECT_EQ(parameters, other_parameters);
  EXPECT_EQ(other.state().steps, 4);
}

}  // namespace
}  // namespace lossd::ngram_lm::adam_test

// ---- Batches ----

namespace lossd::ngram_lm::batches_test {
namespace {

using ::testing::ElementsAre;

TEST(GatherRowsTest, PadsBeforeTheFirstToken) {
  std::vector<int32_t> contexts, targets;
  GatherRows({10, 11, 12, 13}, {0, 3, 1}, 2, 99, &contexts, &targets);
  EXPECT_THAT(contexts, ElementsAre(99, 99, 11, 12, 99, 10));
  EXPECT_THAT(targets, ElementsAre(10, 13, 11));
}

TEST(ShufflerTest, EveryEpochHasEachPositionOnce) {
  Shuffler shuffler(13, FreshSeed());
  std::vector<std::vector<int64_t>> epochs;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<int64_t> seen = shuffler.Next(5);
    for (int64_t position : shuffler.Next(8)) seen.push_back(position);
    epochs.push_back(seen);
    std::sort(seen.begin(), seen.end());
    for (int64_t i = 0; i < 13; ++i) EXPECT_EQ(seen[i], i);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_EQ(shuffler.epochs(), 2);
}

TEST(ShufflerTest, SkippedPositionsAreTaken) {
  const uint64_t seed = FreshSeed();
  for (int64_t skipped : {0, 3, 13, 14, 40}) {
    Shuffler one(13, seed), other(13, seed);
    one.Next(skipped);
    other.Skip(skipped);
    EXPECT_EQ(one.Next(20), other.Next(20)) << skipped;
  }
}

TEST(EvenlySpacedTest, CoversTheWholeRange) {
  EXPECT_THAT(EvenlySpaced(10, 3), ElementsAre(0, 3, 6));
  EXPECT_THAT(EvenlySpaced(3, 10), ElementsAre(0, 1, 2));
  EXPECT_THAT(EvenlySpaced(0, 10), ElementsAre());
}

TEST(UnigramEntropyTest, AddsOneToEveryCount) {
  // Counts 3, 1, 0 plus one each: probabilities 4/7, 2/7, 1/7.
  EXPECT_NEAR(UnigramEntropy({0, 0, 0, 1}, {0, 2}, 3), -(std::log(4.0 / 7) + std::log(1.0 / 7)) / 2, 1e-12);
  EXPECT_NEAR(UnigramEntropy({}, {1}, 8), std::log(8.0), 1e-12);
}

}  // namespace
}  // namespace lossd::ngram_lm::batches_test

// ---- Corpus ----

namespace lossd::ngram_lm::corpus_test {
namespace {

TEST(StripPodTest, RemovesCommandsAndKeepsTheirText) {
  EXPECT_EQ(StripPod("=encoding utf8\n\n=head1 NAME\n\nperl - a language\n\n=over 4\n\n=item "
                     "*\n\nOne\n\n=back\n\n=cut\n"),
            "NAME\n\nperl - a language\n\n*\n\nOne\n\n");
}

TEST(StripPodTest, RemovesFormattingCodes) {
  EXPECT_EQ(StripPod("Use B<I<bold>> and C<< $x->y >> here."), "Use bold and $x->y here.\n\n");
  EXPECT_EQ(StripPod("See L<the manual|perlop/Quotes> and L<perlre>."), "See the manual and perlre.\n\n");
  EXPECT_EQ(StripPod("X<index entry>a E<lt> b E<gt> c E<0xE9>E<228>Z<>!"), "a < b > c \xC3\xA9\xC3\xA4!\n\n");
}

TEST(StripPodTest, KeepsVerbatimParagraphs) {
  EXPECT_EQ(StripPod("Text\n\n    print C<$x> if B<1;\n\nMore"),
            "Text\n\n    print C<$x> if B<1;\n\nMore\n\n");
}

TEST(StripPodTest, SkipsBlocksForOtherFormats) {
  EXPECT_EQ(StripPod("=begin html\n\n<b>no</b>\n\n=end html\n\nyes\n\n=for comment no\n\nalso"),
            "yes\n\nalso\n\n");
}

TEST(StripPodTest, SurvivesBrokenMarkup) {
  EXPECT_EQ(StripPod("C<never closed"), "never closed\n\n");
  EXPECT_EQ(StripPod("="), "");
  EXPECT_EQ(StripPod(""), "");
  EXPECT_EQ(StripPod("C<"), "");
}

TEST(SplitBlocksTest, KeepsEveryByteAndHoldsOutItsShare) {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "line " + std::to_string(i) + "\n";
  const TextSplit split = SplitBlocks({text}, 1000, 10);
  EXPECT_EQ(split.train.size() + split.held_out.size(), text.size());
  const double share = static_cast<double>(split.held_out.size()) / static_cast<double>(text.size());
  EXPECT_NEAR(share, 0.1, 0.01);
  EXPECT_EQ(split.train.back(), '\n');
  EXPECT_EQ(split.held_out.back(), '\n');
  EXPECT_EQ(split.held_out.substr(0, 5), "line ");
}

TEST(SplitBlocksTest, ShortTextIsAllTraining) {
  const TextSplit split = SplitBlocks({"one", "two"}, 100);
  EXPECT_EQ(split.train, "one\ntwo");
  EXPECT_EQ(split.held_out, "");
}

TEST(SplitBlocksTest, BlocksShrinkWithTheText) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += "a line of text\n";
  const TextSplit split = SplitBlocks({text});
  const double share = static_cast<double>(split.held_out.size()) / static_cast<double>(text.size());
  EXPECT_NEAR(share, 0.05, 0.02);
  EXPECT_TRUE(SplitBlocks({}).train.empty());
}

TEST(LoadTest, ReadsAFileAndReportsMissingOnes) {
  const std::string path = testing::TempDir() + "/corpus_test.pod";
  std::ofstream(path) << "=head1 A\n\nC<b>\n";
  const auto file = LoadFile(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*file, "=head1 A\n\nC<b>\n");
  const auto pages = LoadPerlManual(path);
  ASSERT_TRUE(pages.ok()) << pages.status();
  ASSERT_EQ(pages->size(), 1);
  EXPECT_EQ((*pages)[0], "A\n\nb\n\n");
  EXPECT_EQ(LoadFile(path + ".missing").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(LoadPerlManual(path + ".missing").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace lossd::ngram_lm::corpus_test

// ---- Model ----

namespace lossd::ngram_lm::model_test {
namespace {

constexpr StageOneShape kShape{.tokens = 11, .context = 3, .embedding = 5, .hidden = 7, .output = 4};
constexpr int64_t kRows = 6;

class StageOneTest : public testing::Test {
 protected:
  StageOneTest() : random_(FreshSeed()), model_(kShape, random_()) {
    for (float& p : model_.parameters()) p += 0.1f * normal_(random_);  // biases too
    for (int64_t i = 0; i < kRows * kShape.context; ++i) {
      activations_.contexts.push_back(static_cast<int32_t>(random_() % kShape.tokens));
    }
    direction_.resize(kRows * kShape.output);
    for (float& g : direction_) g = normal_(random_);
  }

  // direction . output, in double precision: a scalar whose gradient Backward must give.
  double Objective() {
    model_.Forward(&activations_);
    double sum = 0;
    for (size_t i = 0; i < direction_.size(); ++i) {
      sum += static_cast<double>(direction_[i]) * activations_.output[i];
    }
    return sum;
  }

  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  StageOne model_;
  Activations activations_;
  std::vector<float> direction_;
};

TEST_F(StageOneTest, GradientsAgreeWithFiniteDifferences) {
  Objective();
  model_.Backward(activations_, direction_);
  const std::vector<float> gradients(model_.gradients().begin(), model_.gradients().end());
  ASSERT_EQ(gradients.size(), 11 * 5 + 7 * 15 + 7 + 4 * 7 + 4);
  constexpr float kStep = 1e-2f;
  for (size_t i = 0; i < gradients.size(); ++i) {
    float& parameter = model_.parameters()[i];
    const float before = parameter;
    parameter = before + kStep;
    const double above = Objective();
    const double up = static_cast<double>(parameter) - before;
    parameter = before - kStep;
    const double below = Objective();
    const double down = static_cast<double>(before) - parameter;
    parameter = before;
    const double expected = (above - below) / (up + down);
    // Rounding of fp32 sums over the step, and the third derivative times its square.
    EXPECT_NEAR(gradients[i], expected, 5e-3 * (1 + std::abs(expected))) << "parameter " << i;
  }
}

TEST_F(StageOneTest, BackwardAddsAndZeroGradientsClears) {
  Objective();
  model_.Backward(activations_, direction_);
  const std::vector<float> once(model_.gradients().begin(), model_.gradients().end());
  model_.Backward(activations_, direction_);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(model_.gradients()[i], 2 * once[i], 1e-4) << i;
  EXPECT_GT(*std::max_element(once.begin(), once.end()), 0);
  model_.ZeroGradients();
  for (float g : model_.gradients()) EXPECT_EQ(g, 0);
}

TEST_F(StageOneTest, RowsAreIndependent) {
  Objective();
  Activations last;
  last.contexts.assign(activations_.contexts.end() - kShape.context, activations_.contexts.end());
  model_.Forward(&last);
  for (int64_t i = 0; i < kShape.output; ++i) {
    EXPECT_NEAR(last.output[i], activations_.output[(kRows - 1) * kShape.output + i], 1e-5);
  }
}

TEST(StageOneInitTest, HiddenStatesStartNearUnitVariance) {
  const StageOneShape shape{.tokens = 500, .context = 8, .embedding = 32, .hidden = 128, .output = 64};
  StageOne model(shape, FreshSeed());
  Activations activations;
  for (int i = 0; i < 200 * 8; ++i) activations.contexts.push_back(i * 7 % 500);
  model.Forward(&activations);
  double squares = 0;
  for (float x : activations.output) squares += static_cast<double>(x) * x;
  const double variance = squares / static_cast<double>(activations.output.size());
  EXPECT_GT(variance, 0.4);
  EXPECT_LT(variance, 2.5);
}

}  // namespace
}  // namespace lossd::ngram_lm::model_test

// ---- Plot ----

namespace lossd::ngram_lm::plot_test {
namespace {

TEST(RenderPlotTest, Golden) {
  PlotData data;
  data.curve = {{0, 9}, {50, 4}, {100, 3}};
  data.marks = {{0, 9}, {100, 3.5}};
  data.reference = 7;
  data.reference_label = "unigram";
  PlotOptions options;
  options.width = 24;
  options.height = 5;
  options.title = "loss";
  options.x_label = "step";
  EXPECT_EQ(RenderPlot(data, options),
            "          loss\n"
            "    9.00 ┤o⠢⣀\n"
            "         │⠄ ⠄⠑⠦⣀⠄ ⠄ ⠄ ⠄ ⠄ ⠄ ⠄ ⠄ ⠄  unigram\n"
            "    6.00 ┤      ⠑⠢⣀\n"
            "         │         ⠑⠢⣀\n"
            "    3.00 ┤            ⠉⠉⠒⠒⠒⠒⠤⠤⠤⠤⣀o\n"
            "         └────────────────────────\n"
            "          0        step        100\n");
}

TEST(RenderPlotTest, OnePointAndEqualValues) {
  PlotData data;
  data.curve = {{3, 2}};
  PlotOptions options;
  options.width = 10;
  options.height = 1;
  EXPECT_EQ(RenderPlot(data, options),
            "    3.00 ┤⡀\n"
            "         └──────────\n"
            "          3        4\n");
}

TEST(FormatProgressTest, Golden) {
  ProgressState state;
  state.step = 120;
  state.loss = 5.432;
  state.tokens_per_second = 9812.3;
  state.left = absl::Seconds(93.2);
  EXPECT_EQ(FormatProgress(state),
            "step   120   loss 5.432   perplexity   228.6     9812 tokens/s   1:34 left");
}

}  // namespace
}  // namespace lossd::ngram_lm::plot_test

// ---- Tokenizer ----

namespace lossd::ngram_lm::tokenizer_test {
namespace {

using ::testing::ElementsAre;

std::string RandomBytes(std::mt19937_64* random, size_t size) {
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>((*random)());
  return bytes;
}

std::string RandomWords(std::mt19937_64* random, size_t count) {
  static const char* const kWords[] = {"hash", "hashes", " the", "  list\n", "42", "9x", "\xC3\xA9t\xC3\xA9",
                                       "->{",  "\t"};
  std::string text;
  for (size_t i = 0; i < count; ++i) text.append(" ").append(kWords[(*random)() % std::size(kWords)]);
  return text;
}

std::vector<std::string> Pieces(absl::string_view text) {
  std::vector<std::string> pieces;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = PieceEnd(text, begin);
    pieces.emplace_back(text.substr(begin, end - begin));
    begin = end;
  }
  return pieces;
}

TEST(PieceEndTest, CutsWordsNumbersPunctuationAndSpace) {
  EXPECT_THAT(Pieces("a bc12, d"), ElementsAre("a", " bc", "12", ",", " d"));
  EXPECT_THAT(Pieces("x\n\n   y"), ElementsAre("x", "\n\n  ", " y"));
  EXPECT_THAT(Pieces("->{k} "), ElementsAre("->{", "k", "}", " "));
}

TEST(PieceEndTest, CoversRandomBytesInShortPieces) {
  std::mt19937_64 random(FreshSeed());
  const std::string bytes = RandomBytes(&random, 5000) + std::string(200, 'a') + std::string(100, ' ');
  std::string joined;
  for (const std::string& piece : Pieces(bytes)) {
    EXPECT_GE(piece.size(), 1);
    EXPECT_LE(piece.size(), 33);
    joined += piece;
  }
  EXPECT_EQ(joined, bytes);
}

TEST(TokenizerTest, MergesTheMostFrequentPairFirst) {
  // In "ababab cb": ab 3 times, ba 2 times, cb once.
  const auto tokenizer = Tokenizer::Train("ababab cb", 258);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(tokenizer->Encode("ab"), ElementsAre(256));
  EXPECT_THAT(tokenizer->Encode("abab"), ElementsAre(257));
  EXPECT_THAT(tokenizer->Encode("cab"), ElementsAre('c', 256));
  EXPECT_EQ(tokenizer->Decode({257, 'x', 256}), "ababxab");
}

TEST(TokenizerTest, StopsWhenNoPairRepeats) {
  const auto tokenizer = Tokenizer::Train("abcdef", 1000);
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_EQ(tokenizer->vocab_size(), 256);
}

TEST(TokenizerTest, RefusesLessThanTheBytes) {
  EXPECT_EQ(Tokenizer::Train("abc", 255).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TokenizerTest, RoundTripsAnyBytes) {
  std::mt19937_64 random(FreshSeed());
  const std::string text = RandomWords(&random, 3000);
  const auto tokenizer = Tokenizer::Train(text, 400);
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_GT(tokenizer->vocab_size(), 256);
  for (const std::string& input : {text, RandomBytes(&random, 10000), std::string(), std::string(1, '\0')}) {
    const std::vector<int32_t> tokens = tokenizer->Encode(input);
    for (int32_t token : tokens) EXPECT_TRUE(token >= 0 && token < tokenizer->vocab_size()) << token;
    EXPECT_EQ(tokenizer->Decode(tokens), input);
  }
  EXPECT_LT(tokenizer->Encode(text).size(), text.size() / 2);
}

TEST(TokenizerTest, SameTextGivesSameTokens) {
  std::mt19937_64 random(FreshSeed());
  const std::string text = RandomWords(&random, 2000);
  const auto one = Tokenizer::Train(text, 350);
  const auto two = Tokenizer::Train(text, 350);
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(one->Encode(text), two->Encode(text));
}

TEST(TokenizerTest, RoundTripsThePerlManual) {
  const auto documents = LoadPerlManual();
  if (!documents.ok()) GTEST_SKIP() << documents.status();
  std::string text;
  for (size_t i = 0; i < documents->size() && text.size() < 500'000; ++i) text += (*documents)[i];
  const auto tokenizer = Tokenizer::Train(text, 4096);
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_EQ(tokenizer->vocab_size(), 4096);
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(text)), text);
}

}  // namespace
}  // namespace lossd::ngram_lm::tokenizer_test

// ---- Trainer state ----

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
