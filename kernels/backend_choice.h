// SPDX-License-Identifier: Apache-2.0
// Which backend a program wants, and with what limits. Plain data.
#ifndef LOSSD_KERNELS_BACKEND_CHOICE_H_
#define LOSSD_KERNELS_BACKEND_CHOICE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "kernels/replica.h"

namespace lossd::kernels {

struct BackendChoice {
  std::string backend = "auto";  // "auto" (CUDA if there is a usable GPU, else CPU), "cpu" or "cuda"
  std::string device = "0";      // CUDA: index among the visible GPUs, or a UUID ("GPU-" or "MIG-" and so on)
  // CUDA: several GPUs that share the rows of every head (docs/scaling.md), by index or UUID with commas
  // between them, or "all"; instead of `device`. Empty: one.
  std::string devices;
  // CUDA: whose work goes before that of other programs on the GPU: "dx" (what dL/dx needs), "all" or "none".
  std::string stream_priority = "dx";
  int threads = 0;      // CPU: 0: all the process may use
  int cpu_devices = 1;  // CPU: groups of threads that share the rows of every head, as several GPUs would
  // How heads that do not say lie on several devices: "any" (what fits), "rows" or "vocabulary".
  std::string split = "any";
  int replicas = 1;                // of heads by vocabulary that do not say; it divides the devices
  int64_t workspace_bytes = 0;     // per head; 0: the backend's default
  int64_t memory_limit_bytes = 0;  // 0: none
  int64_t memory_reserve_bytes = int64_t{256} << 20;  // CPU: left to others of what the system can give
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

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_BACKEND_CHOICE_H_
