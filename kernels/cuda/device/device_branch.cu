// SPDX-License-Identifier: Apache-2.0
// DeviceBranch (device_branch.h): builds, updates and launches the graph of a branch.
#include <cuda_runtime.h>

#include <array>
#include <utility>
#include <vector>

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device_branch.h"
#include "kernels/cuda/device/kernel_code.h"

namespace lossd::kernels::cuda {
namespace {

__global__ void SetConditionKernel(const int32_t* flag, cudaGraphConditionalHandle condition) {
  cudaGraphSetConditional(condition, *flag != 0 ? 1u : 0u);
}

// Destroys a graph at the end of a scope; its executable form lives on.
struct GraphOwner {
  cudaGraph_t graph = nullptr;
  ~GraphOwner() {
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
};

absl::Status Capture(cudaGraph_t graph, cudaStream_t stream, absl::FunctionRef<absl::Status()> work) {
  LOSSD_RETURN_IF_CUDA_ERROR(
      cudaStreamBeginCaptureToGraph(stream, graph, nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal),
      "cudaStreamBeginCaptureToGraph");
  const absl::Status status = work();
  cudaGraph_t captured = nullptr;
  const absl::Status ended = ToStatus(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  return status.ok() ? ended : status;
}

// Adds a node that sets the condition from the flag, and after it the conditional node. bodies[0] is the
// graph for a flag that is set, bodies[1] for one that is not.
absl::Status AddChoice(cudaGraph_t graph, const int32_t* flag, cudaGraph_t (&bodies)[2]) {
  cudaGraphConditionalHandle condition;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGraphConditionalHandleCreate(&condition, graph, 0, 0),
                             "cudaGraphConditionalHandleCreate");
  void* arguments[] = {&flag, &condition};
  cudaKernelNodeParams kernel = {};
  kernel.func = reinterpret_cast<void*>(SetConditionKernel);
  kernel.gridDim = dim3(1);
  kernel.blockDim = dim3(1);
  kernel.kernelParams = arguments;
  cudaGraphNode_t set = nullptr;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGraphAddKernelNode(&set, graph, nullptr, 0, &kernel),
                             "cudaGraphAddKernelNode");
  cudaGraphNodeParams choice = {};
  choice.type = cudaGraphNodeTypeConditional;
  choice.conditional.handle = condition;
  choice.conditional.type = cudaGraphCondTypeIf;
  choice.conditional.size = 2;
  cudaGraphNode_t node = nullptr;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGraphAddNode(&node, graph, &set, nullptr, 1, &choice), "cudaGraphAddNode");
  bodies[0] = choice.conditional.phGraph_out[0];
  bodies[1] = choice.conditional.phGraph_out[1];
  return absl::OkStatus();
}

// Appends the cluster dimensions of each kernel. cudaGraphExecUpdate does not carry them over, although it
// reports success: a kernel that had a cluster and has none now, or the reverse, would then not run at all,
// without an error (seen with CUDA 13.0; cuBLASLt chooses clusters by the number of rows).
absl::Status AppendClusters(cudaGraph_t body, std::vector<std::array<unsigned, 3>>& clusters) {
  size_t count = 0;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGraphGetNodes(body, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGraphGetNodes(body, nodes.data(), &count), "cudaGraphGetNodes");
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    LOSSD_RETURN_IF_CUDA_ERROR(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaLaunchAttributeValue value = {};
    LOSSD_RETURN_IF_CUDA_ERROR(
        cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributeClusterDimension, &value),
        "cudaGraphKernelNodeGetAttribute");
    clusters.push_back({value.clusterDim.x, value.clusterDim.y, value.clusterDim.z});
  }
  return absl::OkStatus();
}

}  // namespace

// Captures both functions into a new graph each time. Then the executable graph of the last call is updated
// from the new graph if possible, because that takes less time than a new executable graph.
absl::Status DeviceBranch::Enqueue(const int32_t* flag, cudaStream_t stream,
                                   absl::FunctionRef<absl::Status()> if_set,
                                   absl::FunctionRef<absl::Status()> if_not) {
  GraphOwner owner;
  cudaGraph_t bodies[2] = {};
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGraphCreate(&owner.graph, 0), "cudaGraphCreate");
  LOSSD_RETURN_IF_ERROR(AddChoice(owner.graph, flag, bodies));
  LOSSD_RETURN_IF_ERROR(Capture(bodies[0], stream, if_set));
  LOSSD_RETURN_IF_ERROR(Capture(bodies[1], stream, if_not));
  std::vector<std::array<unsigned, 3>> clusters;
  for (const cudaGraph_t body : bodies) LOSSD_RETURN_IF_ERROR(AppendClusters(body, clusters));
  if (clusters != clusters_ || !Update(owner.graph)) {
    Reset();
    LOSSD_RETURN_IF_CUDA_ERROR(cudaGraphInstantiate(&exec_, owner.graph, 0), "cudaGraphInstantiate");
    clusters_ = std::move(clusters);
  }
  return ToStatus(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch");
}

bool DeviceBranch::Update(cudaGraph_t graph) {
  if (exec_ == nullptr) return false;
  cudaGraphExecUpdateResultInfo info = {};
  if (cudaGraphExecUpdate(exec_, graph, &info) == cudaSuccess) return true;
  cudaGetLastError();  // the two graphs differ in more than parameters, which is no error here
  return false;
}

void DeviceBranch::Reset() {
  if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
  exec_ = nullptr;
}

absl::Status BranchOnHost(const int32_t* flag, cudaStream_t stream, absl::FunctionRef<absl::Status()> if_set,
                          absl::FunctionRef<absl::Status()> if_not) {
  int32_t value = 0;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(&value, flag, sizeof(value), cudaMemcpyDeviceToHost, stream),
                             "cudaMemcpyAsync");
  LOSSD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return value != 0 ? if_set() : if_not();
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(DeviceBranch)
