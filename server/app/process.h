// SPDX-License-Identifier: Apache-2.0
// What holds for the whole process of a server, whatever its flags.
#ifndef LOSSD_SERVER_APP_PROCESS_H_
#define LOSSD_SERVER_APP_PROCESS_H_

#include <grpcpp/server_builder.h>

#include <string>

#include "absl/time/time.h"

namespace lossd::app {

// Bounds freed memory (process.h), has writes to what is closed or full fail instead of ending the process, and
// sets what NCCL reads from the environment (kernels/device_choice.h). To be called first, before there
// are other threads.
void PrepareProcess();

// What the process keeps of memory that it has freed.
//
// glibc's allocator has many arenas, each for some of the threads, and adapts to what is freed: once a block
// of some MiB has been freed, blocks of up to that size come from the arenas, and an arena gives back nothing
// below twice as much. Heads and buffers of a few MiB come and go on all threads, so in time each arena keeps
// what all of them need at once, and resident memory grows with traffic, although what is in use does not.

// From now on, a block of at least 8 MiB is mapped by itself, and unmapped when it is freed; there are at
// most 8 arenas, and each gives back what is free at its end beyond 8 MiB. Buffers of messages are below
// both, since mapping each of them anew makes reads and writes of tensors slower. To be called before there
// are other threads. Does nothing to an allocator other than glibc's, such as a sanitizer's.
void BoundFreedMemory();

// If more than 16 MiB are free in all arenas together, gives back what is free between blocks in use.
// (glibc's malloc_trim leaves the ends of arenas, which are 64 MiB together at most.) That takes about 0.2 ms
// for each MiB; allocations wait that are from the arena at hand, an eighth of it. Thread-safe.
void GiveBackFreedMemory();

// Ends the process when its own end takes too long: a thread of it may wait for a device that is lost, or for
// something that nobody has thought of.

// What a drain may take beyond its timeout.
inline constexpr absl::Duration kGrace = absl::Seconds(10);
// What the process may take after that, to give back what it has: other ranks of it may wait for 20 seconds.
inline constexpr absl::Duration kFarewell = absl::Seconds(30);

// Ends the process with `status` after `limit`, with a line in the log that says that `what` does not end,
// unless it has ended by then. Thread-safe.
void EndWithin(absl::Duration limit, int status, std::string what);

// Which services a server has, for those who ask it.

// Gives the server gRPC's reflection service once, or not at all: it does not check who calls.
void SetReflection(bool wanted, grpc::ServerBuilder* builder);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_PROCESS_H_
