// SPDX-License-Identifier: Apache-2.0
// A GPU backend for a lossd program of the tests: it computes on the CPU, and shares "memory of its device"
// with clients of the host. Whoever follows an address of that memory ends with SIGSEGV, as on a machine with
// GPUs; what computes on a device that has access gets at it by a second mapping. Clients import it by
// mapping its descriptor.
//
// There are four devices. --devices=all has the first two, and --devices=1,2,3 for example those, each of
// which reaches memory of the others as far as it is told to. Nothing connects those that are named in
// another order than their own, as by --devices=1,0.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/create_backend.h"
#include "kernels/device_choice.h"
#include "kernels/errors/field_error.h"
#include "kernels/group/group_backend.h"
#include "tests/server/app/forwarding_backend.h"

namespace lossd::kernels {
namespace {

std::string UuidOf(int device) { return absl::StrCat("GPU-00000000-0000-0000-0000-00000000000", device + 1); }

// From addresses of the devices to those of the second mapping. Thread-safe.
class AddressTable {
 public:
  static constexpr int kHost = -1;  // reaches all

  void Add(uint8_t* of_device, size_t bytes, uint8_t* of_host, int device) {
    absl::MutexLock lock(&mutex_);
    ranges_[of_device] = {bytes, of_host, {kHost, device}};
  }
  void Remove(uint8_t* of_device) {
    absl::MutexLock lock(&mutex_);
    ranges_.erase(of_device);
  }
  void GiveAccess(uint8_t* of_device, int device) {
    absl::MutexLock lock(&mutex_);
    ranges_.at(of_device).reached_by.insert(device);
  }
  // Addresses that the device has no access to stay, and so do others, which are the host's.
  uint8_t* Find(const void* address, int device) const {
    auto* const at = const_cast<uint8_t*>(static_cast<const uint8_t*>(address));
    absl::MutexLock lock(&mutex_);
    auto range = ranges_.upper_bound(at);
    if (range == ranges_.begin()) return at;
    --range;
    const size_t offset = static_cast<size_t>(at - range->first);
    const bool reached = offset < range->second.bytes && range->second.reached_by.count(device) > 0;
    return reached ? range->second.of_host + offset : at;
  }

 private:
  struct Range {
    size_t bytes = 0;
    uint8_t* of_host = nullptr;
    std::set<int> reached_by;
  };
  mutable absl::Mutex mutex_;
  std::map<uint8_t*, Range> ranges_ ABSL_GUARDED_BY(mutex_);
};

AddressTable& Addresses() {
  static auto* const table = new AddressTable();
  return *table;
}

class DeviceMemory final : public SharedDeviceMemory {
 public:
  DeviceMemory(size_t bytes, int device) : bytes_(bytes), descriptor_(memfd_create("device", MFD_CLOEXEC)) {
    if (ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) std::abort();
    of_device_ = static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, descriptor_, 0));
    of_host_ =
        static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0));
    Addresses().Add(of_device_, bytes, of_host_, device);
  }
  ~DeviceMemory() override {
    Addresses().Remove(of_device_);
    munmap(of_device_, bytes_);
    munmap(of_host_, bytes_);
    close(descriptor_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  absl::Span<uint8_t> bytes() const override { return {of_device_, bytes_}; }
  int descriptor() const override { return descriptor_; }
  absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const override {
    std::copy_n(Addresses().Find(from.data(), AddressTable::kHost), from.size(), to);
    return absl::OkStatus();
  }
  absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const override {
    std::copy_n(from, to.size(), Addresses().Find(to.data(), AddressTable::kHost));
    return absl::OkStatus();
  }

 private:
  const size_t bytes_;
  const int descriptor_;
  uint8_t* of_device_ = nullptr;
  uint8_t* of_host_ = nullptr;
};

class DeviceHead final : public ForwardingHead {
 public:
  DeviceHead(std::unique_ptr<HeadKernels> head, int device)
      : ForwardingHead(std::move(head)), device_(device) {}
  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override {
    for (Slice& slice : chunk->slices) {
      if (slice.hidden != nullptr) slice.hidden = Addresses().Find(slice.hidden, device_);
      if (slice.grad_hidden != nullptr) slice.grad_hidden = Addresses().Find(slice.grad_hidden, device_);
    }
    ForwardingHead::Submit(chunk, std::move(callbacks));
  }
  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                          absl::Span<uint8_t> out) override {
    return ForwardingHead::ReadTensor(id, row_begin, rows, dtype,
                                      {Addresses().Find(out.data(), device_), out.size()});
  }

 private:
  const int device_;
};

class DeviceBackend final : public ForwardingBackend {
 public:
  DeviceBackend(std::unique_ptr<Backend> backend, int device, bool connected)
      : ForwardingBackend(std::move(backend)), device_(device), connected_(connected) {}
  BackendInfo info() const override {
    BackendInfo info = ForwardingBackend::info();
    info.uuids = {UuidOf(device_)};
    return info;
  }
  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    auto head = ForwardingBackend::CreateHead(config);
    if (!head.ok()) return head.status();
    return std::make_unique<DeviceHead>(*std::move(head), device_);
  }
  std::vector<std::string> SharingDevices() const override { return {UuidOf(device_)}; }
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(absl::string_view device,
                                                                        int64_t bytes) override {
    if (device != UuidOf(device_)) return errors::FieldError("device", "be this one", device);
    constexpr int64_t kPage = 4096;
    return std::make_unique<DeviceMemory>(static_cast<size_t>((bytes + kPage - 1) / kPage * kPage), device_);
  }
  absl::Status ReachDeviceMemory(absl::Span<uint8_t> memory) override {
    if (!connected_) return absl::UnimplementedError("nothing connects these GPUs");
    Addresses().GiveAccess(memory.data(), device_);
    return absl::OkStatus();
  }

 private:
  const int device_;
  const bool connected_;
};

std::vector<HeadKernels*> InnerOf(absl::Span<HeadKernels* const> heads) {
  std::vector<HeadKernels*> inner;
  for (HeadKernels* const head : heads) inner.push_back(&dynamic_cast<DeviceHead*>(head)->inner());
  return inner;
}

// The devices that --devices names.
std::vector<int> DevicesOf(const BackendChoice& choice) {
  std::vector<int> devices;
  for (const absl::string_view name : absl::StrSplit(choice.devices == "all" ? "0,1" : choice.devices, ',')) {
    int device = 0;
    if (absl::SimpleAtoi(name, &device) && device >= 0 && device < 4) devices.push_back(device);
  }
  return devices;
}

absl::StatusOr<std::unique_ptr<Backend>> CreateSeveral(const CpuBackendOptions& options,
                                                       const BackendChoice& choice) {
  const std::vector<int> devices = DevicesOf(choice);
  if (devices.empty()) return errors::FieldError("devices", "name some of 0 to 3", choice.devices);
  const bool connected = std::is_sorted(devices.begin(), devices.end());
  auto members = CreateCpuMembers(options, static_cast<int>(devices.size()));
  if (!members.ok()) return members.status();
  for (size_t i = 0; i < devices.size(); ++i) {
    std::unique_ptr<Backend>& member = (*members)[i];
    member = std::make_unique<DeviceBackend>(std::move(member), devices[i], connected);
  }
  return CreateGroupBackend(
      *std::move(members),
      [](absl::Span<HeadKernels* const> heads) -> absl::StatusOr<std::unique_ptr<Replicas>> {
        return MakeCpuReplicas(InnerOf(heads));
      },
      {.least_rows = 8,
       .members_share_memory = true,
       .split = *SplitOf(choice),
       .join_classes = [](absl::Span<HeadKernels* const> heads) { return JoinCpuClasses(InnerOf(heads)); }});
}

}  // namespace

// In place of that of the build.
absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice& choice) {
  CpuBackendOptions options;
  options.threads = choice.devices.empty() ? 1 : static_cast<int>(DevicesOf(choice).size());
  if (choice.workspace_bytes > 0) options.workspace_bytes = choice.workspace_bytes;
  if (!choice.devices.empty()) return CreateSeveral(options, choice);
  auto backend = CreateCpuBackend(options);
  if (!backend.ok()) return backend.status();
  return std::make_unique<DeviceBackend>(*std::move(backend), 0, /*connected=*/true);
}

absl::StatusOr<std::vector<std::string>> GpuUuidsOf(const std::string&) {
  return absl::UnavailableError("this device is not one of several ranks");
}

absl::StatusOr<std::unique_ptr<RankLink>> CreateGpuLink(const BackendChoice&, Backend*) {
  return absl::UnavailableError("this device has no link");
}

}  // namespace lossd::kernels
