// SPDX-License-Identifier: Apache-2.0
// How much memory this process can still have, as the system says: by MemAvailable, by the limits of its
// control groups (v1 and v2, with the groups around them), and by the limits of the process (ulimit -v, -d).
//
// Thread-safe; every call reads the files anew.
#ifndef LOSSD_KERNELS_HOST_MEMORY_H_
#define LOSSD_KERNELS_HOST_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace lossd::kernels {

// Reads what the system says.
class HostMemory {
 public:
  // What bounds the process most.
  struct Bound {
    int64_t bytes = 0;  // that can still be had; may be negative
    std::string what;   // where that is from, with its figures
  };

  // `root`: what stands before /proc and /sys/fs/cgroup.
  explicit HostMemory(std::string root = "") : root_(std::move(root)) {}

  // Nullopt if the system tells nothing.
  std::optional<Bound> Available() const;
  // Bytes of this process's own memory that are in RAM; 0 if the system does not tell.
  int64_t ResidentBytes() const;

 private:
  const std::string root_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_HOST_MEMORY_H_
