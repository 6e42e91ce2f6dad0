// SPDX-License-Identifier: Apache-2.0
#include "server/connections/entrance.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "server/connections/closer.h"

namespace lossd::connections {
namespace {

constexpr int64_t kMostEnding = 32;  // shut down and not closed yet, before no more are accepted

// The number of a socket; 0 if the descriptor is not open.
uint64_t InodeOf(int descriptor) {
  struct stat status = {};
  if (fstat(descriptor, &status) != 0 || !S_ISSOCK(status.st_mode)) return 0;
  return status.st_ino;
}

}  // namespace

Entrance::Entrance(std::vector<ListeningSocket> sockets, EntranceOptions options)
    : sockets_(std::move(sockets)), options_(std::move(options)) {}

bool Entrance::AddTo(std::vector<pollfd>* wait) {
  const bool has_room = HasRoom();
  const bool behind = ClosingIsBehind();
  for (const ListeningSocket& socket : sockets_) {
    const bool is_unix = socket.port() == 0;
    const bool waits = has_room && !(behind && is_unix);
    wait->push_back({.fd = waits ? socket.descriptor() : -1, .events = POLLIN});
  }
  return has_room && !behind;
}

std::optional<Connection> Entrance::Accept(int listener) {
  sockaddr_storage from = {};
  socklen_t size = sizeof(from);
  Connection connection;
  connection.socket = wire::OwnedDescriptor(
      accept4(listener, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!connection.socket) {
    // Out of descriptors: those that wait stay in the backlog for a while.
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
      absl::SleepFor(absl::Milliseconds(50));
    return std::nullopt;
  }
  const int descriptor = connection.socket.get();
  connection.is_unix = from.ss_family == AF_UNIX;
  connection.peer = PeerOf(descriptor, from);
  const bool lets_in = LetsIn(connection.peer, listener);
  absl::string_view refusal = lets_in ? "" : kStranger;
  if (lets_in && options_.oldest_makes_room) {
    for (const Ended& ended : CountAndMakeRoom(descriptor, connection.peer.name))
      options_.on_refused(-1, ended.reason, {.name = ended.name, .user = std::nullopt});
  } else if (lets_in) {
    refusal = Count(descriptor, connection.peer.name);
  }
  if (!refusal.empty()) {
    options_.on_refused(descriptor, refusal, connection.peer);
    // Over TCP nothing of the stranger's is in it: to close it here takes no time, and does not wait for
    // threads that a stranger on a Unix socket may hold.
    if (connection.is_unix) CloseElsewhere(std::move(connection.socket));
    return std::nullopt;
  }
  if (!connection.is_unix) {
    SetSocketOption(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
    SetSocketOption(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT,
                    static_cast<int>(absl::ToInt64Milliseconds(options_.dead_peer_timeout)));
  }
  return connection;
}

// A peer on the loopback that the kernel does not name although it can has closed its end.
bool Entrance::LetsIn(const Peer& peer, int listener) const {
  if (IsOwnUser(peer)) return true;
  if (peer.is_loopback) return !options_.own_user_on_loopback || !KnowsLoopbackUsers();
  return std::none_of(sockets_.begin(), sockets_.end(), [listener](const ListeningSocket& socket) {
    return socket.descriptor() == listener && socket.is_abstract();
  });
}

absl::string_view Entrance::Count(int descriptor, const std::string& name) {
  absl::MutexLock lock(&mutex_);
  connections_.erase(descriptor);  // what had the number before is closed
  if (!LimitReached(name).empty()) ForgetClosed();
  const absl::string_view limit = LimitReached(name);
  if (limit.empty())
    connections_[descriptor] = {.inode = InodeOf(descriptor), .name = name, .opened = clocks::SteadyNow()};
  return limit;
}

absl::string_view Entrance::LimitReached(const std::string& name) const {
  if (CountOf("") >= options_.in_all) return kMaxConnections;
  return CountOf(name) >= options_.per_peer ? kMaxPerPeer : "";
}

int64_t Entrance::CountOf(absl::string_view name) const {
  return std::count_if(connections_.begin(), connections_.end(), [name](const auto& entry) {
    return !entry.second.ended && (name.empty() || entry.second.name == name);
  });
}

bool Entrance::HasRoom() {
  if (!options_.oldest_makes_room) return true;
  absl::MutexLock lock(&mutex_);
  const auto most = static_cast<size_t>(options_.in_all + kMostEnding);
  if (connections_.size() >= most) ForgetClosed();
  return connections_.size() < most;
}

std::vector<Entrance::Ended> Entrance::CountAndMakeRoom(int descriptor, const std::string& name) {
  const absl::Time now = clocks::SteadyNow();
  std::vector<Ended> made_room;
  absl::MutexLock lock(&mutex_);
  connections_.erase(descriptor);
  for (auto& [other, connection] : connections_) {
    if (!connection.ended && now - connection.opened > options_.age) End(other, &connection);
  }
  const auto end_oldest = [&](const std::string& of, absl::string_view limit) {
    mutex_.AssertHeld();
    const auto oldest = Oldest(of);
    End(oldest->first, &oldest->second);
    made_room.push_back({.name = oldest->second.name, .reason = limit});
  };
  // The peer's own first: then there may be room in all.
  if (CountOf(name) >= options_.per_peer) end_oldest(name, kMaxPerPeer);
  if (CountOf("") >= options_.in_all) end_oldest("", kMaxConnections);
  connections_[descriptor] = {.inode = InodeOf(descriptor), .name = name, .opened = now};
  return made_room;
}

std::map<int, Entrance::Counted>::iterator Entrance::Oldest(const std::string& name) {
  auto oldest = connections_.end();
  for (auto one = connections_.begin(); one != connections_.end(); ++one) {
    if (one->second.ended || (!name.empty() && one->second.name != name)) continue;
    if (oldest == connections_.end() || one->second.opened < oldest->second.opened) oldest = one;
  }
  return oldest;
}

// The reader sees the end, and closes it. It is not closed before, for then it would not be counted.
void Entrance::End(int descriptor, Counted* connection) {
  connection->ended = true;
  if (InodeOf(descriptor) == connection->inode) shutdown(descriptor, SHUT_RDWR);
}

void Entrance::Closing(int descriptor) {
  absl::MutexLock lock(&mutex_);
  connections_.erase(descriptor);
}

void Entrance::ForgetClosed() {
  std::erase_if(connections_, [](const auto& entry) { return InodeOf(entry.first) != entry.second.inode; });
}

int64_t Entrance::connections() {
  absl::MutexLock lock(&mutex_);
  ForgetClosed();
  return static_cast<int64_t>(connections_.size());
}

bool BringsDescriptors(const Connection& connection) {
  if (!connection.is_unix) return false;
  int passes = 1;
  socklen_t size = sizeof(passes);
  return getsockopt(connection.socket.get(), SOL_SOCKET, kPassRights, &passes, &size) != 0 || passes != 0;
}

}  // namespace lossd::connections
