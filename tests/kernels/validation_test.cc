// SPDX-License-Identifier: Apache-2.0
// Tests of validation.h: what a backend checks of its arguments, and the shares of a head.
#include "kernels/validation.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"

// ---- Validation ----

namespace lossd::kernels::validation_test {
namespace {

constexpr int64_t kChunkRows = 4;

HeadConfig Config() {
  HeadConfig config;
  config.hidden_size = 2;
  config.vocab_size = 9;
  return config;
}

void ExpectViolation(const absl::Status& status, absl::string_view field, absl::string_view value) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  const auto violation = errors::GetFieldViolation(status);
  ASSERT_TRUE(violation.has_value()) << status;
  EXPECT_EQ(violation->field, field) << status;
  EXPECT_EQ(violation->value, value) << status;
}

class ValidationTest : public ::testing::Test {
 protected:
  ValidationTest() {
    chunk_.hidden_dtype = DType::kFloat32;
    for (Slice& slice : slices_) {
      slice.hidden = hidden_;
      slice.targets = targets_;
      slice.rows = 2;
    }
  }

  void ExpectRefused(const std::function<void(Chunk&)>& spoil, absl::string_view field,
                     absl::string_view value) {
    std::vector<Slice> slices = slices_;
    Chunk chunk = chunk_;
    chunk.slices = absl::MakeSpan(slices);
    spoil(chunk);
    ExpectViolation(ValidateChunk(config_, kChunkRows, chunk), field, value);
  }

  HeadConfig config_ = Config();
  float hidden_[4] = {};
  int32_t targets_[2] = {0, 8};
  std::vector<Slice> slices_ = std::vector<Slice>(2);
  Chunk chunk_;  // its slices are set for each check
};

TEST_F(ValidationTest, ChunksNameFieldAndValue) {
  chunk_.slices = absl::MakeSpan(slices_);
  EXPECT_TRUE(ValidateChunk(config_, kChunkRows, chunk_).ok());
  ExpectRefused([](Chunk& c) { c.options.softcap = -1.0f; }, "softcap", "-1");
  ExpectRefused([](Chunk& c) { c.options.use_class_weights = true; }, "use_class_weights", "true");
  ExpectRefused([](Chunk& c) { c.hidden_dtype = static_cast<DType>(9); }, "hidden_dtype", "9");
  ExpectRefused([](Chunk& c) { c.slices[1].rows = -1; }, "slices[1].rows", "-1");
  ExpectRefused([](Chunk& c) { c.slices[1].rows = 3; }, "slices[1].rows", "3");
  ExpectRefused([](Chunk& c) { c.slices[1].hidden = nullptr; }, "slices[1].hidden", "null");
  ExpectRefused([](Chunk& c) { c.slices[1].targets = nullptr; }, "slices[1].targets", "null");
  ExpectRefused([](Chunk& c) { c.slices[1].grad_scale = std::numeric_limits<float>::infinity(); },
                "slices[1].grad_scale", "inf");
  ExpectRefused([](Chunk& c) { c.slices[1].retained_offset = 8; }, "slices[1].retained_offset", "8");
  targets_[1] = 9;
  ExpectRefused([](Chunk&) {}, "slices[0].targets[1]", "9");
}

TEST_F(ValidationTest, ChunksOfHeadsThatCannotTakeThem) {
  config_.trainable = false;
  ExpectRefused([](Chunk& c) { c.accumulate_gradients = true; }, "accumulate_gradients", "true");
}

TEST_F(ValidationTest, EveryHeadTakesChunksOfAllGradients) {
  chunk_.slices = absl::MakeSpan(slices_);
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    config_.logits = logits;
    for (const Gradients gradients :
         {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
      chunk_.options.gradients = gradients;
      EXPECT_TRUE(ValidateChunk(config_, kChunkRows, chunk_).ok()) << Name(logits) << " " << Name(gradients);
    }
    ExpectRefused([](Chunk& c) { c.options.gradients = static_cast<Gradients>(4); }, "gradients", "4");
  }
}

TEST_F(ValidationTest, TensorAccessNamesFieldAndValue) {
  const TensorId weight{Param::kWeight, Role::kValue};
  EXPECT_TRUE(ValidateTensorAccess(config_, weight, 1, 2, DType::kFloat32, 16).ok());
  ExpectViolation(ValidateTensorAccess(config_, weight, 8, 2, DType::kFloat32, 16), "rows", "[8, 8 + 2)");
  ExpectViolation(ValidateTensorAccess(config_, weight, 0, 2, static_cast<DType>(9), 16), "dtype", "9");
  ExpectViolation(ValidateTensorAccess(config_, weight, 0, 2, DType::kFloat32, 15), "bytes", "15");
  ExpectViolation(ValidateStep(config_, {}, 0), "update", "0");
}

}  // namespace
}  // namespace lossd::kernels::validation_test

// ---- Shares ----
// How shares divide the classes of a head among devices.

namespace lossd::kernels::shares_test {
namespace {

using ::testing::ElementsAre;

HeadConfig ConfigOf(int64_t vocab_size, std::vector<int32_t> shares) {
  HeadConfig config;
  config.hidden_size = 8;
  config.vocab_size = vocab_size;
  config.split = Split::kVocabulary;
  config.shares = std::move(shares);
  return config;
}

std::vector<int64_t> ClassesOfAll(const HeadConfig& config) {
  std::vector<int64_t> classes;
  const auto devices = static_cast<int>(config.shares.size());
  for (int i = 0; i < devices; ++i) classes.push_back(ClassesOf(config, {i, devices}).rows);
  return classes;
}

TEST(SharesTest, DivideInProportion) {
  EXPECT_THAT(ClassesOfAll(ConfigOf(256 * 45, {13, 6, 13, 13})),
              ElementsAre(256 * 13, 256 * 6, 256 * 13, 256 * 13));
  EXPECT_THAT(ClassesOfAll(ConfigOf(128256, {1, 0, 1})), ElementsAre(64256, 0, 64000));
  EXPECT_THAT(ClassesOfAll(ConfigOf(1000, {0, 0, 3})), ElementsAre(0, 0, 1000));
  EXPECT_THAT(ClassesOfAll(ConfigOf(1000, {2, 0, 0})), ElementsAre(1000, 0, 0));
  EXPECT_THAT(ClassesOfAll(ConfigOf(7, {1, 1})), ElementsAre(4, 3));
}

TEST(SharesTest, EveryClassIsOfOneDevice) {
  std::mt19937_64 random(std::random_device{}());
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int i = 0; i < 2000; ++i) {
    std::vector<int32_t> shares(static_cast<size_t>(draw(1, 9)));
    for (int32_t& share : shares)
      share = static_cast<int32_t>(draw(0, 3) == 0 ? 0 : draw(0, i % 2 ? 9 : 200'000'000));
    shares[static_cast<size_t>(draw(0, static_cast<int64_t>(shares.size()) - 1))] += 1;
    const int64_t vocab = draw(1, i % 3 ? 5000 : (int64_t{1} << 31) - 1);
    const HeadConfig config = ConfigOf(vocab, shares);
    ASSERT_TRUE(Validate(config).ok());
    const double all = std::accumulate(shares.begin(), shares.end(), 0.0);
    int64_t next = 0;
    const auto devices = static_cast<int>(shares.size());
    for (int device = 0; device < devices; ++device) {
      const ShardRows own = ClassesOf(config, {device, devices});
      ASSERT_EQ(own.first, next);
      ASSERT_GE(own.rows, 0);
      const int32_t share = shares[static_cast<size_t>(device)];
      if (share == 0) {
        EXPECT_EQ(own.rows, 0);
      }
      EXPECT_NEAR(static_cast<double>(own.rows), static_cast<double>(vocab) * share / all, kShareGrain + 2);
      EXPECT_LE(own.rows, MostClassesOf(config, devices));
      next = own.end();
    }
    EXPECT_EQ(next, vocab);
  }
}

TEST(SharesTest, BeginWhereKernelsLikeIt) {
  const HeadConfig config = ConfigOf(128'256, {3, 1, 4, 1, 5});
  for (int device = 0; device < 5; ++device) EXPECT_EQ(ClassesOf(config, {device, 5}).first % kShareGrain, 0);
}

TEST(SharesTest, WithoutSharesAllHaveTheSame) {
  const HeadConfig config = ConfigOf(10, {});
  EXPECT_EQ(ClassesOf(config, {0, 4}).rows, 3);
  EXPECT_EQ(ClassesOf(config, {3, 4}).rows, 2);
  EXPECT_EQ(MostClassesOf(config, 4), 3);
}

// As a file of a checkpoint has all rows of a head, whatever replicas that has where it computes.
TEST(SharesTest, OneDeviceHasAllOfAHeadWithReplicas) {
  HeadConfig config = ConfigOf(97, {3, 1});
  config.replicas = 2;
  for (const Role role : {Role::kValue, Role::kMoment1}) {
    EXPECT_EQ(StoredRowsOf(config, {Param::kWeight, role}, {}), (ShardRows{0, 97}));
  }
  EXPECT_EQ(ClassesOf(config, {}), (ShardRows{0, 97}));
}

std::string FieldOf(const HeadConfig& config, int devices) {
  const auto violation = errors::GetFieldViolation(ValidateOn(config, devices));
  return violation ? violation->field : "";
}

TEST(SharesTest, RefusesWhatIsNoDivision) {
  EXPECT_EQ(FieldOf(ConfigOf(10, {1, 2}), 2), "");
  EXPECT_EQ(FieldOf(ConfigOf(10, {}), 3), "");
  EXPECT_EQ(FieldOf(ConfigOf(10, {1, 2}), 3), "shares");
  EXPECT_EQ(FieldOf(ConfigOf(10, {0, 0}), 2), "shares");
  EXPECT_EQ(FieldOf(ConfigOf(10, {1, -2}), 2), "shares[1]");
  EXPECT_EQ(FieldOf(ConfigOf(10, {2'000'000'000, 2'000'000'000}), 2), "shares");
  HeadConfig by_rows = ConfigOf(10, {1, 1});
  by_rows.split = Split::kRows;
  EXPECT_EQ(FieldOf(by_rows, 2), "split");
}

}  // namespace
}  // namespace lossd::kernels::shares_test
