// SPDX-License-Identifier: Apache-2.0
// What the process keeps of memory that it has freed.
//
// glibc's allocator has many arenas, each for some of the threads, and adapts to what is freed: once a block
// of some MiB has been freed, blocks of up to that size come from the arenas, and an arena gives back nothing
// below twice as much. Heads and buffers of a few MiB come and go on all threads, so in time each arena keeps
// what all of them need at once, and resident memory grows with traffic, although what is in use does not.
#ifndef LOSSD_SERVER_APP_HEAP_H_
#define LOSSD_SERVER_APP_HEAP_H_

namespace lossd::app {

// From now on, a block of at least 8 MiB is mapped by itself, and unmapped when it is freed; there are at
// most 8 arenas, and each gives back what is free at its end beyond 8 MiB. Buffers of messages are below
// both, since mapping each of them anew makes reads and writes of tensors slower. To be called before there
// are other threads. Does nothing to an allocator other than glibc's, such as a sanitizer's.
void BoundFreedMemory();

// If more than 16 MiB are free in all arenas together, gives back what is free between blocks in use.
// (glibc's malloc_trim leaves the ends of arenas, which are 64 MiB together at most.) That takes about 0.2 ms
// for each MiB; allocations wait that are from the arena at hand, an eighth of it. Thread-safe.
void GiveBackFreedMemory();

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_HEAP_H_
