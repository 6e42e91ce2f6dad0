// SPDX-License-Identifier: Apache-2.0
// The packets of a region socket (region.proto): one protobuf message each, with the descriptor of memory
// beside it.
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

// A descriptor that is closed at its end. Move-only.
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

// A SOCK_SEQPACKET socket that is connected to `name`: a path, or "@" and a name in the abstract namespace.
// INVALID_ARGUMENT for a name that cannot be one; UNAVAILABLE if nobody listens there, which says why.
absl::StatusOr<OwnedDescriptor> ConnectRegionSocket(absl::string_view name);

// Who is at the other end of a socket, as the kernel says.
struct RegionPeer {
  uid_t user;
  pid_t process;
};
// UNAVAILABLE if the kernel does not say.
absl::StatusOr<RegionPeer> PeerOf(int socket);

// How long poll is to wait for `deadline`, in milliseconds: at most a minute, and -1 if it is infinite.
int PollMilliseconds(absl::Time deadline);

// Sends one packet, with a copy of `descriptor` unless that is -1. Does not wait. UNAVAILABLE.
absl::Status SendRegionPacket(int socket, absl::string_view bytes, int descriptor);

struct RegionPacket {
  std::string bytes;
  OwnedDescriptor descriptor;  // that came with it, if exactly one did
  bool closed = false;         // no packet: the other side has closed the connection
};
// Receives one packet without waiting; those that were sent before the other side closed still arrive,
// whether or not it had read ours. UNAVAILABLE if there is none or the connection is broken; INVALID_ARGUMENT
// for one that is longer than kMaxRegionPacket. Descriptors that are not in the result are added to `others`,
// or closed here, which may take as long as their sender likes.
absl::StatusOr<RegionPacket> ReceiveRegionPacket(int socket, std::vector<OwnedDescriptor>* others = nullptr);

inline constexpr size_t kMaxDescriptors = 253;  // that the kernel lets a packet bring
// Takes the descriptors out of what recvmsg has received.
std::vector<OwnedDescriptor> DescriptorsOf(msghdr* message);

// INVALID_ARGUMENT, naming field and value, unless the bytes are a request of the protocol.
absl::StatusOr<v1::RegionRequest> ParseRegionRequest(absl::string_view bytes);
// INVALID_ARGUMENT unless the bytes are an answer of the protocol: `opened` with an id of kRegionIdBytes and
// at least a byte of memory, or `refused`.
absl::StatusOr<v1::RegionAnswer> ParseRegionAnswer(absl::string_view bytes);

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_REGION_PACKETS_H_
