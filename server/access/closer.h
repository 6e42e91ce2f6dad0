// SPDX-License-Identifier: Apache-2.0
// Protection from the descriptors that strangers send. CloseElsewhere closes, on threads of its own, whatever
// a stranger had a hand in, so that no other thread waits for it. Relay keeps descriptors away from a reader
// that does not know them.
//
// A thread that closes the last descriptor of a TCP socket with SO_LINGER waits until the socket's data is
// sent, or for as long as the socket's owner likes. A program of the same host can pass such a socket over
// any Unix socket that takes descriptors (SCM_RIGHTS). A thread that receives the socket, or that only closes
// the connection in which it lies, then has to wait. The threads of this file close with a timer, whose
// signal ends such a wait after 10 ms. No signal ends the wait for a file of a file system that its owner
// serves; such a wait holds one of a few threads, and the process ends without waiting for them.
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

// Closes the descriptors soon. Does nothing for -1.
void CloseElsewhere(wire::OwnedDescriptor descriptor);
void CloseElsewhere(std::vector<wire::OwnedDescriptor> descriptors);

// Whether so many descriptors wait to be closed that no more should be received.
bool ClosingIsBehind();

// How many descriptors were given to CloseElsewhere and may be open still.
size_t BeingClosed();

// Stands between a stranger on a Unix socket and a reader that does not know descriptors (gRPC), where the
// kernel cannot keep descriptors out. A relay passes bytes on in both directions, and ends a connection that
// brings a descriptor. It copies all bytes, so it is for those connections alone.
//
// Thread-safe. It has one thread, while there is something to pass on or to wait for.
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

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_CLOSER_H_
