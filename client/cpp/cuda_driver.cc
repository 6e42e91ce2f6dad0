// SPDX-License-Identifier: Apache-2.0
// CUDA's driver, loaded with dlopen (cuda_driver.h). The types and constants of the driver are declared here,
// because the client is built without CUDA's headers.
#include "client/cpp/cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"

namespace lossd::client::internal {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

// The driver's types and constants, which are the same in all versions of the driver.
using Result = int;                    // CUresult
using Device = int;                    // CUdevice
using Address = unsigned long long;    // CUdeviceptr
using Handle = unsigned long long;     // CUmemGenericAllocationHandle
using Uuid = std::array<uint8_t, 16>;  // CUuuid
struct Location {                      // CUmemLocation
  int type;
  int id;
};
struct Access {  // CUmemAccessDesc
  Location location;
  int flags;
};
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;          // CUDA_ERROR_NOT_READY
constexpr Result kAlreadyEnabled = 704;    // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
constexpr int kDeviceOrdinal = 9;          // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr int kPeerRank = 1;               // CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, 0: the fastest
constexpr int kPeerAccess = 2;             // CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
constexpr int kPosixDescriptor = 1;        // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kOnDevice = 1;               // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kReadAndWrite = 3;           // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr unsigned kNonBlocking = 1;       // CU_STREAM_NON_BLOCKING
constexpr unsigned kForAllGpus = 1;        // CU_MEMHOSTREGISTER_PORTABLE
constexpr unsigned kSleeping = 0x1 | 0x2;  // CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING

Address ToAddress(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }
uint8_t* ToPointer(Address address) { return reinterpret_cast<uint8_t*>(address); }

}  // namespace

// Pointers to the functions of the driver's library. Their names are in the constructor.
struct CudaDriver::Functions {
  Result (*init)(unsigned) = nullptr;
  Result (*error_string)(Result, const char**) = nullptr;
  Result (*count)(int*) = nullptr;
  Result (*uuid)(void* /*Uuid*/, Device) = nullptr;
  Result (*peer_attribute)(int*, int, Device, Device) = nullptr;
  Result (*pointer_attribute)(void*, int, Address) = nullptr;
  Result (*retain_context)(void**, Device) = nullptr;
  Result (*current_device)(Device*) = nullptr;
  Result (*push_context)(void*) = nullptr;
  Result (*pop_context)(void**) = nullptr;
  Result (*enable_peer)(void*, unsigned) = nullptr;
  Result (*import_handle)(Handle*, void*, int) = nullptr;
  Result (*release_handle)(Handle) = nullptr;
  Result (*reserve)(Address*, size_t, size_t, Address, unsigned long long) = nullptr;
  Result (*free_reserved)(Address, size_t) = nullptr;
  Result (*map)(Address, size_t, size_t, Handle, unsigned long long) = nullptr;
  Result (*unmap)(Address, size_t) = nullptr;
  Result (*set_access)(Address, size_t, const void* /*Access*/, size_t) = nullptr;
  Result (*allocate)(Address*, size_t) = nullptr;
  Result (*free)(Address) = nullptr;
  Result (*register_host)(void*, size_t, unsigned) = nullptr;
  Result (*unregister_host)(void*) = nullptr;
  Result (*copy)(Address, Address, size_t, void*) = nullptr;
  Result (*fill)(Address, unsigned char, size_t, void*) = nullptr;
  Result (*create_stream)(void**, unsigned) = nullptr;
  Result (*await_stream)(void*) = nullptr;
  Result (*order_stream)(void*, void*, unsigned) = nullptr;
  Result (*destroy_stream)(void*) = nullptr;
  Result (*create_event)(void**, unsigned) = nullptr;
  Result (*record_event)(void*, void*) = nullptr;
  Result (*query_event)(void*) = nullptr;
  Result (*await_event)(void*) = nullptr;
  Result (*destroy_event)(void*) = nullptr;
  absl::string_view missing;  // the first function that the library lacks

  explicit Functions(void* library) {
    Find(library, "cuInit", init);
    Find(library, "cuGetErrorString", error_string);
    Find(library, "cuDeviceGetCount", count);
    Find(library, "cuDeviceGetUuid_v2", uuid);
    Find(library, "cuDeviceGetP2PAttribute", peer_attribute);
    Find(library, "cuPointerGetAttribute", pointer_attribute);
    Find(library, "cuDevicePrimaryCtxRetain", retain_context);
    Find(library, "cuCtxGetDevice", current_device);
    Find(library, "cuCtxPushCurrent_v2", push_context);
    Find(library, "cuCtxPopCurrent_v2", pop_context);
    Find(library, "cuCtxEnablePeerAccess", enable_peer);
    Find(library, "cuMemImportFromShareableHandle", import_handle);
    Find(library, "cuMemRelease", release_handle);
    Find(library, "cuMemAddressReserve", reserve);
    Find(library, "cuMemAddressFree", free_reserved);
    Find(library, "cuMemMap", map);
    Find(library, "cuMemUnmap", unmap);
    Find(library, "cuMemSetAccess", set_access);
    Find(library, "cuMemAlloc_v2", allocate);
    Find(library, "cuMemFree_v2", free);
    Find(library, "cuMemHostRegister_v2", register_host);
    Find(library, "cuMemHostUnregister", unregister_host);
    Find(library, "cuMemcpyAsync", copy);
    Find(library, "cuMemsetD8Async", fill);
    Find(library, "cuStreamCreate", create_stream);
    Find(library, "cuStreamSynchronize", await_stream);
    Find(library, "cuStreamWaitEvent", order_stream);
    Find(library, "cuStreamDestroy_v2", destroy_stream);
    Find(library, "cuEventCreate", create_event);
    Find(library, "cuEventRecord", record_event);
    Find(library, "cuEventQuery", query_event);
    Find(library, "cuEventSynchronize", await_event);
    Find(library, "cuEventDestroy_v2", destroy_event);
  }

 private:
  template <typename Function>
  void Find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = name;
  }
};

// A stream for the client's own copies, and an event that marks the end of the last copy on it. Lanes are
// kept for later copies (lanes_).
struct CudaDriver::Lane {
  void* stream = nullptr;
  void* end = nullptr;
};

// Makes a device's primary context current on the calling thread. The destructor makes the former context
// current again.
class CudaDriver::Entered {
 public:
  Entered(CudaDriver* driver, int device) : driver_(driver) {
    const absl::StatusOr<void*> context = driver->Context(device);
    status_ = context.ok() ? driver->Check(driver->functions_->push_context(*context), "cuCtxPushCurrent")
                           : context.status();
  }
  ~Entered() {
    void* context = nullptr;
    if (status_.ok()) driver_->functions_->pop_context(&context);
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  CudaDriver* const driver_;
  absl::Status status_;
};

absl::StatusOr<CudaDriver*> CudaDriver::Get() {
  static auto* const mutex = new absl::Mutex();
  static CudaDriver* driver = nullptr;  // null until the driver has been loaded
  absl::MutexLock lock(mutex);
  if (driver != nullptr) return driver;
  LOSSD_TRY(std::unique_ptr<CudaDriver> loaded, Load(kLibrary));
  driver = loaded.release();
  return driver;
}

absl::StatusOr<std::unique_ptr<CudaDriver>> CudaDriver::Load(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: it has threads
  if (handle == nullptr) return absl::UnavailableError(absl::StrCat("no CUDA driver: ", dlerror()));
  auto functions = std::make_unique<const Functions>(handle);
  if (!functions->missing.empty())
    return absl::UnavailableError(absl::StrCat("no CUDA driver: ", library, " lacks ", functions->missing));
  std::unique_ptr<CudaDriver> driver(new CudaDriver(std::move(functions)));
  LOSSD_RETURN_IF_ERROR(driver->Check(driver->functions_->init(0), "cuInit"));
  return driver;
}

CudaDriver::CudaDriver(std::unique_ptr<const Functions> functions) : functions_(std::move(functions)) {}

CudaDriver::~CudaDriver() = default;

absl::Status CudaDriver::Check(int result, absl::string_view function) const {
  if (result == kSuccess) return absl::OkStatus();
  const char* text = nullptr;
  functions_->error_string(result, &text);
  return absl::UnavailableError(
      absl::StrCat(function, " failed: ", text == nullptr ? "an unknown error" : text, " (", result, ")"));
}

absl::StatusOr<int> CudaDriver::Count() const {
  int count = 0;
  LOSSD_RETURN_IF_ERROR(Check(functions_->count(&count), "cuDeviceGetCount"));
  return count;
}

absl::StatusOr<std::string> CudaDriver::UuidOf(int device) const {
  Uuid raw = {};
  LOSSD_RETURN_IF_ERROR(Check(functions_->uuid(&raw, device), "cuDeviceGetUuid"));
  const std::string hex = absl::BytesToHexString({reinterpret_cast<const char*>(raw.data()), raw.size()});
  const absl::string_view text = hex;
  return absl::StrCat("GPU-", text.substr(0, 8), "-", text.substr(8, 4), "-", text.substr(12, 4), "-",
                      text.substr(16, 4), "-", text.substr(20));
}

absl::StatusOr<std::optional<int>> CudaDriver::Find(absl::string_view uuid) const {
  LOSSD_TRY(const int count, Count());
  for (int device = 0; device < count; ++device) {
    LOSSD_TRY(const std::string found, UuidOf(device));
    if (uuid == found) return device;
  }
  return std::nullopt;
}

std::optional<int> CudaDriver::Current() const {
  int device = 0;
  if (functions_->current_device(&device) != kSuccess) return std::nullopt;
  return device;
}

std::optional<int> CudaDriver::Distance(int from, int to) const {
  if (from == to) return 0;
  int reached = 0, rank = 0;
  if (functions_->peer_attribute(&reached, kPeerAccess, from, to) != kSuccess || reached == 0 ||
      functions_->peer_attribute(&rank, kPeerRank, from, to) != kSuccess)
    return std::nullopt;
  return 1 + rank;
}

absl::StatusOr<int> CudaDriver::DeviceOf(const void* address) {
  int device = 0;
  const Result result = functions_->pointer_attribute(&device, kDeviceOrdinal, ToAddress(address));
  LOSSD_RETURN_IF_ERROR(Check(result, "cuPointerGetAttribute"));
  return device;
}

absl::StatusOr<void*> CudaDriver::Context(int device) {
  absl::MutexLock lock(&mu_);
  void*& context = contexts_[device];
  if (context == nullptr)
    LOSSD_RETURN_IF_ERROR(Check(functions_->retain_context(&context, device), "cuDevicePrimaryCtxRetain"));
  return context;
}

absl::StatusOr<uint8_t*> CudaDriver::Import(int descriptor, uint64_t bytes, int device) {
  const Entered current(this, device);
  if (!current.status().ok()) return current.status();
  Handle handle = 0;
  absl::Status status =
      Check(functions_->import_handle(&handle, ToPointer(static_cast<Address>(descriptor)), kPosixDescriptor),
            "cuMemImportFromShareableHandle");
  if (!status.ok()) return status;
  Address address = 0;
  status = Check(functions_->reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
  if (status.ok()) {
    status = Map(address, bytes, handle, device);
    if (!status.ok()) functions_->free_reserved(address, bytes);
  }
  functions_->release_handle(handle);  // the mapping keeps the memory
  if (!status.ok()) return status;
  return ToPointer(address);
}

absl::Status CudaDriver::Map(uint64_t address, uint64_t bytes, uint64_t handle, int device) const {
  absl::Status status = Check(functions_->map(address, bytes, 0, handle, 0), "cuMemMap");
  if (!status.ok()) return status;
  status = GiveAccess(address, bytes, device);
  if (!status.ok()) functions_->unmap(address, bytes);
  return status;
}

absl::Status CudaDriver::GiveAccess(uint64_t address, uint64_t bytes, int device) const {
  const Access access{{kOnDevice, device}, kReadAndWrite};
  return Check(functions_->set_access(address, bytes, &access, 1), "cuMemSetAccess");
}

bool CudaDriver::LetReach(uint8_t* address, uint64_t bytes, int owner, int other) {
  const std::pair<uint64_t, int> key(ToAddress(address), other);
  {
    absl::MutexLock lock(&mu_);
    if (const auto known = reached_.find(key); known != reached_.end()) return known->second;
  }
  const bool connected = Connect(key.first, bytes, owner, other).ok();  // harmless if two threads do it
  absl::MutexLock lock(&mu_);
  reached_[key] = connected;
  return connected;
}

absl::Status CudaDriver::Connect(uint64_t address, uint64_t bytes, int owner, int other) {
  const Entered current(this, owner);
  if (!current.status().ok()) return current.status();
  LOSSD_TRY(void* const context, Context(other));
  LOSSD_RETURN_IF_ERROR(GiveAccess(address, bytes, other));
  const Result enabled = functions_->enable_peer(context, 0);
  return enabled == kAlreadyEnabled ? absl::OkStatus() : Check(enabled, "cuCtxEnablePeerAccess");
}

void CudaDriver::Unmap(uint8_t* address, uint64_t bytes, int device) {
  const Entered current(this, device);
  if (!current.status().ok()) return;
  {
    absl::MutexLock lock(&mu_);
    const uint64_t begin = ToAddress(address);
    reached_.erase(reached_.lower_bound({begin, 0}), reached_.lower_bound({begin + 1, 0}));
  }
  functions_->unmap(ToAddress(address), bytes);
  functions_->free_reserved(ToAddress(address), bytes);
}

absl::StatusOr<uint8_t*> CudaDriver::Allocate(uint64_t bytes, int device) {
  const Entered current(this, device);
  if (!current.status().ok()) return current.status();
  Address address = 0;
  LOSSD_RETURN_IF_ERROR(Check(functions_->allocate(&address, bytes), "cuMemAlloc"));
  return ToPointer(address);
}

void CudaDriver::Free(uint8_t* address, int device) {
  const Entered current(this, device);
  if (current.status().ok()) functions_->free(ToAddress(address));
}

absl::Status CudaDriver::Pin(void* memory, uint64_t bytes, int device) {
  const Entered current(this, device);
  if (!current.status().ok()) return current.status();
  const uint64_t page = sysconf(_SC_PAGESIZE);
  const uint64_t whole = (bytes + page - 1) / page * page;
  return Check(functions_->register_host(memory, whole, kForAllGpus), "cuMemHostRegister");
}

void CudaDriver::Unpin(void* memory, int device) {
  const Entered current(this, device);
  if (current.status().ok()) functions_->unregister_host(memory);
}

absl::Status CudaDriver::Copy(void* to, const void* from, uint64_t bytes, int device,
                              const StreamPoint* after) {
  if (bytes == 0) return absl::OkStatus();
  return Run(device, after, [&](void* stream) {
    return Check(functions_->copy(ToAddress(to), ToAddress(from), bytes, stream), "cuMemcpyAsync");
  });
}

absl::Status CudaDriver::FillZeros(void* to, uint64_t bytes, int device, const StreamPoint* after) {
  if (bytes == 0) return absl::OkStatus();
  return Run(device, after, [&](void* stream) {
    return Check(functions_->fill(ToAddress(to), 0, bytes, stream), "cuMemsetD8Async");
  });
}

absl::StatusOr<std::shared_ptr<const StreamPoint>> CudaDriver::PointOf(void* stream, int device) {
  const Entered current(this, device);
  if (!current.status().ok()) return current.status();
  void* event = nullptr;
  LOSSD_RETURN_IF_ERROR(Check(functions_->create_event(&event, kSleeping), "cuEventCreate"));
  auto point = std::make_shared<const StreamPoint>(this, event, device);
  LOSSD_RETURN_IF_ERROR(Check(functions_->record_event(event, stream), "cuEventRecord"));
  return point;
}

absl::Status CudaDriver::Await(const StreamPoint& point) {
  const Entered current(this, point.device());
  if (!current.status().ok()) return current.status();
  return Check(functions_->await_event(point.event()), "cuEventSynchronize");
}

StreamPoint::~StreamPoint() {
  const CudaDriver::Entered current(driver_, device_);
  if (current.status().ok()) driver_->functions_->destroy_event(event_);
}

absl::Status CudaDriver::Run(int device, const StreamPoint* after,
                             absl::FunctionRef<absl::Status(void* stream)> enqueue) {
  const Entered current(this, device);
  if (!current.status().ok()) return current.status();
  LOSSD_TRY(const Lane lane, TakeLane(device));
  absl::Status status;
  if (after != nullptr)
    status = Check(functions_->order_stream(lane.stream, after->event(), 0), "cuStreamWaitEvent");
  if (status.ok()) status = enqueue(lane.stream);
  if (status.ok()) status = Await(lane);
  if (!status.ok()) {
    Destroy(lane);
    return status;
  }
  absl::MutexLock lock(&mu_);
  lanes_[device].push_back(lane);
  return absl::OkStatus();
}

absl::StatusOr<CudaDriver::Lane> CudaDriver::TakeLane(int device) {
  {
    absl::MutexLock lock(&mu_);
    std::vector<Lane>& idle = lanes_[device];
    if (!idle.empty()) {
      const Lane lane = idle.back();
      idle.pop_back();
      return lane;
    }
  }
  Lane lane;
  absl::Status status = Check(functions_->create_stream(&lane.stream, kNonBlocking), "cuStreamCreate");
  if (!status.ok()) return status;
  status = Check(functions_->create_event(&lane.end, kSleeping), "cuEventCreate");
  if (!status.ok()) {
    functions_->destroy_stream(lane.stream);
    return status;
  }
  return lane;
}

absl::Status CudaDriver::Await(const Lane& lane) const {
  LOSSD_RETURN_IF_ERROR(Check(functions_->record_event(lane.end, lane.stream), "cuEventRecord"));
  Result state = kNotReady;
  const auto happened = [&] {
    state = functions_->query_event(lane.end);
    return state != kNotReady;
  };
  if (clocks::AskBeforeSleeping(happened)) return Check(state, "cuEventQuery");
  return Check(functions_->await_event(lane.end), "cuEventSynchronize");
}

void CudaDriver::Destroy(const Lane& lane) const {
  functions_->await_stream(lane.stream);
  functions_->destroy_event(lane.end);
  functions_->destroy_stream(lane.stream);
}

// ---- Functions that load the driver themselves ----

// Copies and fills of host memory need no driver.

bool LetReach(uint8_t* address, uint64_t bytes, int owner, int other) {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  return driver.ok() && (*driver)->LetReach(address, bytes, owner, other);
}

absl::Status CopyBytes(void* to, const void* from, uint64_t bytes, std::optional<int> gpu,
                       const StreamPoint* after) {
  if (!gpu.has_value()) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  return driver.ok() ? (*driver)->Copy(to, from, bytes, *gpu, after) : driver.status();
}

absl::Status FillZeros(void* to, uint64_t bytes, std::optional<int> gpu, const StreamPoint* after) {
  if (!gpu.has_value()) {
    if (bytes > 0) std::memset(to, 0, bytes);
    return absl::OkStatus();
  }
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  return driver.ok() ? (*driver)->FillZeros(to, bytes, *gpu, after) : driver.status();
}

}  // namespace lossd::client::internal
