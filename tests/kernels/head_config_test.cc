// SPDX-License-Identifier: Apache-2.0
// Tests of head_config.h and validation.h: the configuration of a head, the options of a loss, the options of
// an optimizer, what a backend checks of its arguments, and the shares of a head.
#include "kernels/head_config.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "kernels/validation.h"

namespace lossd::kernels::head_config_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- Head config ----

HeadConfig Valid() {
  HeadConfig config;
  config.hidden_size = 4;
  config.vocab_size = 9;
  return config;
}

TEST(HeadConfigTest, RefusesValuesOutOfRangeByName) {
  EXPECT_TRUE(Validate(Valid()).ok());
  struct Case {
    void (*change)(HeadConfig&);
    const char* message;
  };
  const Case cases[] = {
      {[](HeadConfig& c) { c.hidden_size = 0; }, "hidden_size must be in [1, 16777216], got 0"},
      {[](HeadConfig& c) { c.hidden_size = int64_t{1} << 40; },
       "hidden_size must be in [1, 16777216], got 10"},
      {[](HeadConfig& c) { c.vocab_size = -3; }, "vocab_size must be in [1, 2147483647], got -3"},
      {[](HeadConfig& c) { c.vocab_size = int64_t{1} << 31; }, "got 2147483648"},
      {[](HeadConfig& c) { c.norm_epsilon = -1.0f; }, "norm_epsilon must be finite and >= 0, got -1"},
      {[](HeadConfig& c) { c.norm_epsilon = std::numeric_limits<float>::quiet_NaN(); }, "norm_epsilon"},
      {[](HeadConfig& c) { c.norm = static_cast<Norm>(9); },
       "norm must be none, layernorm or rmsnorm, got 9"},
      {[](HeadConfig& c) { c.compute_dtype = static_cast<DType>(7); }, "compute_dtype"},
      {[](HeadConfig& c) { c.optimizer_state = static_cast<OptimizerState>(5); }, "optimizer_state"},
      {[](HeadConfig& c) { c.residency = static_cast<Residency>(2); },
       "residency must be device or host, got 2"},
      {[](HeadConfig& c) { c.residency = Residency::kHost; },
       "residency must be device unless the head is frozen, got host"},
      {[](HeadConfig& c) { c.split = static_cast<Split>(3); },
       "split must be any, rows or vocabulary, got 3"},
      {[](HeadConfig& c) { c.logits = static_cast<Logits>(3); },
       "logits must be stored, recomputed or none, got 3"},
      {[](HeadConfig& c) { c.gradients = static_cast<Gradients>(4); },
       "gradients must be exact, filtered, sampled or auto, got 4"},
  };
  for (const Case& c : cases) {
    HeadConfig config = Valid();
    c.change(config);
    const absl::Status status = Validate(config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
    const auto [field, rule, value] = errors::GetFieldViolation(status).value_or(errors::FieldViolation());
    EXPECT_EQ(status.message(), absl::StrCat(field, " ", rule, ", got ", value));
  }
}

TEST(HeadConfigTest, AnEmbeddingAloneHasNothingOfALoss) {
  HeadConfig alone = Valid();
  alone.logits = Logits::kNone;
  EXPECT_TRUE(Validate(alone).ok());
  EXPECT_EQ(Name(alone.logits), "none");
  const std::pair<const char*, void (*)(HeadConfig&)> cases[] = {
      {"bias must be false without logits, got true", [](HeadConfig& c) { c.has_bias = true; }},
      {"class_weights must be false without logits, got true",
       [](HeadConfig& c) { c.has_class_weights = true; }},
      {"norm must be none without logits, got rmsnorm", [](HeadConfig& c) { c.norm = Norm::kRmsNorm; }},
      {"class_list must be empty without logits, got 9 entries",
       [](HeadConfig& c) {
         c.class_list = ClassList({1, 2, 3, 4, 5, 6, 7, 8, 9}, 20);
       }},
      {"residency must be device without logits, got host", [](HeadConfig& c) {
         c.trainable = false;
         c.residency = Residency::kHost;
       }}};
  for (const auto& [message, change] : cases) {
    HeadConfig config = alone;
    change(config);
    const absl::Status status = Validate(config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), message);
    config.logits = Logits::kStored;
    EXPECT_TRUE(Validate(config).ok()) << message;
  }
}

TEST(HeadConfigTest, TensorsFollowTheConfig) {
  HeadConfig config = Valid();
  EXPECT_TRUE(HasTensor(config, {Param::kWeight, Role::kMoment2}));
  EXPECT_FALSE(HasTensor(config, {Param::kBias, Role::kValue}));
  EXPECT_FALSE(HasTensor(config, {Param::kNormGain, Role::kValue}));
  config.norm = Norm::kRmsNorm;
  EXPECT_TRUE(HasTensor(config, {Param::kNormGain, Role::kGradient}));
  EXPECT_FALSE(HasTensor(config, {Param::kNormShift, Role::kValue}));
  config.norm = Norm::kLayerNorm;
  EXPECT_TRUE(HasTensor(config, {Param::kNormShift, Role::kMoment1}));
  config.has_class_weights = true;
  EXPECT_TRUE(HasTensor(config, {Param::kClassWeights, Role::kValue}));
  EXPECT_FALSE(HasTensor(config, {Param::kClassWeights, Role::kGradient}));
  config.optimizer_state = OptimizerState::kMomentum;
  EXPECT_TRUE(HasTensor(config, {Param::kWeight, Role::kMoment1}));
  EXPECT_FALSE(HasTensor(config, {Param::kWeight, Role::kMoment2}));
  config.trainable = false;
  EXPECT_TRUE(HasTensor(config, {Param::kWeight, Role::kValue}));
  EXPECT_FALSE(HasTensor(config, {Param::kWeight, Role::kGradient}));
  EXPECT_FALSE(HasTensor(config, {Param::kWeight, Role::kMoment1}));
}

TEST(HeadConfigTest, Shapes) {
  const HeadConfig config = Valid();
  EXPECT_EQ(ShapeOf(config, Param::kWeight).elements(), 36);
  EXPECT_EQ(ShapeOf(config, Param::kBias).rows, 9);
  EXPECT_EQ(ShapeOf(config, Param::kBias).cols, 1);
  EXPECT_EQ(ShapeOf(config, Param::kNormGain).rows, 4);
}

// ---- Loss options ----

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

void ExpectRefused(const LossOptions& options, const char* message) {
  const absl::Status status = Validate(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  const auto [field, rule, value] = errors::GetFieldViolation(status).value_or(errors::FieldViolation());
  EXPECT_EQ(status.message(), absl::StrCat(field, " ", rule, ", got ", value));
}

TEST(LossOptionsTest, AcceptsTheEndsOfEachRange) {
  EXPECT_TRUE(Validate(LossOptions{}).ok());
  EXPECT_TRUE(Validate(LossOptions{.logit_scale = -0.5f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.label_smoothing = 1.0f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.filter_epsilon = 0.0f, .max_gradient_error = 0.0f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.filter_epsilon = 0.999f, .max_gradient_error = 1e30f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.sample_threshold = 1e-30f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.sample_threshold = 1.0f}).ok());
}

TEST(LossOptionsTest, RefusesValuesOutOfRangeByName) {
  ExpectRefused({.label_smoothing = 1.5f}, "label_smoothing must be in [0, 1], got 1.5");
  ExpectRefused({.label_smoothing = -0.1f}, "label_smoothing must be in [0, 1], got -0.1");
  ExpectRefused({.logit_scale = 0.0f}, "logit_scale must be finite and not 0, got 0");
  ExpectRefused({.softcap = -30.0f}, "softcap must be 0 (none), or finite and >= 1.1754944e-38, got -30");
  ExpectRefused({.softcap = 1e-39f}, "softcap must be 0 (none), or finite and >= 1.1754944e-38, got 1e-39");
  ExpectRefused({.softcap = std::numeric_limits<float>::denorm_min()}, "softcap");
  EXPECT_TRUE(Validate(LossOptions{.softcap = std::numeric_limits<float>::min()}).ok());
  ExpectRefused({.z_loss = -1.0f}, "z_loss must be finite and >= 0, got -1");
  ExpectRefused({.rest = static_cast<Rest>(4)}, "rest must be none, renormalized or one_class, got 4");
  ExpectRefused({.label_smoothing = 0.1f, .rest = Rest::kNone},
                "label_smoothing must be 0 with soft targets, got 0.1");
  ExpectRefused({.use_class_weights = true, .rest = Rest::kOneClass},
                "use_class_weights must be false with soft targets, got true");
  ExpectRefused({.objective = {.kind = ObjectiveKind::kDft}, .rest = Rest::kNone},
                "objective must be absent with soft targets, got dft");
  ExpectRefused({.distillation = {.divergence = Divergence::kReverseKl}, .rest = Rest::kNone},
                "distillation must be absent with soft targets, got reverse_kl");
  ExpectRefused({.label_smoothing = 0.1f, .objective = {.kind = ObjectiveKind::kDft}},
                "label_smoothing must be 0 with an objective, got 0.1");
  ExpectRefused({.use_class_weights = true, .objective = {.kind = ObjectiveKind::kDft}},
                "use_class_weights must be false with an objective, got true");
  ExpectRefused({.objective = {.kl_coef = 0.1f}}, "objective.kl_coef must be 0 with cross_entropy, got 0.1");
  ExpectRefused({.objective = {.kind = ObjectiveKind::kDft, .clip_low = 0.1f}},
                "objective.clip_low must be 0 with dft, got 0.1");
  ExpectRefused({.objective = {.kind = static_cast<ObjectiveKind>(99)}},
                "objective.kind must be an objective of this version, got 99");
  ExpectRefused({.filter_epsilon = 1.0f}, "filter_epsilon must be in [0, 1), got 1");
  ExpectRefused({.filter_epsilon = -0.1f}, "filter_epsilon must be in [0, 1), got -0.1");
  ExpectRefused({.sample_threshold = 1.5f}, "sample_threshold must be in [1e-30, 1], got 1.5");
  ExpectRefused({.sample_threshold = 0.0f}, "sample_threshold must be in [1e-30, 1], got 0");
  ExpectRefused({.sample_threshold = 9e-31f}, "sample_threshold");
  ExpectRefused({.max_gradient_error = -0.5f}, "max_gradient_error must be finite and >= 0, got -0.5");
  constexpr Divergence kForward = Divergence::kForwardKl;
  ExpectRefused({.distillation = {.divergence = static_cast<Divergence>(9)}}, "distillation.divergence");
  ExpectRefused({.distillation = {.divergence = kForward, .beta = 0.0f}},
                "distillation.beta must be in (0, 1), got 0");
  ExpectRefused({.distillation = {.divergence = kForward, .temperature = -1.0f}},
                "distillation.temperature must be finite and >= 1.1754944e-38, got -1");
  ExpectRefused({.distillation = {.divergence = kForward, .weight = -2.0f}},
                "distillation.weight must be finite and >= 0, got -2");
  ExpectRefused({.distillation = {.divergence = kForward, .target_weight = -3.0f}},
                "distillation.target_weight must be finite and >= 0, got -3");
  ExpectRefused({.distillation = {.divergence = kForward, .teacher_logit_scale = 0.0f}},
                "distillation.teacher_logit_scale must be finite and not 0, got 0");
  ExpectRefused({.distillation = {.divergence = kForward, .teacher_softcap = -4.0f}},
                "distillation.teacher_softcap must be 0 (none), or finite and >= 1.1754944e-38, got -4");
  ExpectRefused({.gradients = Gradients::kFiltered, .distillation = {.divergence = kForward}},
                "gradients must be exact, sampled or auto with distillation, got filtered");
  EXPECT_TRUE(Validate(LossOptions{.distillation = {.beta = 7.0f}}).ok()) << "without a divergence";
}

TEST(LossOptionsTest, RefusesValuesThatAreNotFinite) {
  for (float bad : {kNan, kInf, -kInf}) {
    ExpectRefused({.logit_scale = bad}, "logit_scale");
    ExpectRefused({.softcap = bad}, "softcap");
    ExpectRefused({.label_smoothing = bad}, "label_smoothing");
    ExpectRefused({.z_loss = bad}, "z_loss");
    ExpectRefused({.filter_epsilon = bad}, "filter_epsilon");
    ExpectRefused({.sample_threshold = bad}, "sample_threshold");
    ExpectRefused({.max_gradient_error = bad}, "max_gradient_error");
    constexpr Divergence kReverse = Divergence::kReverseKl;
    ExpectRefused({.distillation = {.divergence = kReverse, .beta = bad}}, "distillation.beta");
    ExpectRefused({.distillation = {.divergence = kReverse, .temperature = bad}}, "distillation.temperature");
    ExpectRefused({.distillation = {.divergence = kReverse, .weight = bad}}, "distillation.weight");
    ExpectRefused({.distillation = {.divergence = kReverse, .target_weight = bad}}, "target_weight");
  }
}

TEST(LossOptionsTest, SaysWhatCannotBeFiltered) {
  const LossOptions filtered{.gradients = Gradients::kFiltered};
  EXPECT_THAT(WhyExact({}, false), HasSubstr("exact"));
  EXPECT_EQ(WhyExact(filtered, false), "");
  EXPECT_EQ(WhyExact({.softcap = 30.0f, .z_loss = 1.0f, .gradients = Gradients::kFiltered}, false), "");
  EXPECT_EQ(WhyExact({.label_smoothing = 0.1f, .gradients = Gradients::kFiltered}, false), "");
  EXPECT_THAT(WhyExact(filtered, true), HasSubstr("entropy"));
  const LossOptions capped{.softcap = 30.0f, .label_smoothing = 0.1f, .gradients = Gradients::kFiltered};
  EXPECT_THAT(WhyExact(capped, false), HasSubstr("smoothing"));
  EXPECT_EQ(WhyExact({.gradients = Gradients::kFiltered, .rest = Rest::kNone}, false), "");
  EXPECT_THAT(WhyExact({.gradients = Gradients::kFiltered, .rest = Rest::kOneClass}, false),
              HasSubstr("rest of a row's targets"));
}

TEST(LossOptionsTest, SlopesGrowWithClassWeightsAndTheZLoss) {
  EXPECT_EQ(LargestSlope({}, 1.0), 1.0);
  EXPECT_EQ(LargestSlope({}, 0.25), 1.0);
  EXPECT_EQ(LargestSlope({}, 8.0), 8.0);
  EXPECT_EQ(LargestSlope({.z_loss = 0.5f}, 8.0), 108.0);
  EXPECT_EQ(LargestSlope({.distillation = {.divergence = Divergence::kForwardKl,
                                           .temperature = 0.5f,
                                           .weight = 3.0f,
                                           .target_weight = 0.25f}},
                         8.0),
            8.0);
  EXPECT_EQ(LargestSlope({.distillation = {.divergence = Divergence::kReverseKl, .temperature = 0.5f}}, 1.0),
            400.0);
}

TEST(LossOptionsTest, EverythingCanBeSampled) {
  for (const Gradients gradients : {Gradients::kSampled, Gradients::kAuto}) {
    EXPECT_EQ(WhyExact({.gradients = gradients}, true), "");
    EXPECT_EQ(WhyExact({.softcap = 30.0f, .label_smoothing = 0.1f, .gradients = gradients}, true), "");
  }
}

// ---- Optimizer options ----

using Kind = OptimizerOptions::Kind;

constexpr double kDoubleNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kDoubleInf = std::numeric_limits<double>::infinity();

void ExpectOptimizerRefused(const OptimizerOptions& options, const char* message) {
  const absl::Status status = Validate(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  const auto [field, rule, value] = errors::GetFieldViolation(status).value_or(errors::FieldViolation());
  EXPECT_EQ(status.message(), absl::StrCat(field, " ", rule, ", got ", value));
}

TEST(OptimizerOptionsTest, RefusesValuesOutOfRangeByName) {
  EXPECT_TRUE(Validate(OptimizerOptions{}).ok());
  ExpectOptimizerRefused({.learning_rate = -1.0}, "learning_rate must be finite and >= 0, got -1");
  ExpectOptimizerRefused({.weight_decay = -0.5}, "weight_decay must be finite and >= 0, got -0.5");
  ExpectOptimizerRefused({.beta1 = 1.0}, "beta1 must be in [0, 1), got 1");
  ExpectOptimizerRefused({.beta2 = -0.1}, "beta2 must be in [0, 1), got -0.1");
  ExpectOptimizerRefused({.epsilon = -1e-8}, "epsilon must be finite and >= 0, got -1e-08");
  ExpectOptimizerRefused({.kind = Kind::kSgd, .momentum = -0.9},
                         "momentum must be finite and >= 0, got -0.9");
  ExpectOptimizerRefused({.kind = Kind::kSgd, .nesterov = true}, "momentum must be > 0 with nesterov, got 0");
  ExpectOptimizerRefused({.kind = Kind::kSgd, .momentum = 0.9, .dampening = 0.1, .nesterov = true},
                         "dampening must be 0 with nesterov, got 0.1");
  ExpectOptimizerRefused({.kind = static_cast<Kind>(5)}, "kind");
}

TEST(OptimizerOptionsTest, RefusesValuesThatAreNotFinite) {
  for (double bad : {kDoubleNan, kDoubleInf}) {
    ExpectOptimizerRefused({.learning_rate = bad}, "learning_rate");
    ExpectOptimizerRefused({.weight_decay = bad}, "weight_decay");
    ExpectOptimizerRefused({.grad_multiplier = bad}, "grad_multiplier");
    ExpectOptimizerRefused({.beta1 = bad}, "beta1");
    ExpectOptimizerRefused({.beta2 = bad}, "beta2");
    ExpectOptimizerRefused({.epsilon = bad}, "epsilon");
    ExpectOptimizerRefused({.kind = Kind::kSgd, .momentum = bad}, "momentum");
    ExpectOptimizerRefused({.kind = Kind::kSgd, .dampening = bad}, "dampening");
  }
}

TEST(OptimizerOptionsTest, RequiredState) {
  EXPECT_EQ(RequiredState({.kind = Kind::kAdamW}), OptimizerState::kAdam);
  EXPECT_EQ(RequiredState({.kind = Kind::kSgd}), OptimizerState::kNone);
  EXPECT_EQ(RequiredState({.kind = Kind::kSgd, .momentum = 0.9}), OptimizerState::kMomentum);
}

// ---- Validation ----

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
  config_ = Config();
  config_.logits = Logits::kNone;
  ExpectRefused([](Chunk&) {}, "embedding", "none");
}

TEST(TeachersTest, AreFrozenHeadsWithLogits) {
  const HeadConfig student = Valid();
  HeadConfig teacher = student;
  ExpectViolation(ValidateTeacher(student, teacher, "t"), "t", "a trainable one");
  teacher.trainable = false;
  EXPECT_TRUE(ValidateTeacher(student, teacher, "t").ok());
  teacher.logits = Logits::kNone;
  ExpectViolation(ValidateTeacher(student, teacher, "t"), "t", "an embedding alone");
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

// ---- Shares ----
// How shares divide the classes of a head among devices.

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
}  // namespace lossd::kernels::head_config_test
