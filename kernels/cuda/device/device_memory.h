// SPDX-License-Identifier: Apache-2.0
// Memory of one GPU and pinned memory of the host, counted by kind. MemoryLedger counts, DeviceBuffer and
// PinnedBuffer own memory, and Carver divides a buffer into pieces. The header needs no CUDA.
//
// MemoryLedger is thread-safe; a DeviceBuffer and a PinnedBuffer are plain owners.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_DEVICE_MEMORY_H_
#define LOSSD_KERNELS_CUDA_DEVICE_DEVICE_MEMORY_H_

#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"

namespace lossd::kernels::cuda {

// The driver hands out device memory in blocks of this size. Buffers are rounded up to it, so that the ledger
// counts the memory that the device really has less.
inline constexpr int64_t kDevicePage = int64_t{2} << 20;

// Scratch memory of matrix products. The products of one stream share it; there is one for each GPU.
inline constexpr int64_t kGemmWorkspaceBytes = int64_t{32} << 20;
// Default workspace of a head, on a GPU with enough free memory: together with the scratch memory 2.2 GiB. A
// chunk of 8192 rows of 128,256 classes fits, or one of 4096 rows of 256,000. Head and server may set another
// limit.
inline constexpr int64_t kDefaultWorkspace = (int64_t{2252} << 20) - kGemmWorkspaceBytes;

// `bytes` rounded up to a multiple of `unit`.
constexpr int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }
// How many parts of size b cover a.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Counts memory by kind.
class MemoryLedger {
 public:
  // `limit_bytes`: the limit that stats() reports for device memory in use.
  explicit MemoryLedger(int64_t limit_bytes) { stats_.limit = limit_bytes; }

  void Add(MemoryKind kind, int64_t bytes);
  void Remove(MemoryKind kind, int64_t bytes);
  MemoryStats stats() const;
  // Bytes of device memory in use.
  int64_t device_bytes() const;

 private:
  mutable absl::Mutex mutex_;
  MemoryStats stats_ ABSL_GUARDED_BY(mutex_);
};

// Device memory, zeroed when allocated, freed when destroyed.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // `bytes` is rounded up to kDevicePage; 0 gives an empty buffer. RESOURCE_EXHAUSTED if the device
  // has too little.
  static absl::StatusOr<DeviceBuffer> Allocate(MemoryLedger* ledger, MemoryKind kind, int64_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  MemoryLedger* ledger_ = nullptr;
  MemoryKind kind_ = MemoryKind::kWorkspace;
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Page-locked host memory.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  static absl::StatusOr<PinnedBuffer> Allocate(MemoryLedger* ledger, int64_t bytes,
                                               MemoryKind kind = MemoryKind::kStaging);
  PinnedBuffer(PinnedBuffer&& other) noexcept { *this = std::move(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  ~PinnedBuffer();

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  MemoryLedger* ledger_ = nullptr;
  MemoryKind kind_ = MemoryKind::kStaging;
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Hands out consecutive, 256-byte aligned pieces of one buffer.
class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {}
  template <typename T>
  T* Take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += RoundUp(count * static_cast<int64_t>(sizeof(T)), 256);
    return piece;
  }
  // An array with one value for each row, for arrays that are read or written together, row by row. A gap
  // follows the array. Without it, arrays of a multiple of 1,024 rows would lie a multiple of 4 KiB apart.
  // The values of one row would then share one set of the processor's first-level cache, and if there are
  // more arrays than the set has lines, they push each other out.
  template <typename T>
  T* TakeRows(int64_t rows) {
    T* const piece = Take<T>(rows);
    used_ += 256;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_DEVICE_MEMORY_H_
