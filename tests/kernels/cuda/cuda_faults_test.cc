// SPDX-License-Identifier: Apache-2.0
// Every call of CUDA and cuBLASLt that the backend makes fails once, alone and with all calls after it.
// Whatever fails: the backend neither crashes nor hangs, an error is reported with the name of a call or the
// results are right, and what was not reported as accumulated is not in the gradients.
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/cuda/found_symbols.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::cuda_faults_test {
namespace {

// ---- faults ----
//
// Every call of the CUDA runtime that kernels/cuda makes is wrapped: the linker sends it here (--wrap), and
// here it is counted and may fail. cuBLASLt is loaded at run time, so dlsym hands out wrapped functions of
// it. Calls that the libraries make of each other are not counted. Thread-safe.

struct CudaFault {
  int64_t at = 0;          // the first call that fails, counted from 1; 0: none does
  bool all_after = false;  // and all calls after it, as on a lost device
  cudaError_t error = cudaErrorLaunchFailure;
};

struct State {
  std::mutex mutex;
  CudaFault fault;
  int64_t calls = 0;
  std::string victim;
  bool sticky_error = false;  // what cudaGetLastError reports once
};

State& TheState() {
  static auto* const state = new State();
  return *state;
}

// True if this call has to fail.
bool Strikes(const char* name) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const int64_t call = ++state.calls;
  if (state.fault.at == 0 || call < state.fault.at || (call > state.fault.at && !state.fault.all_after))
    return false;
  if (call == state.fault.at) state.victim = name;
  state.sticky_error = true;
  return true;
}

cudaError_t Error() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().fault.error;
}

// A function of cuBLASLt that may fail. `kIndex` makes each a type of its own.
template <int kIndex, typename Function>
struct Thunk;
template <int kIndex, typename... Arguments>
struct Thunk<kIndex, cublasStatus_t (*)(Arguments...)> {
  static inline cublasStatus_t (*real)(Arguments...) = nullptr;
  static inline const char* name = nullptr;
  static cublasStatus_t Call(Arguments... arguments) {
    return Strikes(name) ? CUBLAS_STATUS_EXECUTION_FAILED : real(arguments...);
  }
};

template <int kIndex, typename Function>
bool Take(const char* name, const char* wanted, void** found) {
  if (absl::string_view(name) != wanted || *found == nullptr) return false;
  using Wrapped = Thunk<kIndex, Function>;
  Wrapped::real = reinterpret_cast<Function>(*found);
  Wrapped::name = name;
  *found = reinterpret_cast<void*>(&Wrapped::Call);
  return true;
}

// From now on; starts counting anew.
void SetCudaFault(const CudaFault& fault) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.fault = fault;
  state.calls = 0;
  state.victim.clear();
  state.sticky_error = false;
}

// Calls since then.
int64_t CudaCalls() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().calls;
}

// The first call that failed; empty if none did.
std::string CudaVictim() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().victim;
}

}  // namespace
}  // namespace lossd::kernels::testing::cuda_faults_test

using lossd::kernels::testing::cuda_faults_test::Error;
using lossd::kernels::testing::cuda_faults_test::Strikes;
using lossd::kernels::testing::cuda_faults_test::Take;
using lossd::kernels::testing::cuda_faults_test::TheState;

// NOLINTBEGIN(bugprone-reserved-identifier): the linker makes these names.
#define LOSSD_WRAP(name, parameters, arguments)                \
  extern "C" cudaError_t __real_##name parameters;             \
  extern "C" cudaError_t __wrap_##name parameters {            \
    return Strikes(#name) ? Error() : __real_##name arguments; \
  }

// What gives something back is done even if it fails, or the device would run out of memory.
#define LOSSD_WRAP_RELEASE(name, parameters, arguments) \
  extern "C" cudaError_t __real_##name parameters;      \
  extern "C" cudaError_t __wrap_##name parameters {     \
    const cudaError_t error = __real_##name arguments;  \
    return Strikes(#name) ? Error() : error;            \
  }

LOSSD_WRAP(cudaGetDeviceCount, (int* a), (a))
LOSSD_WRAP(cudaDriverGetVersion, (int* a), (a))
LOSSD_WRAP(cudaSetDevice, (int a), (a))
LOSSD_WRAP(cudaMemGetInfo, (size_t * a, size_t* b), (a, b))
LOSSD_WRAP(cudaGetDeviceProperties, (cudaDeviceProp * a, int b), (a, b))
LOSSD_WRAP(cudaDeviceGetAttribute, (int* a, cudaDeviceAttr b, int c), (a, b, c))
LOSSD_WRAP(cudaDeviceSynchronize, (), ())
LOSSD_WRAP(cudaMalloc, (void** a, size_t b), (a, b))
LOSSD_WRAP(cudaHostAlloc, (void** a, size_t b, unsigned c), (a, b, c))
LOSSD_WRAP(cudaMemcpy, (void* a, const void* b, size_t c, cudaMemcpyKind d), (a, b, c, d))
LOSSD_WRAP(cudaMemcpyAsync, (void* a, const void* b, size_t c, cudaMemcpyKind d, cudaStream_t e),
           (a, b, c, d, e))
LOSSD_WRAP(cudaMemset, (void* a, int b, size_t c), (a, b, c))
LOSSD_WRAP(cudaMemsetAsync, (void* a, int b, size_t c, cudaStream_t d), (a, b, c, d))
LOSSD_WRAP(cudaStreamCreateWithFlags, (cudaStream_t * a, unsigned b), (a, b))
LOSSD_WRAP(cudaStreamCreateWithPriority, (cudaStream_t * a, unsigned b, int c), (a, b, c))
LOSSD_WRAP(cudaDeviceGetStreamPriorityRange, (int* a, int* b), (a, b))
LOSSD_WRAP(cudaGetDeviceFlags, (unsigned* a), (a))
LOSSD_WRAP(cudaSetDeviceFlags, (unsigned a), (a))
LOSSD_WRAP(cudaStreamSynchronize, (cudaStream_t a), (a))
LOSSD_WRAP(cudaStreamWaitEvent, (cudaStream_t a, cudaEvent_t b, unsigned c), (a, b, c))
LOSSD_WRAP(cudaEventCreate, (cudaEvent_t * a), (a))
LOSSD_WRAP(cudaEventCreateWithFlags, (cudaEvent_t * a, unsigned b), (a, b))
LOSSD_WRAP(cudaEventRecord, (cudaEvent_t a, cudaStream_t b), (a, b))
LOSSD_WRAP(cudaEventSynchronize, (cudaEvent_t a), (a))
LOSSD_WRAP(cudaEventElapsedTime, (float* a, cudaEvent_t b, cudaEvent_t c), (a, b, c))
LOSSD_WRAP(cudaFuncSetAttribute, (const void* a, cudaFuncAttribute b, int c), (a, b, c))
LOSSD_WRAP(cudaOccupancyMaxActiveClusters, (int* a, const void* b, const cudaLaunchConfig_t* c), (a, b, c))
LOSSD_WRAP(cudaLaunchKernelExC, (const cudaLaunchConfig_t* a, const void* b, void** c), (a, b, c))
LOSSD_WRAP(cudaGraphCreate, (cudaGraph_t * a, unsigned b), (a, b))
LOSSD_WRAP(cudaGraphInstantiate, (cudaGraphExec_t * a, cudaGraph_t b, unsigned long long c), (a, b, c))
LOSSD_WRAP(cudaGraphLaunch, (cudaGraphExec_t a, cudaStream_t b), (a, b))
LOSSD_WRAP(cudaGraphGetNodes, (cudaGraph_t a, cudaGraphNode_t* b, size_t* c), (a, b, c))
LOSSD_WRAP(cudaGraphAddKernelNode,
           (cudaGraphNode_t * a, cudaGraph_t b, const cudaGraphNode_t* c, size_t d,
            const cudaKernelNodeParams* e),
           (a, b, c, d, e))
LOSSD_WRAP(cudaGraphConditionalHandleCreate,
           (cudaGraphConditionalHandle * a, cudaGraph_t b, unsigned c, unsigned d), (a, b, c, d))
LOSSD_WRAP(cudaGraphExecUpdate, (cudaGraphExec_t a, cudaGraph_t b, cudaGraphExecUpdateResultInfo* c),
           (a, b, c))
LOSSD_WRAP(cudaGraphNodeGetType, (cudaGraphNode_t a, cudaGraphNodeType* b), (a, b))
LOSSD_WRAP(cudaGraphKernelNodeGetAttribute,
           (cudaGraphNode_t a, cudaLaunchAttributeID b, cudaLaunchAttributeValue* c), (a, b, c))
LOSSD_WRAP(__cudaLaunchKernel, (cudaKernel_t a, dim3 b, dim3 c, void** d, size_t e, cudaStream_t f),
           (a, b, c, d, e, f))
LOSSD_WRAP(cudaGraphAddNode,
           (cudaGraphNode_t * a, cudaGraph_t b, const cudaGraphNode_t* c, const cudaGraphEdgeData* d,
            size_t e, cudaGraphNodeParams* f),
           (a, b, c, d, e, f))
LOSSD_WRAP(cudaStreamBeginCaptureToGraph,
           (cudaStream_t a, cudaGraph_t b, const cudaGraphNode_t* c, const cudaGraphEdgeData* d, size_t e,
            cudaStreamCaptureMode f),
           (a, b, c, d, e, f))
LOSSD_WRAP(cudaGetDriverEntryPointByVersion,
           (const char* a, void** b, unsigned c, unsigned long long d, cudaDriverEntryPointQueryResult* e),
           (a, b, c, d, e))
LOSSD_WRAP_RELEASE(cudaFree, (void* a), (a))
LOSSD_WRAP_RELEASE(cudaFreeHost, (void* a), (a))
LOSSD_WRAP_RELEASE(cudaStreamDestroy, (cudaStream_t a), (a))
LOSSD_WRAP_RELEASE(cudaEventDestroy, (cudaEvent_t a), (a))
// A stream that stays in capture would add to a graph that is destroyed.
LOSSD_WRAP_RELEASE(cudaStreamEndCapture, (cudaStream_t a, cudaGraph_t* b), (a, b))
LOSSD_WRAP_RELEASE(cudaGraphDestroy, (cudaGraph_t a), (a))
LOSSD_WRAP_RELEASE(cudaGraphExecDestroy, (cudaGraphExec_t a), (a))

// Reports a failed call before it once, as the runtime does, and may find an error of its own.
extern "C" cudaError_t __real_cudaGetLastError();
extern "C" cudaError_t __wrap_cudaGetLastError() {
  {
    const std::lock_guard<std::mutex> lock(TheState().mutex);
    if (TheState().sticky_error) {
      TheState().sticky_error = false;
      return TheState().fault.error;
    }
  }
  const cudaError_t error = __real_cudaGetLastError();
  if (!Strikes("cudaGetLastError")) return error;
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  TheState().sticky_error = false;
  return TheState().fault.error;
}

extern "C" void* __real_dlsym(void* file, const char* name);
extern "C" void* __wrap_dlsym(void* file, const char* name) {
  void* found = __real_dlsym(file, name);
  Take<0, decltype(&cublasLtCreate)>("cublasLtCreate", name, &found) ||
      Take<1, decltype(&cublasLtMatmul)>("cublasLtMatmul", name, &found) ||
      Take<2, decltype(&cublasLtMatmulDescCreate)>("cublasLtMatmulDescCreate", name, &found) ||
      Take<3, decltype(&cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute", name, &found) ||
      Take<4, decltype(&cublasLtMatrixLayoutCreate)>("cublasLtMatrixLayoutCreate", name, &found) ||
      Take<5, decltype(&cublasLtMatmulPreferenceCreate)>("cublasLtMatmulPreferenceCreate", name, &found) ||
      Take<6, decltype(&cublasLtMatmulPreferenceSetAttribute)>("cublasLtMatmulPreferenceSetAttribute", name,
                                                               &found) ||
      Take<7, decltype(&cublasLtMatmulAlgoGetHeuristic)>("cublasLtMatmulAlgoGetHeuristic", name, &found) ||
      Take<8, decltype(&cublasLtMatmulAlgoConfigGetAttribute)>("cublasLtMatmulAlgoConfigGetAttribute", name,
                                                               &found);
  for (const auto replace : lossd::kernels::testing::FoundSymbols()) {
    found = replace(file, name, found, &__real_dlsym);
  }
  return found;
}
// NOLINTEND(bugprone-reserved-identifier)

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
    // Teachers that take turns in a pool for one.
    std::vector<std::unique_ptr<HeadKernels>> teachers;
    for (const Problem& problem : problem_.teacher) {
      for (int i = 0; i < 2; ++i) {
        auto teacher = (*backend)->CreateHead(problem.config);
        if (!teacher.ok()) return teacher.status();
        teachers.push_back(*std::move(teacher));
        absl::Status status = Write(*teachers.back(), Param::kWeight, problem.weight);
        if (!status.ok()) return status;
      }
    }
    return RunHead(**head, teachers, outcome);
  }

  absl::Status RunHead(HeadKernels& head, const std::vector<std::unique_ptr<HeadKernels>>& teachers,
                       Outcome& outcome) {
    outcome.stage = Stage::kWrite;
    for (const Param param : kAllParams) {
      if (!HasTensor(problem_.config, {param, Role::kValue})) continue;
      if (absl::Status status = Write(head, param, problem_.Values(param)); !status.ok()) return status;
    }
    outcome.stage = Stage::kChunk;
    const ChunkRun run =
        RunChunk(head, problem_, {.teacher = teachers.empty() ? nullptr : teachers.front().get()});
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
    for (const size_t i : {1, 0}) {
      if (teachers.empty()) break;
      const ChunkRun other = RunChunk(head, problem_, {.teacher = teachers[i].get()});
      if (!other.results.ok()) return other.results;
      if (!other.done.ok()) return other.done;
    }
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
  bool teachers_in_host_memory = false;
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
    if (GetParam().teachers_in_host_memory) {
      ProblemSpec teacher = spec;
      teacher.config.trainable = teacher.config.has_bias = false;
      teacher.config.norm = Norm::kNone;
      teacher.config.residency = Residency::kHost;
      teacher.slice_rows.clear();
      spec.teacher.push_back(teacher);
      spec.options.distillation = {.divergence = Divergence::kForwardKl};
    }
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
        {.name = "Recomputed", .logits = Logits::kRecomputed},
        {.name = "TeachersInHostMemory", .teachers_in_host_memory = true}}),
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
