// SPDX-License-Identifier: Apache-2.0
// A GPU backend for a lossd program of the tests: it computes on the CPU, and shares "memory of its device"
// with clients of the host. Whoever follows an address of that memory ends with SIGSEGV, as on a machine with
// a GPU; what computes gets at it by a second mapping. Clients import it by mapping its descriptor.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/device_memory_sharer.h"
#include "kernels/gpu_backend.h"
#include "tests/server/app/forwarding_backend.h"

namespace lossd::kernels {
namespace {

constexpr char kUuid[] = "GPU-00000000-0000-0000-0000-000000000001";

// From addresses of the device to those of the second mapping. Thread-safe.
class AddressTable {
 public:
  void Add(uint8_t* of_device, size_t bytes, uint8_t* of_host) {
    absl::MutexLock lock(&mutex_);
    ranges_[of_device] = {bytes, of_host};
  }
  void Remove(uint8_t* of_device) {
    absl::MutexLock lock(&mutex_);
    ranges_.erase(of_device);
  }
  // Other addresses are the host's.
  uint8_t* Find(const void* address) const {
    auto* const at = const_cast<uint8_t*>(static_cast<const uint8_t*>(address));
    absl::MutexLock lock(&mutex_);
    auto range = ranges_.upper_bound(at);
    if (range == ranges_.begin()) return at;
    --range;
    const size_t offset = static_cast<size_t>(at - range->first);
    return offset < range->second.bytes ? range->second.of_host + offset : at;
  }

 private:
  struct Range {
    size_t bytes = 0;
    uint8_t* of_host = nullptr;
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
  explicit DeviceMemory(size_t bytes) : bytes_(bytes), descriptor_(memfd_create("device", MFD_CLOEXEC)) {
    if (ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) std::abort();
    of_device_ = static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, descriptor_, 0));
    of_host_ =
        static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0));
    Addresses().Add(of_device_, bytes, of_host_);
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
    std::copy_n(Addresses().Find(from.data()), from.size(), to);
    return absl::OkStatus();
  }
  absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const override {
    std::copy_n(from, to.size(), Addresses().Find(to.data()));
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
  using ForwardingHead::ForwardingHead;
  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override {
    for (Slice& slice : chunk->slices) {
      if (slice.hidden != nullptr) slice.hidden = Addresses().Find(slice.hidden);
      if (slice.grad_hidden != nullptr) slice.grad_hidden = Addresses().Find(slice.grad_hidden);
    }
    ForwardingHead::Submit(chunk, std::move(callbacks));
  }
  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                          absl::Span<uint8_t> out) override {
    return ForwardingHead::ReadTensor(id, row_begin, rows, dtype, {Addresses().Find(out.data()), out.size()});
  }
};

class DeviceBackend final : public ForwardingBackend, public DeviceMemorySharer {
 public:
  using ForwardingBackend::ForwardingBackend;
  BackendInfo info() const override {
    BackendInfo info = ForwardingBackend::info();
    info.uuids = {kUuid};
    return info;
  }
  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    auto head = ForwardingBackend::CreateHead(config);
    if (!head.ok()) return head.status();
    return std::make_unique<DeviceHead>(*std::move(head));
  }
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(int64_t bytes) override {
    constexpr int64_t kPage = 4096;
    return std::make_unique<DeviceMemory>(static_cast<size_t>((bytes + kPage - 1) / kPage * kPage));
  }
};

}  // namespace

// In place of that of the build.
absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice& choice) {
  CpuBackendOptions options;
  options.threads = 1;
  if (choice.workspace_bytes > 0) options.workspace_bytes = choice.workspace_bytes;
  auto backend = CreateCpuBackend(options);
  if (!backend.ok()) return backend.status();
  return std::make_unique<DeviceBackend>(*std::move(backend));
}

absl::StatusOr<std::unique_ptr<RankLink>> CreateGpuLink(const BackendChoice&, Backend*) {
  return absl::UnavailableError("this device has no link");
}

}  // namespace lossd::kernels
