// SPDX-License-Identifier: Apache-2.0
// Every call of the CUDA runtime that kernels/cuda makes, wrapped: the linker sends it here (--wrap), and
// here it is counted and may fail. cuBLASLt is loaded at run time, so dlsym hands out wrapped functions of
// it.
#include "tests/kernels/cuda/cuda_faults.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <mutex>
#include <string>

#include "absl/strings/string_view.h"

namespace lossd::kernels::testing {
namespace {

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

}  // namespace

void SetCudaFault(const CudaFault& fault) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.fault = fault;
  state.calls = 0;
  state.victim.clear();
  state.sticky_error = false;
}

int64_t CudaCalls() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().calls;
}

std::string CudaVictim() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().victim;
}

}  // namespace lossd::kernels::testing

using lossd::kernels::testing::Error;
using lossd::kernels::testing::Strikes;
using lossd::kernels::testing::Take;
using lossd::kernels::testing::TheState;

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
  return found;
}
// NOLINTEND(bugprone-reserved-identifier)
