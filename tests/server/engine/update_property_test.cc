// SPDX-License-Identifier: Apache-2.0
// Random steps with extreme options that are valid, on an engine with the CPU backend: a step that says OK
// leaves numbers, one that is refused leaves every bit, and one that fails says so until other weights come.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "server/head/manifest.h"
#include "tests/server/engine/silent_observer.h"

namespace lossd::engine::update_property_test {
namespace {

using kernels::OptimizerOptions;
using kernels::Param;
using kernels::Role;
using ::testing::HasSubstr;
using Kind = OptimizerOptions::Kind;
using Tensors = std::map<std::string, std::vector<float>>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();
constexpr char kHead[] = "head";

// Random numbers of a seed that changes with each run, unless LOSSD_TEST_SEED says it.
uint64_t Seed() {
  const char* fixed = std::getenv("LOSSD_TEST_SEED");
  return fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : rng_(seed) {}
  bool Chance(double p) { return std::uniform_real_distribution<double>(0, 1)(rng_) < p; }
  double Uniform(double a, double b) { return std::uniform_real_distribution<double>(a, b)(rng_); }
  double Power(double a, double b) { return std::pow(10.0, Uniform(a, b)); }
  double One(std::initializer_list<double> list) { return list.begin()[rng_() % list.size()]; }
  // Mostly what is used, else the ends of what a double has.
  double Rate() { return Chance(0.6) ? Power(-5, 0) : Chance(0.2) ? 0.0 : Power(-320, 39); }
  double Share() {
    return Chance(0.5)   ? One({0.9, 0.95, 0.99, 0.999})
           : Chance(0.5) ? Uniform(0, 1) * 0.999999
                         : One({0.0, 1e-300, 1e-30, 0.5, 1 - 1e-9, std::nextafter(1.0, 0.0)});
  }
  OptimizerOptions Options(bool calm) {
    OptimizerOptions o;
    o.kind = Chance(0.5) ? Kind::kAdamW : Kind::kSgd;
    o.learning_rate = calm ? Power(-4, 0) : Rate();
    o.weight_decay = Chance(0.4)   ? 0.0
                     : Chance(0.5) ? 0.1
                                   : 1.0 / std::max(1e-30, o.learning_rate) * One({0.5, 1, 2, 2.1, 1e3});
    o.decay_vectors = Chance(0.4);
    o.grad_multiplier = Chance(0.6) ? 1.0 : (Chance(0.5) ? 1 : -1) * Power(-60, 38);
    if (o.kind == Kind::kAdamW) {
      o.beta1 = Share();
      o.beta2 = Share();
      o.epsilon = Chance(0.6) ? 1e-8 : One({0.0, 1e-15, 1e-38, 1e-40, 1e-60, 1.0, 1e30});
      return o;
    }
    o.momentum = Chance(0.4) ? 0.0 : Chance(0.5) ? 0.9 : One({1e-60, 1.0, 1.5, 1e10, 1e30});
    o.nesterov = o.momentum > 0 && Chance(0.4);
    o.dampening = o.nesterov ? 0.0 : One({0.0, 0.0, 0.9, 1.0, -3.0, 1e30});
    return o;
  }
  // Of a tensor: of one order of magnitude, or of many.
  std::vector<float> Values(size_t n, double low, double high) {
    std::vector<float> values(n);
    const bool mixed = Chance(0.3);
    const double order = Uniform(low, high);
    for (float& value : values) {
      const double magnitude = std::pow(10.0, mixed ? Uniform(low, high) : order) * Uniform(0.1, 1.0);
      value = static_cast<float>(std::min<double>(kMost, magnitude) * (Chance(0.5) ? 1 : -1));
      if (Chance(0.1)) value = 0.0f;
    }
    return values;
  }
  std::vector<float> Gradients(size_t n) {
    if (Chance(0.5)) return Values(n, -6, 2);
    if (Chance(0.3)) return Values(n, -45, -36);  // subnormal, too
    return Chance(0.3) ? Values(n, 36, 38.5) : Values(n, -30, 36);
  }

 private:
  std::mt19937_64 rng_;
};

std::string Describe(const OptimizerOptions& o) {
  return absl::StrCat(o.kind == Kind::kAdamW ? "adamw" : "sgd", " lr=", o.learning_rate,
                      " wd=", o.weight_decay, " decay_vectors=", o.decay_vectors,
                      " multiplier=", o.grad_multiplier, " beta1=", o.beta1, " beta2=", o.beta2,
                      " epsilon=", o.epsilon, " momentum=", o.momentum, " dampening=", o.dampening,
                      " nesterov=", o.nesterov);
}

class Listener final : public SilentObserver {
 public:
  void OnStep(const StepReport& report) override { values += report.made_not_finite; }
  int64_t values = 0;
};

class UpdatePropertyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto backend = kernels::CreateCpuBackend({.threads = 1, .workspace_bytes = 1 << 20});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    auto engine = Engine::Create({.slice_bytes = 8192, .staging_bytes = 16384, .retained_bytes = 1 << 16},
                                 backend_.get(), 42, {&listener_});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    ASSERT_TRUE(engine_->CreateHead(kHead, config_).ok());
    ASSERT_TRUE(engine_->PublishHead(kHead).ok());
    Load(Calm());
  }
  std::vector<kernels::TensorId> Ids() const { return head::CheckpointTensors(config_); }
  size_t SizeOf(kernels::TensorId id) const {
    return static_cast<size_t>(kernels::ShapeOf(config_, id.param).elements());
  }
  // Weights as of a network, a masked class, moments of 0.
  Tensors Calm() {
    Tensors tensors;
    for (const kernels::TensorId id : Ids()) {
      auto& values = tensors[head::TensorName(id)];
      values = id.role == Role::kValue ? draw_.Values(SizeOf(id), -2, 0) : std::vector<float>(SizeOf(id));
      if (masked_ && id == kernels::TensorId{Param::kBias, Role::kValue}) values[2] = -kInf;
    }
    return tensors;
  }
  // As a checkpoint may hold them: every value is a number, moments 2 are not negative.
  Tensors Wild() {
    Tensors tensors = Calm();
    for (const kernels::TensorId id : Ids()) {
      if (draw_.Chance(0.5)) continue;
      auto& values = tensors[head::TensorName(id)];
      values = draw_.Values(values.size(), draw_.Chance(0.5) ? -40 : 30, 38.53);
      if (id.role != Role::kMoment2) continue;
      for (float& value : values) value = std::fabs(value);
    }
    return tensors;
  }
  absl::Status Write(kernels::TensorId id, const std::vector<float>& values) {
    return engine_->OnDevice(kHead, [&](head::Head& head) {
      return head.WriteRows(id, 0, kernels::ShapeOf(config_, id.param).rows, kernels::DType::kFloat32,
                            {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)});
    });
  }
  void Load(const Tensors& tensors) {
    ASSERT_TRUE(engine_->BeginLoad(kHead, {.step = step_, .updates = updates_}, std::nullopt).ok());
    for (const kernels::TensorId id : Ids()) ASSERT_TRUE(Write(id, tensors.at(head::TensorName(id))).ok());
    ASSERT_TRUE(engine_->EndLoad(kHead).ok());
  }
  Tensors Read(bool gradients) {
    Tensors tensors;
    std::vector<kernels::TensorId> ids = Ids();
    for (const kernels::TensorId id : Ids()) {
      if (gradients && id.role == Role::kValue) ids.push_back({id.param, Role::kGradient});
    }
    for (const kernels::TensorId id : ids) {
      std::vector<float> values(SizeOf(id));
      EXPECT_TRUE(engine_
                      ->OnDevice(kHead,
                                 [&](head::Head& head) {
                                   return head.ReadRows(id, 0, kernels::ShapeOf(config_, id.param).rows,
                                                        kernels::DType::kFloat32,
                                                        {reinterpret_cast<uint8_t*>(values.data()),
                                                         values.size() * sizeof(float)});
                                 })
                      .ok());
      tensors[head::TensorName(id)] = std::move(values);
    }
    return tensors;
  }
  static bool SameBits(const Tensors& a, const Tensors& b) {
    for (const auto& [name, values] : a) {
      if (std::memcmp(values.data(), b.at(name).data(), values.size() * sizeof(float)) != 0) return false;
    }
    return a.size() == b.size();
  }
  // What is no number any more, or is another infinity.
  static std::string Broken(const Tensors& before, const Tensors& after) {
    for (const auto& [name, values] : after) {
      for (size_t i = 0; i < values.size(); ++i) {
        const float was = before.at(name)[i];
        if (!std::isfinite(values[i]) && !(values[i] == was))
          return absl::StrCat(name, "[", i, "] was ", was, ", is ", values[i]);
      }
    }
    return "";
  }
  void SetGradients() {
    for (const kernels::TensorId id : Ids()) {
      if (id.role != Role::kValue) continue;
      std::vector<float> values = draw_.Gradients(SizeOf(id));
      if (masked_ && id.param == Param::kBias) values[2] = 0.0f;  // as it is
      ASSERT_TRUE(Write({id.param, Role::kGradient}, values).ok());
    }
  }
  // One step; false if it broke what this file is about.
  void Step(const OptimizerOptions& options) {
    SetGradients();
    const Tensors before = Read(true);
    const int64_t told = listener_.values;
    StepRequest request{.step = step_, .optimizer = options};
    request.begin_optimizer = draw_.Chance(0.1);
    const auto result = engine_->ApplyStep(kHead, request);
    const absl::Status usable = engine_->Describe(kHead)->tensors_status;
    SCOPED_TRACE(absl::StrCat("seed ", seed_, ", update ", updates_ + 1, ", ", Describe(options), ": ",
                              result.status().ToString()));
    if (result.ok()) {
      ++counts_["applied"];
      EXPECT_EQ(Broken(before, Read(false)), "");
      step_ = result->state.step;
      updates_ = request.begin_optimizer ? 1 : updates_ + 1;
      EXPECT_TRUE(usable.ok()) << usable;
      EXPECT_EQ(listener_.values, told);
    } else if (absl::IsInvalidArgument(result.status())) {
      ++counts_["refused"];
      EXPECT_TRUE(SameBits(before, Read(true)));
      EXPECT_TRUE(usable.ok()) << usable;
      EXPECT_THAT(std::string(result.status().message()), HasSubstr("optimizer."));
      EXPECT_EQ(listener_.values, told);
    } else {
      ++counts_["diverged"];
      EXPECT_TRUE(absl::IsFailedPrecondition(result.status()));
      EXPECT_THAT(std::string(result.status().message()), HasSubstr("not finite any more"));
      EXPECT_EQ(usable, result.status()) << "the head says it to whoever asks";
      EXPECT_GT(listener_.values, told);
      EXPECT_NE(Broken(before, Read(false)), "");
      Load(Calm());
    }
  }

  const uint64_t seed_ = Seed();
  Draw draw_{seed_};
  bool masked_ = false;
  kernels::HeadConfig config_{.hidden_size = 6,
                              .vocab_size = 5,
                              .has_bias = true,
                              .norm = kernels::Norm::kLayerNorm,
                              .optimizer_state = kernels::OptimizerState::kAdam};
  uint64_t step_ = 0, updates_ = 0;
  Listener listener_;
  std::map<std::string, int> counts_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(UpdatePropertyTest, AStepThatSaysOkLeavesNumbers) {
  for (int i = 0; i < 4000 && !HasFailure(); ++i) {
    if (draw_.Chance(0.02)) {
      masked_ = draw_.Chance(0.5);
      Load(draw_.Chance(0.5) ? Wild() : Calm());
    }
    Step(draw_.Options(draw_.Chance(0.3)));
  }
  for (const auto& [what, count] : counts_) RecordProperty(what, count);
  for (const char* what : {"applied", "refused", "diverged"})
    EXPECT_GT(counts_[what], 20) << what << ", seed " << seed_;
}

}  // namespace
}  // namespace lossd::engine::update_property_test
