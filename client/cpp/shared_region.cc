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
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"

namespace lossd::client::internal {
namespace {

absl::Status NoRegion(absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("no shared memory: ", why));
}

absl::StatusOr<wire::RegionPacket> Await(int socket, absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  pollfd ready = {.fd = socket, .events = POLLIN};
  int result = 0;
  do {
    const absl::Duration left = std::max(end - absl::Now(), absl::ZeroDuration());
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

}  // namespace

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Open(const std::string& socket, uint64_t bytes,
                                                                 absl::Duration timeout) {
  absl::StatusOr<wire::OwnedDescriptor> session = wire::ConnectRegionSocket(socket);
  if (!session.ok()) return NoRegion(session.status().message());
  v1::RegionRequest request;
  request.set_bytes(bytes);
  const absl::Status sent = wire::SendRegionPacket(session->get(), request.SerializeAsString(), -1);
  // A server that refuses has perhaps closed its end already; then its reason is there to be read.
  absl::StatusOr<wire::RegionPacket> packet = Await(session->get(), timeout);
  if (!packet.ok()) return sent.ok() ? NoRegion(packet.status().message()) : NoRegion(sent.message());
  if (packet->closed) return NoRegion("the server has closed the session");
  const absl::StatusOr<v1::RegionAnswer> answer = wire::ParseRegionAnswer(packet->bytes);
  if (!answer.ok()) return NoRegion(answer.status().message());
  if (answer->has_refused()) return NoRegion(answer->refused().reason());
  const uint64_t size = answer->opened().bytes();
  if (!packet->descriptor || !IsSealed(packet->descriptor.get(), size))
    return NoRegion("what the server sent is not sealed memory of the size it says");
  void* const data =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, packet->descriptor.get(), 0);
  if (data == MAP_FAILED) return NoRegion(std::strerror(errno));
  madvise(data, size, MADV_DONTFORK);
  return std::shared_ptr<SharedRegion>(
      new SharedRegion(*std::move(session), answer->opened().id(), static_cast<uint8_t*>(data), size));
}

SharedRegion::SharedRegion(wire::OwnedDescriptor socket, std::string id, uint8_t* data, uint64_t size)
    : socket_(std::move(socket)), id_(std::move(id)), data_(data), size_(size), process_(getpid()) {}

SharedRegion::~SharedRegion() {
  if (getpid() == process_) munmap(data_, size_);  // a child has no mapping there
}

std::optional<uint64_t> SharedRegion::Take(uint64_t bytes) {
  const uint64_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  absl::MutexLock lock(&mu_);
  uint64_t begin = 0;
  for (const auto& [offset, end] : taken_) {
    if (offset - begin >= whole) break;
    begin = end;
  }
  if (begin > size_ || size_ - begin < whole) return std::nullopt;
  taken_[begin] = begin + whole;
  return begin;
}

void SharedRegion::Give(uint64_t offset) {
  absl::MutexLock lock(&mu_);
  taken_.erase(offset);
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
