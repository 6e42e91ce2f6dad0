// SPDX-License-Identifier: Apache-2.0
// CreateBackend and CreateRankBackends create the backends of a program from a BackendChoice. Other code does
// not know which backends the build has.
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

// The backend that a program wants, and its limits. Plain data.
struct BackendChoice {
  std::string backend = "auto";  // "auto" (CUDA if there is a usable GPU, else CPU), "cpu" or "cuda"
  std::string device = "0";      // CUDA: index among the visible GPUs, or a UUID ("GPU-" or "MIG-" and so on)
  // CUDA: used instead of `device` for several GPUs that share every head (docs/scaling.md): indexes or UUIDs
  // with commas between them, or "all". Empty: one GPU, `device`.
  std::string devices;
  // CUDA: which work of this process has priority over the work of other programs on the GPU: "dx" (the work
  // that dL/dx depends on), "all" or "none".
  std::string stream_priority = "dx";
  // CUDA: other code of the process uses the GPU, too, so the backend changes no settings of the process
  bool shares_process = false;
  int threads = 0;      // CPU: number of threads; 0: all that the process may use
  int cpu_devices = 1;  // CPU: the number of groups of threads that share every head, as several GPUs would
  // How a head is divided over several devices if its config leaves it open: "any" (what fits), "rows" or
  // "vocabulary".
  std::string split = "any";
  // The number of replicas of heads that are split by vocabulary and whose config leaves this number open.
  // The number of devices must be a multiple of it.
  int replicas = 1;
  int64_t workspace_bytes = 0;                        // for each head; 0: the backend's default
  int64_t memory_limit_bytes = 0;                     // 0: none
  int64_t memory_reserve_bytes = int64_t{256} << 20;  // CPU: memory of the system to leave free
  // The size of each device's pool for heads in host memory (teacher_pool.h); 0: as large as these heads
  // need.
  int64_t teacher_pool_bytes = 0;
  bool deterministic = false;  // use no fast algorithms whose results may differ between runs

  // If replica.count > 1, the heads of this backend are replicas or parts of heads, and other backends have
  // the other replicas or parts. Only a link (rank_link.h) connects these backends. Each of them has one
  // device: `devices` is empty, and `cpu_devices` is the number of such backends that share the threads of
  // this process.
  Replica replica;
  // CUDA: the number of this process among the processes on its host. If several GPUs are visible and
  // `device` names none, the process takes the GPU with this number.
  std::optional<int> local_rank;
  // What carries sums and exchanges between ranks: "nccl", "gloo" (through host memory), or "auto": NCCL if
  // it is available and each rank has a GPU of its own, else Gloo.
  std::string collectives = "auto";
  std::string link_host;  // Gloo: the address at which the other ranks reach this host
  // How long an exchange waits for the other ranks, or the other GPUs of this process.
  absl::Duration link_timeout = absl::Minutes(1);
};

// Parses BackendChoice::split; INVALID_ARGUMENT names it.
absl::StatusOr<Split> SplitOf(const BackendChoice& choice);

struct CreatedBackend {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<RankLink> link;  // only if replica.count > 1; outlives the heads
  std::string note;                // why "auto" did not take a GPU; may be empty
};

// Creates one backend. INVALID_ARGUMENT names an option that is out of range. UNAVAILABLE if "cuda" was asked
// for and this build or this machine has no usable GPU.
absl::StatusOr<CreatedBackend> CreateBackend(const BackendChoice& choice);

// Creates the backends of one of several processes: one for each device that `devices` or `cpu_devices`
// names, each with a link of its own. `choice.replica` is the number of this process among all processes,
// which must all have the same number of devices. The replicas of the results are numbered process by
// process. Errors as CreateBackend.
absl::StatusOr<std::vector<CreatedBackend>> CreateRankBackends(const BackendChoice& choice);

// Creates the GPU backend. gpu_backend_cuda.cc defines this function and the two below; a build without a
// CUDA compiler uses gpu_backend_none.cc instead. UNAVAILABLE if this build or this machine has no usable
// GPU.
absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice& choice);

// The UUIDs of the GPUs that `devices` names (FindGpus in device_choice.h), in its order. UNAVAILABLE if this
// build or this machine has no usable GPU; INVALID_ARGUMENT names the field "devices".
absl::StatusOr<std::vector<std::string>> GpuUuidsOf(const std::string& devices);

// Creates the link of a backend that CreateGpuBackend created from this choice, with replica.count > 1.
// `backend` must exist until RankLink::Connect has returned.
absl::StatusOr<std::unique_ptr<RankLink>> CreateGpuLink(const BackendChoice& choice, Backend* backend);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CREATE_BACKEND_H_
