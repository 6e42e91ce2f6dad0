// SPDX-License-Identifier: Apache-2.0
// Tests of real_rows.h and softmax_profile.h: data with the softmax of a real model.
#include "kernels/data/real_rows.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/threads_and_memory.h"
#include "kernels/data/softmax_profile.h"

// ---- Real data ----
// The data have the softmax that was measured. Thresholds that the size has room for are within the 15 % that
// benchmarks promise; 512 rows have a standard error of 3 to 6 %.

namespace lossd::data::real_data_test {
namespace {

constexpr int64_t kRows = 512, kHidden = 512, kVocab = 8192;

class RealDataTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    rows_ = new RealRows(*RealRows::Create(kRows, kHidden, kVocab, 20));
    data_ = new RealData(MakeRealData(*rows_));
    logits_ = new std::vector<float>(static_cast<size_t>(kRows * kVocab));
    kernels::ThreadPool pool(2);
    kernels::Gemm(pool, kRows, kVocab, kHidden, 1.0f, {data_->hidden.data(), kHidden},
                  {data_->weight.data(), kHidden, /*transposed=*/true}, 0.0f, logits_->data(), kVocab);
  }
  static void TearDownTestSuite() {
    delete logits_;
    delete data_;
    delete rows_;
  }

  static absl::Span<const float> Logits(int64_t row) {
    return absl::MakeSpan(*logits_).subspan(static_cast<size_t>(row * kVocab), static_cast<size_t>(kVocab));
  }

  static RealRows* rows_;
  static RealData* data_;
  static std::vector<float>* logits_;
};
RealRows* RealDataTest::rows_ = nullptr;
RealData* RealDataTest::data_ = nullptr;
std::vector<float>* RealDataTest::logits_ = nullptr;

TEST_F(RealDataTest, CandidatesHaveTheLogitsWanted) {
  for (int64_t i = 0; i < kRows; ++i) {
    const RealRows::Row row = rows_->row(i);
    EXPECT_EQ(data_->targets[static_cast<size_t>(i)], row.target);
    for (size_t c = 0; c < row.classes.size(); ++c) {
      ASSERT_NEAR(Logits(i)[static_cast<size_t>(row.classes[c])], row.logits[c], 0.05) << "row " << i;
    }
  }
}

TEST_F(RealDataTest, HasTheMeasuredProfile) {
  ProfileCheck check(RealProfile());
  for (int64_t i = 0; i < kRows; ++i) check.Add(Logits(i), data_->targets[static_cast<size_t>(i)]);
  for (const ProfileCheck::Ratio& ratio : check.Ratios()) {
    if (ratio.threshold < 0x1p-14) continue;  // of 8,192 classes too few are left below
    EXPECT_NEAR(ratio.candidates, 1.0, 0.15) << check.Text();
    EXPECT_NEAR(ratio.tail_mass, 1.0, 0.15) << check.Text();
  }
  EXPECT_NEAR(check.loss() / RealProfile().loss, 1.0, 0.25) << check.Text();
}

TEST_F(RealDataTest, PopularClassesHaveMostOfTheProbability) {
  std::vector<double> mean(static_cast<size_t>(kVocab));
  for (int64_t i = 0; i < kRows; ++i) {
    const double top = *std::max_element(Logits(i).begin(), Logits(i).end());
    double sum = 0.0;
    for (float logit : Logits(i)) sum += std::exp(double{logit} - top);
    for (size_t v = 0; v < mean.size(); ++v) mean[v] += std::exp(double{Logits(i)[v]} - top) / sum / kRows;
  }
  std::sort(mean.rbegin(), mean.rend());
  // Measured: 0.044 and 0.0013.
  EXPECT_NEAR(mean[0], 0.044, 0.02);
  EXPECT_NEAR(std::log2(mean[99] / 0.0013), 0.0, 1.0);
}

TEST_F(RealDataTest, AnyRangeIsFilledAlike) {
  std::vector<float> weight(static_cast<size_t>(3 * kHidden)), hidden(static_cast<size_t>(2 * kHidden));
  std::vector<int32_t> targets(2);
  FillWeight(*rows_, 100, 103, weight.data());
  FillHidden(*rows_, 200, 202, hidden.data(), targets.data());
  EXPECT_TRUE(std::equal(weight.begin(), weight.end(), data_->weight.begin() + 100 * kHidden));
  EXPECT_TRUE(std::equal(hidden.begin(), hidden.end(), data_->hidden.begin() + 200 * kHidden));
  EXPECT_TRUE(std::equal(targets.begin(), targets.end(), data_->targets.begin() + 200));
}

// A row of which everything is known: p = 1/2, 1/4, 1/8, 1/8.
TEST(ProfileCheckTest, CountsClassesAndProbability) {
  SoftmaxProfile profile;
  profile.thresholds = {0.25, 0.2};
  profile.candidates = {1.0, 2.0};
  profile.tail_mass = {0.5, 0.125};
  ProfileCheck check(profile);
  const float log2 = std::log(2.0f);
  const std::vector<float> logits = {1.0f, 1.0f - log2 * 0.999999f, 1.0f - 2.0f * log2, 1.0f - 2.0f * log2};
  check.Add(logits, 2);
  check.Add(logits, 0);
  EXPECT_NEAR(check.Ratios()[0].candidates, 2.0, 1e-6);
  EXPECT_NEAR(check.Ratios()[0].tail_mass, 0.5, 1e-4);
  EXPECT_NEAR(check.Ratios()[1].candidates, 1.0, 1e-6);
  EXPECT_NEAR(check.Ratios()[1].tail_mass, 2.0, 1e-4);
  EXPECT_NEAR(check.loss(), 2.0 * log2, 1e-4);
}

}  // namespace
}  // namespace lossd::data::real_data_test

// ---- Real rows ----

namespace lossd::data::real_rows_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Lt;

RealRows Rows(int64_t rows, int64_t hidden_size, int64_t vocab_size, uint64_t seed) {
  auto made = RealRows::Create(rows, hidden_size, vocab_size, seed);
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

TEST(RealRowsTest, CandidatesAreDistinctClassesWithTheTargetAmongThem) {
  const RealRows rows = Rows(100, 256, 3000, 7);
  for (int64_t i = 0; i < rows.rows(); ++i) {
    const RealRows::Row row = rows.row(i);
    ASSERT_EQ(row.classes.size(), row.logits.size());
    EXPECT_LE(static_cast<int64_t>(row.classes.size()), rows.most_candidates());
    EXPECT_EQ(std::set<int32_t>(row.classes.begin(), row.classes.end()).size(), row.classes.size());
    EXPECT_THAT(row.classes, Each(AllOf(Ge(0), Lt(3000))));
    EXPECT_THAT(row.classes, Contains(row.target));
    EXPECT_GE(row.noise, 0.0f);
  }
}

TEST(RealRowsTest, ARowIsAFunctionOfSeedAndIndex) {
  const RealRows first = Rows(50, 128, 2000, 3), again = Rows(50, 128, 2000, 3),
                 other = Rows(50, 128, 2000, 4);
  EXPECT_EQ(first.class_logits(), again.class_logits());
  EXPECT_NE(first.class_logits(), other.class_logits());
  for (int64_t i : {49, 0, 7}) {
    EXPECT_EQ(first.row(i).classes, again.row(i).classes);
    EXPECT_EQ(first.row(i).logits, again.row(i).logits);
    EXPECT_EQ(first.row(i).target, again.row(i).target);
    EXPECT_NE(first.row(i).classes, other.row(i).classes);
  }
}

TEST(RealRowsTest, MoreDimensionsHaveRoomForMoreCandidates) {
  EXPECT_LT(Rows(1, 64, 8192, 1).most_candidates(), Rows(1, 2048, 8192, 1).most_candidates());
}

TEST(RealRowsTest, RefusesWhatHasNoRoomForSuchRows) {
  for (const auto& [hidden, vocab] : {std::pair<int64_t, int64_t>{63, 1024}, {64, 1023}}) {
    const auto rows = RealRows::Create(10, hidden, vocab, 1);
    EXPECT_EQ(rows.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(rows.status().message(), HasSubstr(std::to_string(hidden == 63 ? hidden : vocab)));
  }
  EXPECT_TRUE(RealRows::Create(0, 64, 1024, 1).ok());
}

}  // namespace
}  // namespace lossd::data::real_rows_test

// ---- Softmax profile ----

namespace lossd::data::softmax_profile_test {
namespace {

using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::Ge;
using ::testing::Le;
using ::testing::SizeIs;

double SumOfExp(const std::vector<double>& log_p) {
  double sum = 0.0;
  for (double value : log_p) sum += std::exp(value);
  return sum;
}

double Entropy(const std::vector<double>& log_p) {
  double sum = 0.0;
  for (double value : log_p) sum -= std::exp(value) * value;
  return sum;
}

TEST(SoftmaxProfileTest, IsWhatWasMeasured) {
  const SoftmaxProfile& profile = RealProfile();
  EXPECT_THAT(profile.group_log_p, SizeIs(10));
  EXPECT_THAT(profile.group_log_p, Each(SizeIs(profile.ranks.size())));
  EXPECT_EQ(profile.ranks.front(), 1.0);
  EXPECT_EQ(profile.thresholds.front(), 0x1p-8);
  EXPECT_EQ(profile.thresholds.back(), 0x1p-20);
  EXPECT_EQ(profile.candidates.size(), profile.thresholds.size());
  EXPECT_EQ(profile.tail_mass.size(), profile.thresholds.size());
  EXPECT_EQ(profile.loss, 2.735);
}

TEST(SoftmaxProfileTest, RowsAreProbabilitiesThatFallWithTheRank) {
  for (double u : {0.0, 0.05, 0.123, 0.5, 0.95, 1.0}) {
    const std::vector<double> log_p = LogProbabilities(RealProfile(), u);
    EXPECT_NEAR(SumOfExp(log_p), 1.0, 1e-9) << u;
    EXPECT_THAT(log_p, Each(Le(0.0)));
    for (size_t i = 1; i < log_p.size(); ++i) ASSERT_LE(log_p[i], log_p[i - 1]) << u << " rank " << i + 1;
  }
}

// The measured mean entropies of the first, the fifth and the last group.
TEST(SoftmaxProfileTest, QuantilesAreOfTheEntropy) {
  EXPECT_NEAR(Entropy(LogProbabilities(RealProfile(), 0.05)), 0.109, 0.06);
  EXPECT_NEAR(Entropy(LogProbabilities(RealProfile(), 0.45)), 2.263, 0.15);
  EXPECT_NEAR(Entropy(LogProbabilities(RealProfile(), 0.95)), 5.35, 0.2);
}

TEST(SoftmaxProfileTest, PopularityOfAnyVocabularySumsToOneAndFalls) {
  for (int64_t vocab : {1024, 49152, 256000}) {
    const std::vector<double> popularity = Popularity(RealProfile(), vocab);
    ASSERT_EQ(popularity.size(), static_cast<size_t>(vocab));
    EXPECT_THAT(std::accumulate(popularity.begin(), popularity.end(), 0.0), DoubleNear(1.0, 1e-9));
    EXPECT_TRUE(std::is_sorted(popularity.rbegin(), popularity.rend()));
    EXPECT_THAT(popularity, Each(Ge(0.0)));
  }
  EXPECT_NEAR(Popularity(RealProfile(), 49152)[0], 0.044, 0.005);
}

}  // namespace
}  // namespace lossd::data::softmax_profile_test
