// SPDX-License-Identifier: Apache-2.0
// MemoryLedger, DeviceBuffer and PinnedBuffer (device_memory.h).
#include "kernels/cuda/device/device_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels::cuda {

void MemoryLedger::Add(MemoryKind kind, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  stats_.current[kind] += bytes;
  stats_.peak[kind] = std::max(stats_.peak[kind], stats_.current[kind]);
  stats_.peak_total = std::max(stats_.peak_total, stats_.current.Total());
}

void MemoryLedger::Remove(MemoryKind kind, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  stats_.current[kind] -= bytes;
}

MemoryStats MemoryLedger::stats() const {
  absl::MutexLock lock(&mutex_);
  return stats_;
}

int64_t MemoryLedger::device_bytes() const {
  absl::MutexLock lock(&mutex_);
  return stats_.current.OnDevice();
}

absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(MemoryLedger* ledger, MemoryKind kind, int64_t bytes) {
  DeviceBuffer buffer;
  if (bytes == 0) return buffer;
  const int64_t rounded = RoundUp(bytes, kDevicePage);
  void* data = nullptr;
  if (const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(rounded)); error != cudaSuccess) {
    cudaGetLastError();  // a failed allocation leaves the device usable; forget the error
    return ToStatus(error, absl::StrCat("cudaMalloc of ", errors::ExactBytes(rounded), " for ", Name(kind)));
  }
  buffer.ledger_ = ledger;
  buffer.kind_ = kind;
  buffer.data_ = static_cast<uint8_t*>(data);
  buffer.bytes_ = rounded;
  ledger->Add(kind, rounded);
  LOSSD_RETURN_IF_ERROR(ZeroAndWait(data, rounded));
  return buffer;
}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(ledger_, other.ledger_);
  std::swap(kind_, other.kind_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  cudaFree(data_);
  ledger_->Remove(kind_, bytes_);
}

absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(MemoryLedger* ledger, int64_t bytes, MemoryKind kind) {
  PinnedBuffer buffer;
  if (bytes == 0) return buffer;
  void* data = nullptr;
  if (const cudaError_t error = cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable);
      error != cudaSuccess) {
    cudaGetLastError();  // as in DeviceBuffer::Allocate
    return ToStatus(error, absl::StrCat("cudaHostAlloc of ", errors::ExactBytes(bytes)));
  }
  buffer.ledger_ = ledger;
  buffer.data_ = static_cast<uint8_t*>(data);
  buffer.bytes_ = bytes;
  buffer.kind_ = kind;
  ledger->Add(kind, bytes);
  return buffer;
}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(ledger_, other.ledger_);
  std::swap(kind_, other.kind_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ == nullptr) return;
  cudaFreeHost(data_);
  ledger_->Remove(kind_, bytes_);
}

}  // namespace lossd::kernels::cuda
