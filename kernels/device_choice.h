// SPDX-License-Identifier: Apache-2.0
// The GPUs that a program uses, in terms that need no CUDA: which of several GPUs a user means (FindGpus),
// how the process shares them with other programs (GpuSharing), and what NCCL reads from the
// environment (SetNcclDefaults).
//
// Functions are stateless and thread-safe unless their comment names the threads.
#ifndef LOSSD_KERNELS_DEVICE_CHOICE_H_
#define LOSSD_KERNELS_DEVICE_CHOICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::kernels {

// The 16 bytes of a GPU's UUID as nvidia-smi and NVML write them: "GPU-" and 8-4-4-4-12 hexadecimal digits.
std::string GpuUuidText(absl::Span<const char> bytes);

// The index of the GPU that `device` names: an index, a UUID as above, or the beginning of one that no other
// has (at least "GPU-" and a digit). `uuids`: of all GPUs. INVALID_ARGUMENT naming the field "device", its
// value and the GPUs there are.
absl::StatusOr<int> FindGpu(absl::string_view device, absl::Span<const std::string> uuids);

// The indices of the GPUs that `devices` names, in its order: names as above with commas between them, or
// "all". INVALID_ARGUMENT naming the field "devices" also for one that is named twice.
absl::StatusOr<std::vector<int>> FindGpus(absl::string_view devices, absl::Span<const std::string> uuids);

// INVALID_ARGUMENT naming the field "devices" unless all are alike. `descriptions`: of the devices chosen, as
// BackendInfo::device says them: the name of the device, a space, and what has to be the same.
absl::Status CheckAlike(absl::Span<const std::string> descriptions);

// How the GPUs of this process are shared with other programs, in words:
// "MPS, client priority 0 (normal)" under NVIDIA's Multi-Process Service, with the share of the
// multiprocessors if that is not all of them; else "time slices". Reads the environment.
std::string GpuSharing(bool mps);

// The environment variable for NVLink multicast (NVLS): sums that the switch between the GPUs forms. NCCL
// reads it when it is loaded.
inline constexpr char kNcclMulticast[] = "NCCL_NVLS_ENABLE";

// Keeps NVLink multicast off, unless the environment says what it is to be: NCCL then exchanges the same way
// on hosts whose driver, fabric or container offers multicast and on those that do not. To be called before
// NCCL is loaded and before the process has other threads, which may read the environment; called again it
// changes nothing.
void SetNcclDefaults();

// What the environment says of NVLink multicast; empty if nothing. The same rule for threads as
// for SetNcclDefaults.
std::string NcclMulticast();

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DEVICE_CHOICE_H_
