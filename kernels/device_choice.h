// SPDX-License-Identifier: Apache-2.0
// Functions about the GPUs of a process that do not need CUDA: which of several GPUs a user means (FindGpus),
// how the process shares its GPUs with other programs (GpuSharing), and environment variables of NCCL
// (SetNcclDefaults).
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

// A GPU's UUID, given as 16 bytes, in the form of nvidia-smi and NVML: "GPU-" and 8-4-4-4-12 hexadecimal
// digits.
std::string GpuUuidText(absl::Span<const char> bytes);

// The index of the GPU that `device` names. `device` is an index, a UUID in the form of GpuUuidText, or the
// beginning of the UUID of only one GPU (at least "GPU-" and a digit). `uuids`: the UUIDs of all GPUs.
// INVALID_ARGUMENT names the field "device", its value and the GPUs that exist.
absl::StatusOr<int> FindGpu(absl::string_view device, absl::Span<const std::string> uuids);

// The indexes of the GPUs that `devices` names, in its order: names as in FindGpu with commas between them,
// or "all". INVALID_ARGUMENT names the field "devices"; it is also returned if a GPU is named twice.
absl::StatusOr<std::vector<int>> FindGpus(absl::string_view devices, absl::Span<const std::string> uuids);

// Checks that all chosen devices are of the same kind. INVALID_ARGUMENT, which names the field "devices", if
// they are not. `descriptions`: BackendInfo::device of each device: the name of the device, a space, and a
// text that must be the same for all devices.
absl::Status CheckAlike(absl::Span<const std::string> descriptions);

// Text that says how the GPUs of this process are shared with other programs. "MPS, client priority 0
// (normal)" under NVIDIA's Multi-Process Service, with the share of the multiprocessors if that is not all of
// them; else "time slices". Reads the environment.
std::string GpuSharing(bool mps);

// The environment variable for NVLink multicast (NVLS), with which the switch between the GPUs forms sums.
// NCCL reads it when it is loaded.
inline constexpr char kNcclMulticast[] = "NCCL_NVLS_ENABLE";

// Turns NVLink multicast off, unless the environment already sets it. So NCCL works in the same way on hosts
// whose driver, fabric or container offers multicast and on hosts where they do not. Call it before NCCL is
// loaded and before the process has other threads, which may read the environment. Calling it again changes
// nothing.
void SetNcclDefaults();

// The value of the environment variable for NVLink multicast; empty if it is not set. The same rule for
// threads as for SetNcclDefaults.
std::string NcclMulticast();

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DEVICE_CHOICE_H_
