// SPDX-License-Identifier: Apache-2.0
// Retained hidden states of the CPU backend: plain host memory. Thread-compatible.
#ifndef LOSSD_KERNELS_CPU_CPU_RETAINED_H_
#define LOSSD_KERNELS_CPU_CPU_RETAINED_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cpu/accounting.h"
#include "kernels/cpu/arena.h"
#include "kernels/host_bytes.h"

namespace lossd::kernels {

class CpuRetained final : public RetainedMemory, public HostBytes {
 public:
  CpuRetained(AlignedBytes memory, int64_t bytes, MemoryAccounting::Reservation reservation)
      : reservation_(std::move(reservation)), memory_(std::move(memory)), bytes_(bytes) {}

  int64_t size() const override { return bytes_; }
  absl::Status ReadBytes(int64_t offset, absl::Span<uint8_t> out) const override {
    std::copy_n(memory_.get() + offset, out.size(), out.data());
    return absl::OkStatus();
  }
  absl::Status WriteBytes(int64_t offset, absl::Span<const uint8_t> in) override {
    std::copy_n(in.data(), in.size(), memory_.get() + offset);
    return absl::OkStatus();
  }
  uint8_t* data() { return memory_.get(); }

 private:
  const MemoryAccounting::Reservation reservation_;
  const AlignedBytes memory_;
  const int64_t bytes_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_RETAINED_H_
