// SPDX-License-Identifier: Apache-2.0
// Two GPUs that are one device, of which one stays away from an exchange or fails in it: the group ends as
// one. The call under way gets one answer, within the time that a GPU waits for another; what comes later
// fails; nothing hangs, and a new group can be made. The same with two replicas of two GPUs each, where it is
// the GPU of one place of all.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/group/group_backend.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/cuda/found_symbols.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::cuda_group_faults_test {
namespace {

// ---- faults ----
//
// One GPU of several may stay away from the exchanges of NCCL, as one that hangs, or fail in them: dlsym
// finds other functions (found_symbols.h). Thread-safe.

struct NcclFault {
  int member = -1;     // whose calls are affected; -1: nobody's
  int64_t after = 0;   // so many of them go well before
  bool fails = false;  // the call reports an error; else it says that all is well and does nothing
};

struct State {
  std::mutex mutex;
  NcclFault fault;
  int64_t calls = 0;
  int64_t of_member = 0;
  int64_t affected = 0;
};

State& TheState() {
  static auto* const state = new State();
  return *state;
}

decltype(&ncclCommUserRank) user_rank = nullptr;

// Whether the fault is in this call.
bool Strikes(ncclComm_t communicator, bool* fails) {
  int member = -1;
  if (user_rank != nullptr) user_rank(communicator, &member);
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  ++state.calls;
  if (member < 0 || member != state.fault.member || state.of_member++ < state.fault.after) return false;
  ++state.affected;
  *fails = state.fault.fails;
  return true;
}

// An exchange, whose last arguments are the communicator and the stream. `kIndex` makes each a type of its
// own.
template <int kIndex, typename Function>
struct Thunk;
template <int kIndex, typename... Arguments>
struct Thunk<kIndex, ncclResult_t (*)(Arguments...)> {
  static inline ncclResult_t (*real)(Arguments...) = nullptr;
  static ncclResult_t Call(Arguments... arguments) {
    bool fails = false;
    if (!Strikes(std::get<sizeof...(Arguments) - 2>(std::tie(arguments...)), &fails))
      return real(arguments...);
    return fails ? ncclSystemError : ncclSuccess;
  }
};

template <int kIndex, typename Function>
bool Take(const std::string& name, const char* wanted, void** found) {
  if (name != wanted || *found == nullptr) return false;
  using Wrapped = Thunk<kIndex, Function>;
  Wrapped::real = reinterpret_cast<Function>(*found);
  *found = reinterpret_cast<void*>(&Wrapped::Call);
  return true;
}

// From now on; starts counting anew.
void SetNcclFault(const NcclFault& fault) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.fault = fault;
  state.calls = state.of_member = state.affected = 0;
}

// Calls of the member that were affected since then.
int64_t NcclFaults() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().affected;
}

// Calls of all members since then.
int64_t NcclCalls() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().calls;
}

void* WithFaults(void* file, const char* name, void* found, void* (*real)(void*, const char*)) {
  if (std::string(name) == "ncclReduce") {
    user_rank = reinterpret_cast<decltype(&ncclCommUserRank)>(real(file, "ncclCommUserRank"));
  }
  Take<0, decltype(&ncclReduce)>(name, "ncclReduce", &found) ||
      Take<1, decltype(&ncclBroadcast)>(name, "ncclBroadcast", &found) ||
      Take<2, decltype(&ncclAllReduce)>(name, "ncclAllReduce", &found) ||
      Take<3, decltype(&ncclAllGather)>(name, "ncclAllGather", &found) ||
      Take<4, decltype(&ncclReduceScatter)>(name, "ncclReduceScatter", &found);
  return found;
}
[[maybe_unused]] const bool added = (FoundSymbols().push_back(&WithFaults), true);

constexpr int kMembers = 2;
constexpr absl::Duration kTimeout = absl::Seconds(3);

struct Case {
  std::string name;
  Split split = Split::kRows;
  bool fails = false;  // else it stays away
  int replicas = 1;
};

// Of kMembers GPUs each.
std::unique_ptr<Backend> MakeGroup(int replicas = 1) {
  const int gpus = replicas * kMembers;
  std::vector<std::unique_ptr<Backend>> members;
  std::vector<int> devices;
  for (int i = 0; i < gpus; ++i) {
    devices.push_back(i);
    auto member =
        CreateCudaBackend({.device = i, .replica = {i, gpus}, .workspace_bytes = int64_t{64} << 20});
    EXPECT_TRUE(member.ok()) << member.status();
    if (!member.ok()) return nullptr;
    members.push_back(*std::move(member));
  }
  auto connection = CudaReplicaGroup::Create(devices, kTimeout);
  EXPECT_TRUE(connection.ok()) << connection.status();
  if (!connection.ok()) return nullptr;
  const std::shared_ptr<CudaReplicaGroup> group = *std::move(connection);
  auto backend = CreateGroupBackend(
      std::move(members),
      [group](absl::Span<HeadKernels* const> heads) -> absl::StatusOr<std::unique_ptr<Replicas>> {
        return group->Connect(heads);
      },
      {.least_rows = 0,
       .join_classes = [group](absl::Span<HeadKernels* const> heads) { return group->Join(heads); }});
  EXPECT_TRUE(backend.ok()) << backend.status();
  return backend.ok() ? *std::move(backend) : nullptr;
}

class CudaGroupFaults : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    LOSSD_SKIP_WITHOUT_GPU();
    if (GpuCount() < kMembers * GetParam().replicas) GTEST_SKIP() << GpuCount() << " GPUs only";
  }
  void TearDown() override { SetNcclFault({}); }

  ProblemSpec Spec() const {
    ProblemSpec spec;
    spec.config = {.hidden_size = 72, .vocab_size = 1003, .compute_dtype = DType::kBFloat16};
    spec.config.norm = Norm::kRmsNorm;
    spec.config.split = GetParam().split;
    spec.config.replicas = GetParam().replicas;
    spec.hidden_dtype = DType::kBFloat16;
    spec.slice_rows = {40, 24};
    return spec;
  }

  // Chunk, norm, step. The first error.
  static absl::Status Train(HeadKernels& head, const Problem& problem) {
    const ChunkRun run = RunChunk(head, problem);
    if (!run.results.ok()) {
      EXPECT_FALSE(run.done.ok());
      return run.results;
    }
    if (!run.done.ok()) return run.done;
    if (absl::Status status = head.GradNorm().status(); !status.ok()) return status;
    return head.ApplyStep({.learning_rate = 1e-2, .epsilon = 1e-3}, 1);
  }

  Rng rng_ = FreshRng();
};

TEST_P(CudaGroupFaults, EndAsOne) {
  const Problem problem = MakeProblem(Spec(), rng_);
  int64_t exchanges = 0;  // of each member, of both replicas together
  {
    const auto group = MakeGroup(GetParam().replicas);
    ASSERT_NE(group, nullptr);
    const auto head = MakeHead(*group, problem);
    ASSERT_NE(head, nullptr);
    SetNcclFault({});
    const absl::Status status = Train(*head, problem);
    ASSERT_TRUE(status.ok()) << status;
    exchanges = NcclCalls() / kMembers;
  }
  ASSERT_GT(exchanges, 1) << "the calls are not counted";
  std::vector<int64_t> places = {0, exchanges / 2};
  // Of several replicas the last exchange gives the others a few values, and its sender does not wait until
  // they have them: a GPU that only leaves this out is not noticed. One that hangs does not do what comes
  // after it either.
  const bool spreads = GetParam().split == Split::kRows || GetParam().replicas > 1;
  if (GetParam().fails || !spreads) places.push_back(exchanges - 1);
  for (const int64_t after : places) {
    const int member = static_cast<int>(after) % kMembers;
    SCOPED_TRACE(absl::StrCat("GPU ", member, " after ", after, " of ", exchanges, " exchanges"));
    const auto group = MakeGroup(GetParam().replicas);
    ASSERT_NE(group, nullptr);
    auto head = MakeHead(*group, problem);
    ASSERT_NE(head, nullptr);
    SetNcclFault({.member = member, .after = after, .fails = GetParam().fails});
    const absl::Time start = absl::Now();
    const absl::Status status = Train(*head, problem);
    const absl::Duration took = absl::Now() - start;
    EXPECT_GT(NcclFaults(), 0);
    EXPECT_LT(took, 10 * kTimeout) << "this limit ended it, not a longer one";
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    SetNcclFault({});
    EXPECT_FALSE(Train(*head, problem).ok()) << "the group is lost";
    EXPECT_FALSE(head->ApplyStep({.learning_rate = 1e-2, .epsilon = 1e-3}, 2).ok());
    std::cout << GetParam().name << " " << after << "/" << exchanges << ": " << absl::FormatDuration(took)
              << ", " << status.message() << std::endl;
    head.reset();
  }
}

// Rows lie in memory that the GPUs write to while the thread that has enqueued the copies goes on.
TEST_P(CudaGroupFaults, MemoryIsTheCallersOnceTheFailureIsKnown) {
  const Problem problem = MakeProblem(Spec(), rng_);
  for (const int64_t after : {int64_t{0}, int64_t{1}, int64_t{2}}) {
    SCOPED_TRACE(after);
    const auto group = MakeGroup();
    ASSERT_NE(group, nullptr);
    auto staging = group->AllocateStaging(int64_t{1} << 20);
    ASSERT_TRUE(staging.ok()) << staging.status();
    const absl::Span<uint8_t> memory = (*staging)->bytes();
    SetRowMemory(memory);
    auto head = MakeHead(*group, problem);
    ASSERT_NE(head, nullptr);
    SetNcclFault({.member = 1, .after = after, .fails = GetParam().fails});
    const ChunkRun run = RunChunk(*head, problem);  // has overwritten all rows as soon as it heard
    const std::vector<uint8_t> at_end(memory.begin(), memory.end());
    for (int gpu = 0; gpu < kMembers; ++gpu) {
      cudaSetDevice(gpu);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    EXPECT_TRUE(std::equal(memory.begin(), memory.end(), at_end.begin())) << run.results;
    SetNcclFault({});
    head.reset();
    SetRowMemory({});
  }
}

std::string NameOf(const ::testing::TestParamInfo<Case>& way) { return way.param.name; }

INSTANTIATE_TEST_SUITE_P(Ways, CudaGroupFaults,
                         ::testing::Values(Case{"RowsFail", Split::kRows, true},
                                           Case{"VocabularyFail", Split::kVocabulary, true},
                                           Case{"RowsAway", Split::kRows, false},
                                           Case{"VocabularyAway", Split::kVocabulary, false},
                                           Case{"GridFail", Split::kVocabulary, true, 2},
                                           Case{"GridAway", Split::kVocabulary, false, 2}),
                         NameOf);

}  // namespace
}  // namespace lossd::kernels::testing::cuda_group_faults_test
