// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/nccl_faults.h"

#include <nccl.h>

#include <mutex>
#include <string>
#include <tuple>

namespace lossd::kernels::testing {
namespace {

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

}  // namespace

void SetNcclFault(const NcclFault& fault) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.fault = fault;
  state.calls = state.of_member = state.affected = 0;
}

int64_t NcclFaults() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().affected;
}

int64_t NcclCalls() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().calls;
}

}  // namespace lossd::kernels::testing

using lossd::kernels::testing::Take;

// NOLINTBEGIN(bugprone-reserved-identifier): the linker makes these names.
extern "C" void* __real_dlsym(void* file, const char* name);
extern "C" void* __wrap_dlsym(void* file, const char* name) {
  void* found = __real_dlsym(file, name);
  if (std::string(name) == "ncclReduce") {
    lossd::kernels::testing::user_rank =
        reinterpret_cast<decltype(&ncclCommUserRank)>(__real_dlsym(file, "ncclCommUserRank"));
  }
  Take<0, decltype(&ncclReduce)>(name, "ncclReduce", &found) ||
      Take<1, decltype(&ncclBroadcast)>(name, "ncclBroadcast", &found) ||
      Take<2, decltype(&ncclAllReduce)>(name, "ncclAllReduce", &found) ||
      Take<3, decltype(&ncclAllGather)>(name, "ncclAllGather", &found) ||
      Take<4, decltype(&ncclReduceScatter)>(name, "ncclReduceScatter", &found);
  return found;
}
// NOLINTEND(bugprone-reserved-identifier)
