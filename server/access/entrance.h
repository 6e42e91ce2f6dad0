// SPDX-License-Identifier: Apache-2.0
// Entrance accepts connections and decides which to admit. All listeners of the server use it, so that the
// same rules hold for all connections:
// - The number of connections is bounded, in all and for each peer.
// - The peer is identified before anything is read (SO_PEERCRED, sock_diag). PeerOf asks the kernel for it.
// - No peer can make a thread wait that accepts, closes or reads the peer's connection.
//
// If the kernel supports it (SO_PASSRIGHTS, Linux 6.16), connections over Unix sockets bring no descriptors.
// If it does not, BringsDescriptors tells that a reader has to expect descriptors.
//
// Ownership. Entrance closes a connection that it does not admit; if it is over a Unix socket, on another
// thread (closer.h). An admitted connection belongs to the caller, which closes it without telling Entrance:
// Entrance asks the kernel whether a descriptor is still the same connection. With oldest_makes_room,
// however, the caller must call Closing before it closes a connection, because Entrance may shut down
// connections that it counts.
//
// Thread-safe, except that Accept is called by one thread.
#ifndef LOSSD_SERVER_ACCESS_ENTRANCE_H_
#define LOSSD_SERVER_ACCESS_ENTRANCE_H_

#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/wire/region_packets.h"
#include "server/access/listening_socket.h"

namespace lossd::access {

struct Peer {
  // The owner. Connections with the same name are counted together. It is "10.0.0.5" for another host, and
  // "uid 1000" for a program of this host, over Unix sockets and over all loopback addresses. It is
  // "loopback" if the kernel does not tell the user of a program on the loopback.
  std::string name;
  // The address of a peer on the loopback in gRPC's form: "127.0.0.1:41234", "[::1]:41234". Otherwise empty.
  std::string loopback_address;
  // The user of a program of this host, if the kernel tells it: always over a Unix socket; over the loopback
  // unless the program has closed its end already or the kernel has no sock_diag.
  std::optional<uid_t> user;
  pid_t process = 0;  // set over a Unix socket
  bool is_loopback = false;
};

// The peer of a connection from the address `from`.
Peer PeerOf(int connection, const sockaddr_storage& from);

// Whether the peer is this process's user or root. They have full power over the process anyway.
bool IsOwnUser(const Peer& peer);

// Whether the kernel tells the users of connections over the loopback.
bool KnowsLoopbackUsers();

struct EntranceOptions {
  // Admit only programs of this process's user and of root over the loopback, if the kernel tells the users.
  // (Over an abstract Unix socket, which no file permissions protect, programs of other users are never
  // admitted.)
  bool own_user_on_loopback = false;
  int64_t in_all = 512;
  int64_t per_peer = 128;  // by Peer::name
  // For readers that need a connection only for a moment (HTTP). Beyond a limit, a new connection is admitted
  // and the oldest connection is shut down, of the same peer or of all peers. Connections older than `age`
  // are shut down too when a new one comes. So clients that open connections and send nothing lock out no
  // other client. The number of connections that are shut down but not closed yet is bounded; beyond it new
  // connections wait in the backlog.
  bool oldest_makes_room = false;
  absl::Duration age = absl::InfiniteDuration();
  // A connection ends if sent data is not acknowledged for this long.
  absl::Duration dead_peer_timeout = absl::Seconds(20);
  // Identifies the peer of a connection. Tests replace it, to play several peers.
  std::function<Peer(int connection, const sockaddr_storage& from)> peer_of = &PeerOf;
  // Called for a connection that is not admitted. It may write to the connection, but must not wait.
  // `reason`: the flag of the limit, or kStranger. Also called for a connection that was shut down to make
  // room: then `connection` is -1, and only the peer's name is set.
  std::function<void(int connection, absl::string_view reason, const Peer& peer)> on_refused =
      [](int, absl::string_view, const Peer&) {};
};

inline constexpr absl::string_view kStranger = "stranger";
inline constexpr absl::string_view kMaxConnections = "max_connections";
inline constexpr absl::string_view kMaxPerPeer = "max_connections_per_address";

struct Connection {
  wire::OwnedDescriptor socket;  // non-blocking
  Peer peer;
  bool is_unix = false;
};

class Entrance {
 public:
  Entrance(std::vector<ListeningSocket> sockets, EntranceOptions options);
  Entrance(const Entrance&) = delete;
  Entrance& operator=(const Entrance&) = delete;

  // Adds an entry to `wait` for each listening socket. Returns false if some are left out, and the caller
  // should try again after kBehind: Unix sockets while closing is behind, or all sockets while too many
  // connections that were shut down are not closed yet.
  static constexpr absl::Duration kBehind = absl::Milliseconds(20);
  bool AddTo(std::vector<pollfd>* wait) ABSL_LOCKS_EXCLUDED(mutex_);
  // Accepts the next connection at `listener`, after poll has reported it. nullopt if the connection is not
  // admitted. If the process has no descriptors left, waits a moment and returns nullopt, so that a loop does
  // not spin.
  std::optional<Connection> Accept(int listener) ABSL_LOCKS_EXCLUDED(mutex_);
  // Stops accepting. Called on the thread of Accept, or after its end.
  void CloseListeners() { sockets_.clear(); }
  // Call before closing a connection, with oldest_makes_room. Also call it before CloseElsewhere, if the
  // connection is not to count while it waits there.
  void Closing(int descriptor) ABSL_LOCKS_EXCLUDED(mutex_);
  // The number of open connections.
  int64_t connections() ABSL_LOCKS_EXCLUDED(mutex_);
  // Peer::name of the admitted connection from this loopback address (Peer::loopback_address); empty if there
  // is none.
  std::string NameAt(absl::string_view loopback_address) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Peer::name of an admitted connection that the caller has not closed.
  std::string NameOf(int descriptor) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Counted {
    uint64_t inode = 0;  // the inode of the socket
    std::string name;
    std::string loopback_address;
    absl::Time opened;
    bool ended = false;  // it was shut down to make room
  };
  struct Ended {
    std::string name;
    absl::string_view reason;
  };

  bool LetsIn(const Peer& peer, int listener) const;
  // Counts a connection. Returns the flag of the limit that refuses it, or "".
  absl::string_view Count(int descriptor, const Peer& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void Add(int descriptor, const Peer& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::string_view LimitReached(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoom() ABSL_LOCKS_EXCLUDED(mutex_);
  // Counts a connection, and shuts down others to make room for it. Returns those that were shut down because
  // of a limit.
  std::vector<Ended> CountAndMakeRoom(int descriptor, const Peer& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  // The oldest counted connection; of this peer only, unless `name` is empty.
  std::map<int, Counted>::iterator Oldest(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void End(int descriptor, Counted* connection);
  // The number of connections that were not shut down; of this peer only, unless `name` is empty.
  int64_t CountOf(absl::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::vector<ListeningSocket> sockets_;
  const EntranceOptions options_;
  mutable absl::Mutex mutex_;
  std::map<int, Counted> connections_ ABSL_GUARDED_BY(mutex_);  // by the caller's descriptor
};

// Whether a peer can pass descriptors over the connection, because the kernel cannot keep them out.
bool BringsDescriptors(const Connection& connection);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_ENTRANCE_H_
