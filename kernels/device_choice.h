// Which of several GPUs a user means. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_DEVICE_CHOICE_H_
#define LOSSD_KERNELS_DEVICE_CHOICE_H_

#include <string>

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

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DEVICE_CHOICE_H_
