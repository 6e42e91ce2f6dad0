// SPDX-License-Identifier: Apache-2.0
// What holds for the whole process of a server, whatever its flags: what main does first (PrepareProcess),
// how freed memory goes back to the system (BoundFreedMemory, GiveBackFreedMemory), how a process ends that
// does not end by itself (EndWithin), and gRPC's reflection service (SetReflection).
#ifndef LOSSD_SERVER_APP_PROCESS_H_
#define LOSSD_SERVER_APP_PROCESS_H_

#include <grpcpp/server_builder.h>

#include <string>

#include "absl/time/time.h"

namespace lossd::app {

// Bounds freed memory (BoundFreedMemory), makes writes to what is closed or full fail instead of ending the
// process, and sets what NCCL reads from the environment (kernels/device_choice.h). To be called first,
// before there are other threads.
void PrepareProcess();

// Bounds the memory that the process keeps after it has freed it.
//
// glibc's allocator has many arenas, each for some of the threads, and adapts to what is freed: once a block
// of some MiB has been freed, blocks of up to that size come from the arenas, and an arena gives back nothing
// below twice as much. Heads and buffers of a few MiB come and go on all threads. So in time each arena keeps
// what all threads need at once, and resident memory grows with traffic, although the memory in use does not
// grow.
//
// From now on, a block of at least 8 MiB is mapped by itself, and unmapped when it is freed; there are at
// most 8 arenas, and each gives back what is free at its end beyond 8 MiB. Buffers of messages are below both
// limits, because mapping each of them anew makes reads and writes of tensors slower. To be called before
// there are other threads. Does nothing to an allocator other than glibc's, such as a sanitizer's.
void BoundFreedMemory();

// If more than 16 MiB are free in all arenas together, gives back what is free between blocks in use.
// (glibc's malloc_trim leaves the ends of arenas, which are 64 MiB together at most.) That takes about 0.2 ms
// for each MiB; allocations wait that are from the arena at hand, an eighth of it. Thread-safe.
void GiveBackFreedMemory();

// The time that a drain may take beyond its timeout.
inline constexpr absl::Duration kGrace = absl::Seconds(10);
// The time that the process may take after the drain to give back what it has: other ranks of the process may
// wait for 20 seconds.
inline constexpr absl::Duration kFarewell = absl::Seconds(30);

// Ends the process with `status` after `limit`, with a line in the log that says that `what` does not end,
// unless the process has ended by then. A thread of the process may wait for a device that is lost, or for a
// reason that is not known. Thread-safe.
void EndWithin(absl::Duration limit, int status, std::string what);

// Gives the server gRPC's reflection service, which says which services a server has, once or not at all. The
// reflection service does not check who calls.
void SetReflection(bool wanted, grpc::ServerBuilder* builder);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_PROCESS_H_
