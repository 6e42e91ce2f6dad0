// SPDX-License-Identifier: Apache-2.0
// Entrance admits connections. Everything that listens in the server takes its connections here, so that the
// same rules hold for all: the number of connections is bounded, in all and by peer; Entrance asks who the
// peer is before anything is read (SO_PEERCRED, sock_diag); and no peer can make a thread wait that takes the
// peer's connection, closes it or reads from it. PeerOf says who is at the other end of a connection, as the
// kernel knows it.
//
// Connections over Unix sockets bring no descriptors, where the kernel can keep descriptors out
// (SO_PASSRIGHTS, Linux 6.16). Where the kernel cannot, BringsDescriptors says that a reader has to expect
// descriptors.
//
// Entrance closes a connection that it does not admit; a connection over a Unix socket is closed on another
// thread (closer.h). An admitted connection belongs to the caller, which closes it without telling Entrance:
// Entrance asks the kernel whether a descriptor is still the connection that it was. Where the oldest
// connection makes room for a new one, the caller calls Closing before it closes a connection, because
// Entrance may shut down the connections that it counts.
//
// Thread-safe, but Accept belongs to one thread.
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
  // Whose connections are counted together: "10.0.0.5", or "uid 1000" of a program of this host, over the
  // loopback, whatever address of it, and over Unix sockets. "loopback" of a program there that the kernel
  // does not name.
  std::string name;
  // Over the loopback, as gRPC writes it: "127.0.0.1:41234", "[::1]:41234". Else empty.
  std::string loopback_address;
  // Of a program of this host, where the kernel says so: always over a Unix socket, and over the loopback
  // unless the program has closed its end already or the kernel has no sock_diag.
  std::optional<uid_t> user;
  pid_t process = 0;  // over a Unix socket
  bool is_loopback = false;
};

// The peer of a connection that `from` has made.
Peer PeerOf(int connection, const sockaddr_storage& from);

// Whether the peer is this process's user or root, which may do to the process what they like.
bool IsOwnUser(const Peer& peer);

// Whether the kernel says who is at the other end of connections over the loopback.
bool KnowsLoopbackUsers();

struct EntranceOptions {
  // Admits only programs of this process's user and of root at the loopback addresses of this host, where the
  // kernel says whose they are. (Over an abstract Unix socket, which no mode of a file protects, no programs
  // of other users come in anyway.)
  bool own_user_on_loopback = false;
  int64_t in_all = 512;
  int64_t per_peer = 128;  // Peer::name
  // For readers that are done with a connection in a moment (HTTP). Beyond a limit a new connection is
  // admitted and the oldest connection is shut down, of the same peer or of all peers. Connections older than
  // `age` are shut down too. Clients that open connections and send nothing then keep no other client out.
  // The number of connections that are shut down and not closed yet is bounded: beyond it new connections
  // wait in the backlog.
  bool oldest_makes_room = false;
  absl::Duration age = absl::InfiniteDuration();
  absl::Duration dead_peer_timeout = absl::Seconds(20);  // data sent and not acknowledged for so long ends it
  // Says who the peer of a connection is; for tests that play several peers.
  std::function<Peer(int connection, const sockaddr_storage& from)> peer_of = &PeerOf;
  // Called for a connection that is not admitted, to which it may still write; must not wait. `reason`: the
  // flag of a limit, or kStranger. For a connection that made room `connection` is -1, and only the peer's
  // name is known.
  std::function<void(int connection, absl::string_view reason, const Peer& peer)> on_refused =
      [](int, absl::string_view, const Peer&) {};
};

inline constexpr absl::string_view kStranger = "stranger";
inline constexpr absl::string_view kMaxConnections = "max_connections";
inline constexpr absl::string_view kMaxPerPeer = "max_connections_per_address";

struct Connection {
  wire::OwnedDescriptor socket;  // does not wait
  Peer peer;
  bool is_unix = false;
};

class Entrance {
 public:
  Entrance(std::vector<ListeningSocket> sockets, EntranceOptions options);
  Entrance(const Entrance&) = delete;
  Entrance& operator=(const Entrance&) = delete;

  // What to wait for, one entry for each listening socket. False while closing is behind: Unix sockets, or
  // all where connections that were shut down are not closed yet, are left out, and the caller looks again
  // after kBehind.
  static constexpr absl::Duration kBehind = absl::Milliseconds(20);
  bool AddTo(std::vector<pollfd>* wait) ABSL_LOCKS_EXCLUDED(mutex_);
  // The next connection at `listener`, where poll has seen one, if it is admitted. Where the process has no
  // descriptor left, null after a moment, so that a loop does not spin.
  std::optional<Connection> Accept(int listener) ABSL_LOCKS_EXCLUDED(mutex_);
  // Accepts nothing more. Of the thread of Accept, or after its end.
  void CloseListeners() { sockets_.clear(); }
  // The caller is about to close it.
  void Closing(int descriptor) ABSL_LOCKS_EXCLUDED(mutex_);
  // Connections that are open.
  int64_t connections() ABSL_LOCKS_EXCLUDED(mutex_);
  // Peer::name of the admitted connection from this address of the loopback (Peer::loopback_address); empty
  // if there is none.
  std::string NameAt(absl::string_view loopback_address) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The same of an admitted connection that the caller has not closed.
  std::string NameOf(int descriptor) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Counted {
    uint64_t inode = 0;  // of the socket
    std::string name;
    std::string loopback_address;
    absl::Time opened;
    bool ended = false;  // it made room
  };
  struct Ended {
    std::string name;
    absl::string_view reason;
  };

  bool LetsIn(const Peer& peer, int listener) const;
  // The flag of the limit that keeps a connection out; "": none does.
  absl::string_view Count(int descriptor, const Peer& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void Add(int descriptor, const Peer& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::string_view LimitReached(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoom() ABSL_LOCKS_EXCLUDED(mutex_);
  // Counts a connection, and shuts down connections to make room for it; returns the connections that a limit
  // ended.
  std::vector<Ended> CountAndMakeRoom(int descriptor, const Peer& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  // The counted connection that came first; of this peer unless `name` is empty.
  std::map<int, Counted>::iterator Oldest(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void End(int descriptor, Counted* connection);
  // Connections that did not make room, of this peer unless `name` is empty.
  int64_t CountOf(absl::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::vector<ListeningSocket> sockets_;
  const EntranceOptions options_;
  mutable absl::Mutex mutex_;
  std::map<int, Counted> connections_ ABSL_GUARDED_BY(mutex_);  // by descriptor, which is the caller's
};

// Whether a peer can pass descriptors over the connection: the kernel cannot keep them out.
bool BringsDescriptors(const Connection& connection);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_ENTRANCE_H_
