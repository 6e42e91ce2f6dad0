// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/shared_region.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/cuda_driver.h"
#include "kernels/clocks/clock.h"

namespace lossd::client::internal {
namespace {

absl::Status NoRegion(absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("no shared memory: ", why));
}

uint64_t Aligned(uint64_t bytes) {
  constexpr uint64_t kUnit = SharedRegion::kAlignment;
  return (bytes + kUnit - 1) / kUnit * kUnit;
}

absl::StatusOr<wire::RegionPacket> AwaitPacket(int socket, absl::Duration timeout) {
  const absl::Time end = clocks::SteadyNow() + timeout;
  pollfd ready = {.fd = socket, .events = POLLIN};
  int result = 0;
  do {
    const absl::Duration left = std::max(end - clocks::SteadyNow(), absl::ZeroDuration());
    result = poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(left)));
  } while (result < 0 && errno == EINTR);
  if (result == 0) return NoRegion("the server does not answer on its socket");
  if (result < 0) return NoRegion(std::strerror(errno));
  return wire::ReceiveRegionPacket(socket);
}

// Whether the memory has its size for good, so that no access can fail.
bool IsSealed(int descriptor, uint64_t bytes) {
  struct stat status = {};
  const int seals = fcntl(descriptor, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(descriptor, &status) == 0 &&
         static_cast<uint64_t>(status.st_size) >= bytes;
}

// The GPU of this UUID; nullopt for the host, whose UUID is empty.
absl::StatusOr<std::optional<int>> FindGpu(const std::string& uuid) {
  if (uuid.empty()) return std::nullopt;
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return NoRegion(driver.status().message());
  const absl::StatusOr<std::optional<int>> gpu = (*driver)->Find(uuid);
  if (!gpu.ok()) return NoRegion(gpu.status().message());
  if (!gpu->has_value())
    return NoRegion(absl::StrCat("the server's GPU is ", uuid, ", which this process does not see"));
  return *gpu;
}

absl::string_view OwnerOf(absl::string_view uuid) { return uuid.empty() ? "the host" : uuid; }

// Where the memory is in this process.
absl::StatusOr<uint8_t*> MapOnHost(int descriptor, uint64_t bytes) {
  if (!IsSealed(descriptor, bytes))
    return NoRegion("what the server sent is not sealed memory of the size it says");
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  if (data == MAP_FAILED) return NoRegion(std::strerror(errno));
  madvise(data, bytes, MADV_DONTFORK);
  return static_cast<uint8_t*>(data);
}

absl::StatusOr<uint8_t*> MapOnGpu(int descriptor, uint64_t bytes, int gpu) {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return NoRegion(driver.status().message());
  const absl::StatusOr<uint8_t*> data = (*driver)->Import(descriptor, bytes, gpu);
  if (!data.ok()) return NoRegion(data.status().message());
  return data;
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Open(const std::string& socket, uint64_t bytes,
                                                                 absl::Duration timeout,
                                                                 const std::string& device) {
  const absl::StatusOr<std::optional<int>> gpu = FindGpu(device);
  if (!gpu.ok()) return gpu.status();
  absl::StatusOr<wire::OwnedDescriptor> session = wire::ConnectRegionSocket(socket);
  if (!session.ok()) return NoRegion(session.status().message());
  v1::RegionRequest request;
  request.set_bytes(bytes);
  request.set_of_device(!device.empty());
  request.set_device(device);
  const absl::Status sent = wire::SendRegionPacket(session->get(), request.SerializeAsString(), -1);
  // A server that refuses has perhaps closed its end already; then its reason is there to be read.
  absl::StatusOr<wire::RegionPacket> packet = AwaitPacket(session->get(), timeout);
  if (!packet.ok()) return sent.ok() ? NoRegion(packet.status().message()) : NoRegion(sent.message());
  if (packet->closed) return NoRegion("the server has closed the session");
  const absl::StatusOr<v1::RegionAnswer> answer = wire::ParseRegionAnswer(packet->bytes);
  if (!answer.ok()) return NoRegion(answer.status().message());
  if (answer->has_refused()) return NoRegion(answer->refused().reason());
  if (!packet->descriptor) return NoRegion("the server sent no memory");
  if (answer->opened().device() != device)
    return NoRegion(absl::StrCat("the server gives memory of ", OwnerOf(answer->opened().device()),
                                 ", not of ", OwnerOf(device)));
  const uint64_t size = answer->opened().bytes();
  const int descriptor = packet->descriptor.get();
  const absl::StatusOr<uint8_t*> data =
      gpu->has_value() ? MapOnGpu(descriptor, size, **gpu) : MapOnHost(descriptor, size);
  if (!data.ok()) return data.status();
  return std::shared_ptr<SharedRegion>(
      new SharedRegion(*std::move(session), answer->opened().id(), *data, size, *gpu));
}

SharedRegion::SharedRegion(wire::OwnedDescriptor socket, std::string id, uint8_t* data, uint64_t size,
                           std::optional<int> gpu)
    : socket_(std::move(socket)),
      id_(std::move(id)),
      data_(data),
      size_(size),
      gpu_(gpu),
      process_(getpid()) {}

SharedRegion::~SharedRegion() {
  if (getpid() != process_) return;  // a child has no mapping there
  if (gpu_.has_value()) {
    if (const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get(); driver.ok())
      (*driver)->Unmap(data_, size_, *gpu_);
  } else {
    Unpin();
    munmap(data_, size_);
  }
  // A child may have inherited the session, which closing does not end then.
  shutdown(socket_.get(), SHUT_RDWR);
}

void SharedRegion::PinFor(int gpu) {
  if (gpu_.has_value()) return;
  absl::MutexLock lock(&pin_mu_);
  if (pinned_for_.has_value() || !pin_problem_.ok()) return;
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  pin_problem_ = driver.ok() ? (*driver)->Pin(data_, size_, gpu) : driver.status();
  if (pin_problem_.ok()) pinned_for_ = gpu;
}

absl::Status SharedRegion::pin_problem() const {
  absl::MutexLock lock(&pin_mu_);
  return pin_problem_;
}

void SharedRegion::Unpin() {
  absl::MutexLock lock(&pin_mu_);
  if (!pinned_for_.has_value()) return;
  if (const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get(); driver.ok())
    (*driver)->Unpin(data_, *pinned_for_);
  pinned_for_ = std::nullopt;
}

std::optional<uint64_t> SharedRegion::Find(uint64_t bytes) const {
  uint64_t begin = 0;
  for (const auto& [offset, end] : taken_) {
    if (offset - begin >= bytes) break;
    begin = end;
  }
  if (begin > size_ || size_ - begin < bytes) return std::nullopt;
  return begin;
}

std::optional<uint64_t> SharedRegion::Take(uint64_t bytes) {
  const uint64_t whole = Aligned(bytes);
  absl::MutexLock lock(&mu_);
  const std::optional<uint64_t> begin = Find(whole);
  if (begin.has_value()) {
    taken_[*begin] = *begin + whole;
  } else {
    crowded_ = true;
  }
  return begin;
}

void SharedRegion::Give(uint64_t offset) {
  absl::MutexLock lock(&mu_);
  taken_.erase(offset);
  for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
    const bool fits = Find(waiter->second.bytes).has_value();
    if (fits) waiter->second.freed();
    waiter = fits ? waiters_.erase(waiter) : std::next(waiter);
  }
}

bool SharedRegion::Await(uint64_t bytes, const void* waiter, absl::AnyInvocable<void()> freed) {
  const uint64_t whole = Aligned(bytes);
  absl::MutexLock lock(&mu_);
  waiters_.erase(waiter);
  if (whole > size_ || retired_) return false;
  if (Find(whole).has_value()) {
    freed();
  } else {
    waiters_.emplace(waiter, Waiter{whole, std::move(freed)});
  }
  return true;
}

void SharedRegion::StopWaiting(const void* waiter) {
  absl::MutexLock lock(&mu_);
  waiters_.erase(waiter);
}

int SharedRegion::waiting() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int>(waiters_.size());
}

void SharedRegion::Retire() {
  absl::MutexLock lock(&mu_);
  retired_ = true;
  for (auto& [key, waiter] : waiters_) waiter.freed();
  waiters_.clear();
}

void SharedRegion::AfterFailure(const absl::Status& error, bool holds) {
  const std::optional<v1::ErrorDetail> detail = ErrorDetailOf(error);
  if (absl::IsUnavailable(error) && detail.has_value() && absl::EndsWith(detail->field(), "region")) {
    refused_ = true;
  }
  if (holds || absl::IsUnavailable(error)) Retire();
}

bool SharedRegion::usable() const {
  if (retired_ || getpid() != process_) return false;
  char byte = 0;
  const ssize_t received = recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return received < 0 &&
         (errno == EAGAIN || errno == EWOULDBLOCK);  // it has nothing to say, and has not closed
}

}  // namespace lossd::client::internal
