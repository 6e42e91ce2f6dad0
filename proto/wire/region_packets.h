// SPDX-License-Identifier: Apache-2.0
// Sends, receives and parses the packets of a region socket (region.proto). A packet is one protobuf message
// and may carry a file descriptor of memory.
//
// Stateless; thread-safe.
#ifndef LOSSD_PROTO_WIRE_REGION_PACKETS_H_
#define LOSSD_PROTO_WIRE_REGION_PACKETS_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "lossd/v1/region.pb.h"

namespace lossd::wire {

inline constexpr size_t kMaxRegionPacket = 4096;
inline constexpr size_t kRegionIdBytes = 16;

// A file descriptor that the destructor closes. Move-only.
class OwnedDescriptor {
 public:
  OwnedDescriptor() = default;
  explicit OwnedDescriptor(int descriptor) : descriptor_(descriptor) {}
  OwnedDescriptor(OwnedDescriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  OwnedDescriptor& operator=(OwnedDescriptor&& other) noexcept;
  ~OwnedDescriptor();

  int get() const { return descriptor_; }  // -1: none
  explicit operator bool() const { return descriptor_ >= 0; }
  int Release() { return std::exchange(descriptor_, -1); }  // the caller closes it

 private:
  int descriptor_ = -1;
};

// Opens a SOCK_SEQPACKET socket that is connected to `name`: a path, or "@" and a name in the abstract
// namespace. INVALID_ARGUMENT for a name that is neither. UNAVAILABLE if the connection fails; the message
// says why.
absl::StatusOr<OwnedDescriptor> ConnectRegionSocket(absl::string_view name);

// The user and process at the other end of a socket, as reported by the kernel.
struct RegionPeer {
  uid_t user;
  pid_t process;
};
// UNAVAILABLE if the kernel does not report them.
absl::StatusOr<RegionPeer> PeerOf(int socket);

// The timeout for poll() until `deadline`, in milliseconds: at most a minute, and -1 if the deadline is
// infinite.
int PollMilliseconds(absl::Time deadline);

// Sends one packet, with a copy of `descriptor` unless it is -1. Does not wait. UNAVAILABLE if sending fails.
absl::Status SendRegionPacket(int socket, absl::string_view bytes, int descriptor);

struct RegionPacket {
  std::string bytes;
  OwnedDescriptor descriptor;  // the descriptor of the packet, if it has exactly one
  bool closed = false;         // there is no packet: the other side has closed the connection
};
// Receives one packet without waiting. Packets that the other side sent before it closed still arrive,
// whether or not it had read ours. UNAVAILABLE if there is no packet or the connection is broken.
// INVALID_ARGUMENT if the packet is longer than kMaxRegionPacket. Descriptors that are not in the result are
// added to `others`. If `others` is null, they are closed here, which a hostile sender can make slow.
absl::StatusOr<RegionPacket> ReceiveRegionPacket(int socket, std::vector<OwnedDescriptor>* others = nullptr);

inline constexpr size_t kMaxDescriptors = 253;  // most descriptors that the kernel allows in a packet
// Takes the descriptors out of a message that recvmsg received.
std::vector<OwnedDescriptor> DescriptorsOf(msghdr* message);

// INVALID_ARGUMENT, naming field and value, unless the bytes are a valid request.
absl::StatusOr<v1::RegionRequest> ParseRegionRequest(absl::string_view bytes);
// INVALID_ARGUMENT unless the bytes are a valid answer: `opened` with an id of kRegionIdBytes and at least a
// byte of memory, or `refused`.
absl::StatusOr<v1::RegionAnswer> ParseRegionAnswer(absl::string_view bytes);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_REGION_PACKETS_H_
