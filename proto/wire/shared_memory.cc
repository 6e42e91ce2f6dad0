// SPDX-License-Identifier: Apache-2.0
// Shared memory by a sealed memfd (shared_memory.h).
#include "proto/wire/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::wire {
namespace {

absl::Status Failed(absl::string_view what, int64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " of ", errors::ExactBytes(bytes), " of shared memory: ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(int64_t bytes) {
  absl::StatusOr<std::unique_ptr<SharedMemory>> memory = Reserve(bytes);
  if (!memory.ok()) return memory;
  LOSSD_RETURN_IF_ERROR((*memory)->Fill());
  return memory;
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Reserve(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t size = (bytes + page - 1) / page * page;
  OwnedDescriptor descriptor(memfd_create("lossd-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor) return Failed("memfd_create", size);
  if (ftruncate(descriptor.get(), size) != 0) return Failed("ftruncate", size);
  if (fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return Failed("sealing", size);
  std::unique_ptr<SharedMemory> memory(new SharedMemory(std::move(descriptor)));
  void* const data =
      mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED, memory->descriptor(), 0);
  if (data == MAP_FAILED) return Failed("mmap", size);
  madvise(data, static_cast<size_t>(size), MADV_DONTFORK);
  memory->bytes_ = {static_cast<uint8_t*>(data), static_cast<size_t>(size)};
  return memory;
}

// Allocates now, because a page that cannot be allocated later would end the process with a signal instead of
// an error.
absl::Status SharedMemory::Fill() {
  const auto size = static_cast<off_t>(bytes_.size());
  if (fallocate(descriptor_.get(), 0, 0, size) != 0) return Failed("allocation", size);
  // Maps all pages now. If that fails, each page is mapped when it is first accessed, which is only slower.
  madvise(bytes_.data(), bytes_.size(), MADV_POPULATE_WRITE);
  return absl::OkStatus();
}

SharedMemory::~SharedMemory() {
  if (bytes_.empty()) return;
  munmap(bytes_.data(), bytes_.size());
  fallocate(descriptor_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
            static_cast<off_t>(bytes_.size()));
}

}  // namespace lossd::wire
