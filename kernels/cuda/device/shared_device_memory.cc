// SPDX-License-Identifier: Apache-2.0
// ShareDeviceMemory and ReachDeviceMemory (shared_device_memory.h): functions of the driver create the
// memory, map it and export it.
#include "kernels/cuda/device/shared_device_memory.h"

#include <cuda.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels::cuda {
namespace {

// The driver's functions. They are found at run time, because this library is not linked with the driver.
struct Driver {
  decltype(&cuCtxGetDevice) get_device = nullptr;
  decltype(&cuDeviceGetAttribute) get_attribute = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
};

template <typename Function>
bool Find(const char* name, Function& function) {
  return FindDriverFunction(name, function) == cudaSuccess && function != nullptr;
}

// Null if the driver lacks one of the functions.
const Driver* FindDriver() {
  static const Driver* const kDriver = [] {
    auto* const driver = new Driver();
    const bool found =
        Find("cuCtxGetDevice", driver->get_device) && Find("cuDeviceGetAttribute", driver->get_attribute) &&
        Find("cuMemGetAllocationGranularity", driver->granularity) && Find("cuMemCreate", driver->create) &&
        Find("cuMemRelease", driver->release) && Find("cuMemAddressReserve", driver->reserve) &&
        Find("cuMemAddressFree", driver->free_address) && Find("cuMemMap", driver->map) &&
        Find("cuMemUnmap", driver->unmap) && Find("cuMemSetAccess", driver->set_access) &&
        Find("cuMemExportToShareableHandle", driver->export_handle);
    return found ? driver : nullptr;
  }();
  return kDriver;
}

absl::Status SharedMemoryStatus(CUresult result, absl::string_view call, size_t bytes) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(call, " of ", errors::ExactBytes(bytes),
                                           " that other programs may map failed: ", static_cast<int>(result));
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return absl::ResourceExhaustedError(message);
  return absl::UnimplementedError(message);
}

CUmemAllocationProp PropertiesOf(CUdevice device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  return properties;
}

bool CanExport(const Driver& driver, CUdevice device) {
  int value = 0;
  return driver.get_attribute(&value, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                              device) == CUDA_SUCCESS &&
         value != 0;
}

// Gives one more device access; devices that have access keep it.
absl::Status GiveAccess(const Driver& driver, CUdeviceptr address, size_t bytes, CUmemLocation location) {
  const CUmemAccessDesc access = {.location = location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  return SharedMemoryStatus(driver.set_access(address, bytes, &access, 1), "cuMemSetAccess", bytes);
}

// Makes the context of `device` current, and returns the driver's number of the device.
absl::StatusOr<CUdevice> EnterContext(const Driver& driver, Device* device) {
  LOSSD_RETURN_IF_ERROR(device->MakeCurrent());
  LOSSD_RETURN_IF_CUDA_ERROR(cudaFree(nullptr), "cudaFree");  // makes the device's context current
  CUdevice ordinal = 0;
  if (driver.get_device(&ordinal) != CUDA_SUCCESS) return absl::UnimplementedError("cuCtxGetDevice failed");
  return ordinal;
}

// Memory of a GPU that this process has created and mapped, with the file descriptor by which other processes
// import it.
class MappedMemory final : public SharedDeviceMemory {
 public:
  MappedMemory(Device* device, const Driver& driver, size_t bytes)
      : device_(device), driver_(driver), bytes_(bytes) {}

  // Call once. After an error the destructor frees what was taken.
  absl::Status Allocate(CUdevice device) {
    const CUmemAllocationProp properties = PropertiesOf(device);
    CUmemGenericAllocationHandle handle = 0;
    if (auto status =
            SharedMemoryStatus(driver_.create(&handle, bytes_, &properties, 0), "cuMemCreate", bytes_);
        !status.ok())
      return status;
    const absl::Status status = Map(handle, properties.location);
    driver_.release(handle);  // the mapping and the descriptor hold the memory
    if (!status.ok()) return status;
    device_->ledger().Add(MemoryKind::kSlots, static_cast<int64_t>(bytes_));
    counted_ = true;
    return device_->Fail(ZeroAndWait(data(), static_cast<int64_t>(bytes_)));
  }

  ~MappedMemory() override {
    device_->MakeCurrent().IgnoreError();  // the memory of a lost device is freed when the process ends
    if (mapped_) driver_.unmap(address_, bytes_);
    if (address_ != 0) driver_.free_address(address_, bytes_);
    if (descriptor_ >= 0) close(descriptor_);
    if (counted_) device_->ledger().Remove(MemoryKind::kSlots, static_cast<int64_t>(bytes_));
  }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  absl::Span<uint8_t> bytes() const override { return {data(), bytes_}; }
  int descriptor() const override { return descriptor_; }
  absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const override {
    return Copy(to, from.data(), from.size());
  }
  absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const override {
    return Copy(to.data(), from, to.size());
  }

 private:
  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }

  absl::Status Map(CUmemGenericAllocationHandle handle, CUmemLocation location) {
    absl::Status status =
        SharedMemoryStatus(driver_.reserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve", bytes_);
    if (status.ok())
      status = SharedMemoryStatus(driver_.map(address_, bytes_, 0, handle, 0), "cuMemMap", bytes_);
    mapped_ = status.ok();
    if (status.ok()) status = GiveAccess(driver_, address_, bytes_, location);
    if (status.ok()) {
      status = SharedMemoryStatus(
          driver_.export_handle(&descriptor_, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "cuMemExportToShareableHandle", bytes_);
    }
    return status;
  }

  absl::Status Copy(void* to, const void* from, size_t bytes) const {
    LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
    return device_->Fail(CopyAndWait(to, from, static_cast<int64_t>(bytes)));
  }

  Device* const device_;
  const Driver& driver_;
  const size_t bytes_;
  CUdeviceptr address_ = 0;
  bool mapped_ = false;
  bool counted_ = false;
  int descriptor_ = -1;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(Device* device, int64_t bytes) {
  const Driver* const driver = FindDriver();
  if (driver == nullptr) return absl::UnimplementedError("the driver shares no memory of GPUs");
  const absl::StatusOr<CUdevice> ordinal = EnterContext(*driver, device);
  if (!ordinal.ok()) return ordinal.status();
  if (!CanExport(*driver, *ordinal))
    return absl::UnimplementedError("this GPU shares no memory by file descriptors");
  const CUmemAllocationProp properties = PropertiesOf(*ordinal);
  size_t page = 0;
  if (driver->granularity(&page, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS || page == 0)
    return absl::UnimplementedError("cuMemGetAllocationGranularity failed");
  const auto whole = static_cast<size_t>(RoundUp(bytes, static_cast<int64_t>(page)));
  auto memory = std::make_unique<MappedMemory>(device, *driver, whole);
  if (absl::Status status = memory->Allocate(*ordinal); !status.ok()) return status;
  return memory;
}

absl::Status ReachDeviceMemory(Device* device, absl::Span<uint8_t> memory) {
  const Driver* const driver = FindDriver();
  if (driver == nullptr) return absl::UnimplementedError("the driver shares no memory of GPUs");
  const absl::StatusOr<CUdevice> ordinal = EnterContext(*driver, device);
  if (!ordinal.ok()) return ordinal.status();
  return GiveAccess(*driver, reinterpret_cast<CUdeviceptr>(memory.data()), memory.size(),
                    {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = *ordinal});
}

}  // namespace lossd::kernels::cuda
