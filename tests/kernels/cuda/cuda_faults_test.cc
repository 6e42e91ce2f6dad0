// SPDX-License-Identifier: Apache-2.0
// Every call of CUDA and cuBLASLt that the backend makes fails once, alone and with all calls after it.
// Whatever fails: the backend neither crashes nor hangs, an error is reported with the name of a call or the
// results are right, and what was not reported as accumulated is not in the gradients.
#include "tests/kernels/cuda/cuda_faults.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::cuda_faults_test {
namespace {

using ::testing::HasSubstr;

enum class Stage { kBackend, kStaging, kHead, kWrite, kChunk, kNorm, kAdd, kStep, kRead, kDone };

struct Outcome {
  Stage stage = Stage::kBackend;  // the first that failed
  absl::Status status;            // what it said
  std::string victim;             // the function that was made to fail; empty if there was none
  std::vector<float> gradient;    // of the weight, after the chunk; empty if it could not be read
  std::vector<float> weight;      // after the step
};

absl::StatusOr<std::vector<float>> Read(HeadKernels& head, TensorId id) {
  const TensorShape shape = ShapeOf(head.config(), id.param);
  std::vector<float> values(static_cast<size_t>(shape.elements()));
  const auto bytes = absl::MakeSpan(reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float));
  if (absl::Status status = head.ReadTensor(id, 0, shape.rows, DType::kFloat32, bytes); !status.ok())
    return status;
  return values;
}

absl::Status Write(HeadKernels& head, Param param, const std::vector<float>& values) {
  if (values.empty()) return absl::OkStatus();
  return head.WriteTensor({param, Role::kValue}, 0, ShapeOf(head.config(), param).rows, DType::kFloat32,
                          {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)});
}

// One scenario from the creation of the backend to its end; stops at the first error.
class Scenario {
 public:
  Scenario(const CudaBackendOptions& options, const Problem& problem)
      : options_(options), problem_(problem) {}

  Outcome Run() {
    Outcome outcome;
    outcome.status = RunStages(outcome);
    if (outcome.victim.empty()) outcome.victim = CudaVictim();
    return outcome;
  }

 private:
  absl::Status RunStages(Outcome& outcome) {
    auto backend = CreateCudaBackend(options_);
    if (!backend.ok()) return backend.status();
    outcome.stage = Stage::kStaging;
    auto staging = (*backend)->AllocateStaging(1 << 16);
    if (!staging.ok()) return staging.status();
    auto retained = (*backend)->AllocateRetained(1 << 16);
    if (!retained.ok()) return retained.status();
    outcome.stage = Stage::kHead;
    auto head = (*backend)->CreateHead(problem_.config);
    if (!head.ok()) {
      // Nothing of the head is held: the same head can be made if the device still works.
      outcome.victim = CudaVictim();
      SetCudaFault({});
      const auto again = (*backend)->CreateHead(problem_.config);
      EXPECT_TRUE(again.ok() || absl::IsUnavailable(again.status())) << again.status();
      return head.status();
    }
    return RunHead(**head, outcome);
  }

  absl::Status RunHead(HeadKernels& head, Outcome& outcome) {
    outcome.stage = Stage::kWrite;
    for (const Param param : kAllParams) {
      if (!HasTensor(problem_.config, {param, Role::kValue})) continue;
      if (absl::Status status = Write(head, param, problem_.Values(param)); !status.ok()) return status;
    }
    outcome.stage = Stage::kChunk;
    const ChunkRun run = RunChunk(head, problem_);
    if (!run.results.ok()) {
      // Nothing may have been accumulated, as far as the device can still be asked.
      const auto gradient = Read(head, {Param::kWeight, Role::kGradient});
      if (gradient.ok()) {
        EXPECT_TRUE(std::all_of(gradient->begin(), gradient->end(), [](float x) { return x == 0.0f; }))
            << "after " << run.results;
      }
      EXPECT_FALSE(run.done.ok());
      return run.results;
    }
    if (!run.done.ok()) return run.done;
    outcome.stage = Stage::kNorm;
    if (auto norm = head.GradNorm(); !norm.ok()) return norm.status();
    auto gradient = Read(head, {Param::kWeight, Role::kGradient});
    if (!gradient.ok()) return gradient.status();
    outcome.gradient = *gradient;
    outcome.stage = Stage::kAdd;
    const absl::Span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(gradient->data()),
                                          gradient->size() * sizeof(float));
    absl::Status status = head.AddGradient(Param::kWeight, 0, ShapeOf(problem_.config, Param::kWeight).rows,
                                           DType::kFloat32, 0.5f, bytes);
    if (!status.ok()) return status;
    outcome.stage = Stage::kStep;
    if (status = head.ApplyStep({}, 1); !status.ok()) return status;
    if (status = head.ZeroGradients(); !status.ok()) return status;
    outcome.stage = Stage::kRead;
    auto weight = Read(head, {Param::kWeight, Role::kValue});
    if (!weight.ok()) return weight.status();
    outcome.weight = *std::move(weight);
    outcome.stage = Stage::kDone;
    return absl::OkStatus();
  }

  const CudaBackendOptions options_;
  const Problem& problem_;
};

// |a - b| in the largest element, relative to the largest of b. A call whose failure only changes how
// something is computed may change last bits.
double Difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0.0;
  double largest = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = std::max(difference, std::abs(double{a[i]} - double{b[i]}));
    largest = std::max(largest, std::abs(double{b[i]}));
  }
  return difference / largest;
}

struct Case {
  std::string name;
  CudaBackendOptions options;
  Logits logits = Logits::kStored;
  Gradients gradients = Gradients::kExact;
};

class CudaFaultsTest : public ::testing::TestWithParam<Case> {
 protected:
  ~CudaFaultsTest() override { SetCudaFault({}); }

  Problem MakeTheProblem() {
    ProblemSpec spec;
    spec.config = {.hidden_size = 64,
                   .vocab_size = 1000,
                   .has_bias = true,
                   .norm = Norm::kRmsNorm,
                   .norm_epsilon = 1e-5f,
                   .compute_dtype = DType::kBFloat16,
                   .logits = GetParam().logits,
                   .workspace_bytes = int64_t{16} << 20};
    spec.options.gradients = GetParam().gradients;
    spec.hidden_dtype = DType::kBFloat16;
    spec.slice_rows = {40, 24};
    return MakeProblem(spec, rng_);
  }

  void TryAll(bool all_after) {
    const Problem problem = MakeTheProblem();
    SetCudaFault({});
    const Outcome right = Scenario(GetParam().options, problem).Run();
    ASSERT_EQ(right.stage, Stage::kDone) << right.status;
    const int64_t calls = CudaCalls();
    ASSERT_GT(calls, 50) << "the calls are not counted";
    std::map<std::string, int> victims;
    int failed = 0;
    for (int64_t at = 1; !HasFailure(); ++at) {
      SetCudaFault({.at = at, .all_after = all_after});
      const Outcome outcome = Scenario(GetParam().options, problem).Run();
      const std::string& victim = outcome.victim;
      if (victim.empty()) break;
      SCOPED_TRACE(absl::StrCat("call ", at, ", ", victim, ", stage ", static_cast<int>(outcome.stage)));
      ++victims[victim];
      if (outcome.stage == Stage::kDone) {
        EXPECT_LE(Difference(outcome.gradient, right.gradient), 1e-2);
        EXPECT_LE(Difference(outcome.weight, right.weight), 1e-2);
        continue;
      }
      ++failed;
      EXPECT_TRUE(absl::IsUnavailable(outcome.status) || absl::IsResourceExhausted(outcome.status) ||
                  absl::IsInternal(outcome.status))
          << outcome.status;
      EXPECT_THAT(std::string(outcome.status.message()), HasSubstr("failed: "));
    }
    std::cout << calls << " calls of " << victims.size() << " functions, " << failed << " failures reported:";
    for (const auto& [name, count] : victims) std::cout << " " << count << " x " << name << ";";
    std::cout << std::endl;
    EXPECT_GT(failed, calls / 3);
  }

 private:
  Rng rng_ = FreshRng();
};

TEST_P(CudaFaultsTest, OneCallFails) {
  LOSSD_SKIP_WITHOUT_GPU();
  TryAll(/*all_after=*/false);
}

TEST_P(CudaFaultsTest, TheDeviceIsLost) {
  LOSSD_SKIP_WITHOUT_GPU();
  TryAll(/*all_after=*/true);
}

INSTANTIATE_TEST_SUITE_P(
    Ways, CudaFaultsTest,
    ::testing::ValuesIn(std::vector<Case>{
        {.name = "Stored"},
        {.name = "Fused", .options = {.fused_loss = FusedLoss::kWherePossible}},
        {.name = "Filtered", .gradients = Gradients::kFiltered},
        {.name = "Sampled", .gradients = Gradients::kSampled},
        {.name = "Auto", .gradients = Gradients::kAuto},
        {.name = "FilteredHostBranch", .options = {.host_branches = true}, .gradients = Gradients::kFiltered},
        {.name = "Recomputed", .logits = Logits::kRecomputed}}),
    [](const auto& way) { return way.param.name; });

// On a machine without a GPU: the calls are wrapped, and an injected failure is what the backend reports.
TEST(CudaFaults, TheFirstCallFails) {
  SetCudaFault({.at = 1, .error = cudaErrorUnknown});
  const auto backend = CreateCudaBackend({});
  EXPECT_EQ(CudaVictim(), "cudaGetDeviceCount");
  SetCudaFault({});
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(backend.status().message()),
              HasSubstr("cudaGetDeviceCount failed: cudaErrorUnknown"));
}

}  // namespace
}  // namespace lossd::kernels::testing::cuda_faults_test
