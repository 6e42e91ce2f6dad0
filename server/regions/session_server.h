// SPDX-License-Identifier: Apache-2.0
// SessionServer is the side of region.proto that clients connect to. It makes a region for each connection
// that asks for one. It forgets the region when the connection closes, or when the process that made the
// connection has ended, even if a child of that process holds the connection.
//
// SessionServer has one thread, and no client can make it wait: what a client has sent is closed on another
// thread (server/connections/closer.h). Thread-safe, but for its end.
#ifndef LOSSD_SERVER_REGIONS_SESSION_SERVER_H_
#define LOSSD_SERVER_REGIONS_SESSION_SERVER_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "kernels/exchange_times.h"
#include "proto/wire/region_packets.h"
#include "server/connections/entrance.h"
#include "server/regions/regions.h"

namespace lossd::regions {

struct SessionLimits {
  int64_t in_all = 256;
  int64_t per_user = 128;
  absl::Duration request_timeout = absl::Seconds(10);  // for the request, after connecting
};

class SessionServer {
 public:
  // `listener`: SOCK_SEQPACKET. `regions` outlives this.
  SessionServer(connections::ListeningSocket listener, Regions* regions, const SessionLimits& limits);
  // Closes all sessions.
  ~SessionServer();
  SessionServer(const SessionServer&) = delete;
  SessionServer& operator=(const SessionServer&) = delete;

  int64_t sessions() const { return sessions_open_; }
  // How long ago the thread last looked for something to do.
  absl::Duration Silence() const { return beat_.Silence(); }

 private:
  struct Session {
    wire::OwnedDescriptor socket;
    wire::OwnedDescriptor process;  // readable once it has ended; none: the kernel does not tell
    std::string holder;             // for its share of memory
    std::string region;             // its id; empty: none yet
    absl::Time deadline;
  };

  void Run();
  void Accept(int listener);
  // Whether the session goes on.
  bool Serve(Session* session);
  void Close(std::list<Session>::iterator session);
  int Patience() const;  // for poll

  connections::Entrance entrance_;
  Regions* const regions_;
  const SessionLimits limits_;
  const wire::OwnedDescriptor wake_;
  std::list<Session> sessions_;  // of the thread
  std::atomic<int64_t> sessions_open_{0};
  kernels::Heartbeat beat_;
  std::thread thread_;
};

}  // namespace lossd::regions

#endif  // LOSSD_SERVER_REGIONS_SESSION_SERVER_H_
