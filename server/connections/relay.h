// SPDX-License-Identifier: Apache-2.0
// Stands between a stranger on a Unix socket and a reader that does not know descriptors (gRPC), where the
// kernel cannot keep them out: passes bytes on in both directions, and ends a connection that brings a
// descriptor. It copies, so it is for those connections alone.
//
// Thread-safe. One thread, while there is something to pass on or to wait for.
#ifndef LOSSD_SERVER_CONNECTIONS_RELAY_H_
#define LOSSD_SERVER_CONNECTIONS_RELAY_H_

#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "proto/wire/region_packets.h"

namespace lossd::connections {

class Relay {
 public:
  Relay();
  // Ends all connections.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // The end for the reader, of which only bytes come; none if the system has no sockets left.
  wire::OwnedDescriptor Stand(wire::OwnedDescriptor stranger) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Way {
    std::string bytes;  // read, not yet written from `sent` on
    size_t sent = 0;
    bool empty() const { return sent == bytes.size(); }
  };
  struct Pair {
    wire::OwnedDescriptor stranger, reader;
    Way to_reader, to_stranger;
    bool ended = false;  // one end is closed: what was read of it is passed on, and that is all
  };

  void Run();
  // Whether the connection goes on.
  static bool Serve(Pair* pair, int stranger_events, int reader_events);
  static bool ReadStranger(Pair* pair);
  static bool ReadReader(Pair* pair);

  const wire::OwnedDescriptor wake_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::list<std::unique_ptr<Pair>> new_ ABSL_GUARDED_BY(mutex_);
  std::list<std::unique_ptr<Pair>> pairs_;  // of the thread
  std::thread thread_;
};

}  // namespace lossd::connections

#endif  // LOSSD_SERVER_CONNECTIONS_RELAY_H_
