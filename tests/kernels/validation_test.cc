// SPDX-License-Identifier: Apache-2.0
#include "kernels/validation.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/errors/field_error.h"

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
