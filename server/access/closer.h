// SPDX-License-Identifier: Apache-2.0
// Protection from file descriptors that strangers send over Unix sockets. CloseElsewhere closes such
// descriptors, and connections that may contain them, on threads of its own, so that no other thread waits.
// Relay keeps descriptors away from a reader that does not expect them.
//
// The problem: close of the last descriptor of a TCP socket with SO_LINGER waits until the socket's data is
// sent, or for a time that the socket's owner chooses. A program of the same host can pass such a socket over
// any Unix socket that takes descriptors (SCM_RIGHTS). A thread that receives and closes it, or that closes
// the connection in which it is queued, then has to wait.
//
// The threads of this file set a timer before they close. Its signal ends such a wait after 10 ms. A file of
// a user's own file system (FUSE) can make close wait without end, in spite of signals. Such a wait blocks
// one of a few threads, and the process ends without waiting for them.
//
// All functions and classes are thread-safe. The functions do not block.
#ifndef LOSSD_SERVER_ACCESS_CLOSER_H_
#define LOSSD_SERVER_ACCESS_CLOSER_H_

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "proto/wire/region_packets.h"

namespace lossd::access {

// Closes the descriptors soon, on another thread. Does nothing for -1.
void CloseElsewhere(wire::OwnedDescriptor descriptor);
void CloseElsewhere(std::vector<wire::OwnedDescriptor> descriptors);

// Whether too many descriptors wait to be closed. Callers should then receive no more.
bool ClosingIsBehind();

// The number of descriptors that were given to CloseElsewhere and may still be open.
size_t BeingClosed();

// Stands between a stranger on a Unix socket and a reader that does not expect descriptors (gRPC), if the
// kernel cannot keep descriptors out. A relay passes bytes on in both directions, and ends a connection that
// brings a descriptor. It copies all bytes, so use it only for such connections.
//
// Thread-safe. It has one thread.
class Relay {
 public:
  Relay();
  // Ends all connections.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Puts the relay in front of a connection, and returns the socket for the reader, which brings only bytes.
  // Empty if the system has no sockets left.
  wire::OwnedDescriptor Stand(wire::OwnedDescriptor stranger) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // One direction of a connection.
  struct Direction {
    std::string bytes;  // bytes that were read; the bytes from `sent` on are not written yet
    size_t sent = 0;
    bool empty() const { return sent == bytes.size(); }
  };
  // One connection. `stranger`: the stranger's socket. `reader`: one end of a socket pair, whose other end
  // the reader has.
  struct Pair {
    wire::OwnedDescriptor stranger, reader;
    Direction to_reader, to_stranger;
    // One end is closed. Nothing more is read. Bytes that were read before, in both directions, are passed on
    // while that is possible.
    bool ended = false;
  };

  void Run();
  // These three return whether the connection goes on.
  static bool Serve(Pair* pair, int stranger_events, int reader_events);
  static bool ReadStranger(Pair* pair);
  static bool ReadReader(Pair* pair);

  const wire::OwnedDescriptor wake_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::list<std::unique_ptr<Pair>> new_ ABSL_GUARDED_BY(mutex_);
  std::list<std::unique_ptr<Pair>> pairs_;  // used by the thread alone
  std::thread thread_;
};

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_CLOSER_H_
