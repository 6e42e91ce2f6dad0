// SPDX-License-Identifier: Apache-2.0
// Makes the backends of a program. A program says what it wants in a BackendChoice, and CreateBackend or
// CreateRankBackends makes it. This is the one place that knows which backends the build has.
//
// The functions are thread-safe.
#ifndef LOSSD_KERNELS_CREATE_BACKEND_H_
#define LOSSD_KERNELS_CREATE_BACKEND_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/rank_link.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// Which backend a program wants, and with what limits. Plain data.
struct BackendChoice {
  std::string backend = "auto";  // "auto" (CUDA if there is a usable GPU, else CPU), "cpu" or "cuda"
  std::string device = "0";      // CUDA: index among the visible GPUs, or a UUID ("GPU-" or "MIG-" and so on)
  // CUDA: several GPUs that share the rows of every head (docs/scaling.md), by index or UUID with commas
  // between them, or "all"; instead of `device`. Empty: one.
  std::string devices;
  // CUDA: whose work goes before that of other programs on the GPU: "dx" (what dL/dx needs), "all" or "none".
  std::string stream_priority = "dx";
  bool shares_process =
      false;            // CUDA: other code of the process works on the GPU too; nothing of the process is set
  int threads = 0;      // CPU: 0: all the process may use
  int cpu_devices = 1;  // CPU: groups of threads that share the rows of every head, as several GPUs would
  // How heads that do not say lie on several devices: "any" (what fits), "rows" or "vocabulary".
  std::string split = "any";
  int replicas = 1;                // of heads by vocabulary that do not say; it divides the devices
  int64_t workspace_bytes = 0;     // per head; 0: the backend's default
  int64_t memory_limit_bytes = 0;  // 0: none
  int64_t memory_reserve_bytes = int64_t{256} << 20;  // CPU: left to others of what the system can give
  int64_t teacher_pool_bytes =
      0;                       // of each device, for heads in host memory (teacher_pool.h); 0: as they need
  bool deterministic = false;  // nothing that may differ between runs of the program, whatever it gains

  // With a count above 1: the heads are replicas, and the backends of the other ones have nothing in common
  // with this one but a link (rank_link.h). Then one device: no `devices`, and `cpu_devices` says how many
  // such backends divide the threads of this process.
  Replica replica;
  // CUDA: the number of this process among those of its host. Where several GPUs are visible, and no other is
  // named, the GPU of that number is this one's.
  std::optional<int> local_rank;
  // What carries sums and exchanges between ranks: "nccl", "gloo" (through the memory of the hosts), or
  // "auto": NCCL among GPUs if it is there and each rank has a GPU of its own, else Gloo.
  std::string collectives = "auto";
  std::string link_host;  // Gloo: the address that the other ranks reach this host at
  // How long the other ranks, or the other GPUs of this process, may take to do their part of an exchange.
  absl::Duration link_timeout = absl::Minutes(1);
};

// BackendChoice::split; INVALID_ARGUMENT naming it.
absl::StatusOr<Split> SplitOf(const BackendChoice& choice);

struct CreatedBackend {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<RankLink> link;  // of a choice with several replicas; the heads end before it
  std::string note;                // why "auto" did not take a GPU; empty if there is nothing to say
};

// INVALID_ARGUMENT naming the option if one is out of range, UNAVAILABLE if "cuda" was asked for and this
// build or this machine has none.
absl::StatusOr<CreatedBackend> CreateBackend(const BackendChoice& choice);

// The backends of one of several processes, a backend for each device that `devices` or `cpu_devices` names,
// each with a link of its own. `choice.replica` counts the processes, of which all have as many devices; the
// replicas of the results are numbered through, process by process. Errors are CreateBackend's.
absl::StatusOr<std::vector<CreatedBackend>> CreateRankBackends(const BackendChoice& choice);

// The GPU backend of this build. gpu_backend_cuda.cc defines this function and the two below it; a build
// without a CUDA compiler takes them from gpu_backend_none.cc. UNAVAILABLE if this build or this machine has
// no usable GPU.
absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice& choice);

// The UUIDs of the GPUs that `devices` names (device_choice.h), in its order. UNAVAILABLE if this
// build or this machine has no usable GPU; INVALID_ARGUMENT naming the field "devices".
absl::StatusOr<std::vector<std::string>> GpuUuidsOf(const std::string& devices);

// The link of a backend that CreateGpuBackend has made of this choice, which is one of several replicas.
// `backend` outlives RankLink::Connect.
absl::StatusOr<std::unique_ptr<RankLink>> CreateGpuLink(const BackendChoice& choice, Backend* backend);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CREATE_BACKEND_H_
