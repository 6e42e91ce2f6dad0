// SPDX-License-Identifier: Apache-2.0
// Which of several GPUs a user means. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_DEVICE_CHOICE_H_
#define LOSSD_KERNELS_DEVICE_CHOICE_H_

#include <string>
#include <vector>

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

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DEVICE_CHOICE_H_
