// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "examples/ngram_lm/corpus.h"
#include "tests/examples/random_seed.h"

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
