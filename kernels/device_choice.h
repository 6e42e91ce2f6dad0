// SPDX-License-Identifier: Apache-2.0
// The GPUs that a program uses, in terms that need no CUDA: which of several GPUs a user means (FindGpus),
// how the process shares them with other programs (GpuSharing), what NCCL reads from the environment
// (SetNcclDefaults), and memory of a GPU that other programs of the host can map (DeviceMemorySharer).
//
// Functions are stateless and thread-safe unless their comment names the threads.
#ifndef LOSSD_KERNELS_DEVICE_CHOICE_H_
#define LOSSD_KERNELS_DEVICE_CHOICE_H_

#include <cstdint>
#include <memory>
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

// Memory of a device that programs of the host can map too, so that rows need no copy through memory of the
// host. It is zero at first. Destroying the object, which must happen before the backend ends, takes the
// memory from this process; a program that has mapped it keeps the device's memory until it unmaps it or
// ends. Thread-safe.
class SharedDeviceMemory {
 public:
  virtual ~SharedDeviceMemory() = default;
  // Addresses of the device, in whole pages of it: code of the host must not follow them. The backend takes
  // hidden states from there and writes gradients and tensors there, as with staging memory. Other processes
  // may write to it at any time (StagingAdopter::AdoptStaging).
  virtual absl::Span<uint8_t> bytes() const = 0;
  // What another process imports it from, e.g. cuMemImportFromShareableHandle. Stays this object's.
  virtual int descriptor() const = 0;
  // Copies `from`, a part of bytes(), to memory of the host, or the other way, and waits for it. UNAVAILABLE:
  // the device is lost.
  virtual absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const = 0;
  virtual absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const = 0;
};

// A backend that has such memory. Backends that can share memory implement DeviceMemorySharer too.
// Thread-safe.
class DeviceMemorySharer {
 public:
  virtual ~DeviceMemorySharer() = default;
  // The UUIDs of the devices whose memory ShareDeviceMemory gives, in the order of the devices; empty: it
  // gives none.
  virtual std::vector<std::string> SharingDevices() const = 0;
  // `bytes` > 0, rounded up to whole pages, of `device`, one of SharingDevices(), that all devices of this
  // backend reach. Counted as MemoryKind::kSlots. RESOURCE_EXHAUSTED if it would pass a limit; UNIMPLEMENTED
  // if the device or its driver cannot share memory, or if nothing connects it with another device.
  virtual absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(absl::string_view device,
                                                                                int64_t bytes) = 0;
  // Lets this device read and write memory that another backend of this process shares, SharedDeviceMemory's
  // bytes(), as long as it is there. UNIMPLEMENTED if nothing connects the two devices.
  virtual absl::Status ReachDeviceMemory(absl::Span<uint8_t> memory) = 0;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DEVICE_CHOICE_H_
