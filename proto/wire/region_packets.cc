// SPDX-License-Identifier: Apache-2.0
// The packets of a region socket and their descriptors (region_packets.h).
#include "proto/wire/region_packets.h"

#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"

namespace lossd::wire {
namespace {

absl::Status Broken(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// The error of a failed connection, with a hint at the cause.
absl::Status CannotConnect(absl::string_view name, int error) {
  const bool is_abstract = name.front() == '@';
  absl::string_view hint;
  if (error == EACCES || error == EPERM) {
    hint = "; the server's --unix_socket_mode says who may connect, and the folder has to let this user in";
  } else if (is_abstract && error == ECONNREFUSED) {
    hint =
        "; the server is on another host, or in another network namespace (a container): there it has to "
        "listen "
        "on a Unix socket in a folder that both see";
  } else if (error == ENOENT) {
    hint = "; the server is on another host, or this container does not have its folder mounted";
  } else if (error == ECONNREFUSED) {
    hint = "; no server listens there any more";
  }
  return absl::UnavailableError(absl::StrCat(name, ": ", std::strerror(error), hint));
}

}  // namespace

std::vector<OwnedDescriptor> DescriptorsOf(msghdr* message) {
  std::vector<OwnedDescriptor> descriptors;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(descriptor);
    }
  }
  return descriptors;
}

OwnedDescriptor& OwnedDescriptor::operator=(OwnedDescriptor&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

OwnedDescriptor::~OwnedDescriptor() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<OwnedDescriptor> ConnectRegionSocket(absl::string_view name) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  if (name.size() < 2 || name.size() >= sizeof(address.sun_path) || name.find('\0') != name.npos)
    return errors::FieldError("region_socket", "be a path of a socket, or @ and a name", name);
  std::memcpy(address.sun_path, name.data(), name.size());
  const bool is_abstract = name.front() == '@';
  if (is_abstract) address.sun_path[0] = '\0';
  const size_t length = offsetof(sockaddr_un, sun_path) + name.size() + (is_abstract ? 0 : 1);
  OwnedDescriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made) return Broken("socket");
  if (connect(made.get(), reinterpret_cast<const sockaddr*>(&address), static_cast<socklen_t>(length)) != 0)
    return CannotConnect(name, errno);
  return made;
}

absl::StatusOr<RegionPeer> PeerOf(int socket) {
  ucred who = {};
  socklen_t size = sizeof(who);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) return Broken("SO_PEERCRED");
  return RegionPeer{.user = who.uid, .process = who.pid};
}

int PollMilliseconds(absl::Time deadline) {
  if (deadline == absl::InfiniteFuture()) return -1;
  // Rounded up, so that poll does not return before the deadline.
  const int64_t left = absl::ToInt64Milliseconds(deadline - clocks::SteadyNow()) + 1;
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

absl::Status SendRegionPacket(int socket, absl::string_view bytes, int descriptor) {
  // `sendmsg` only reads it.
  iovec data = {.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &descriptor, sizeof(int));
  }
  if (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return Broken("sendmsg");
  return absl::OkStatus();
}

absl::StatusOr<RegionPacket> ReceiveRegionPacket(int socket, std::vector<OwnedDescriptor>* others) {
  std::string bytes(kMaxRegionPacket, '\0');
  iovec data = {.iov_base = bytes.data(), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  // The other side closed without reading everything that we sent. The kernel reports this once, before the
  // last packets of the other side, so try again.
  if (received < 0 && errno == ECONNRESET)
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (received < 0) return Broken("recvmsg");
  std::vector<OwnedDescriptor> closed_here;
  std::vector<OwnedDescriptor>& descriptors = others != nullptr ? *others : closed_here;
  const size_t before = descriptors.size();
  for (OwnedDescriptor& descriptor : DescriptorsOf(&message)) descriptors.push_back(std::move(descriptor));
  if (received == 0) return RegionPacket{.closed = true};
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return errors::FieldError("packet", absl::StrCat("have at most ", kMaxRegionPacket, " bytes"), "more");
  }
  bytes.resize(static_cast<size_t>(received));
  RegionPacket packet{.bytes = std::move(bytes)};
  if (descriptors.size() == before + 1) {
    packet.descriptor = std::move(descriptors.back());
    descriptors.pop_back();
  }
  return packet;
}

absl::StatusOr<v1::RegionRequest> ParseRegionRequest(absl::string_view bytes) {
  v1::RegionRequest request;
  if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return absl::InvalidArgumentError("malformed lossd.v1.RegionRequest");
  if (request.bytes() == 0 || request.bytes() > uint64_t{std::numeric_limits<int64_t>::max()} / 2)
    return errors::FieldError("bytes", "be at least 1 and below 2^62", request.bytes());
  if (!request.device().empty() && !request.of_device())
    return errors::FieldError("device", "come with of_device", request.device());
  return request;
}

absl::StatusOr<v1::RegionAnswer> ParseRegionAnswer(absl::string_view bytes) {
  v1::RegionAnswer answer;
  if (!answer.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return absl::InvalidArgumentError("malformed lossd.v1.RegionAnswer");
  if (answer.has_refused()) return answer;
  if (answer.opened().id().size() != kRegionIdBytes || answer.opened().bytes() == 0)
    return absl::InvalidArgumentError("a lossd.v1.RegionAnswer without a region");
  return answer;
}

}  // namespace lossd::wire
