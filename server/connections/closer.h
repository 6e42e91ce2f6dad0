// SPDX-License-Identifier: Apache-2.0
// Closes what strangers had a hand in, so that no other thread waits for it.
//
// Whoever closes the last descriptor of a TCP socket with SO_LINGER waits until its data is sent, or for as
// long as its owner likes, and a program of the same host can pass such a socket over any Unix socket that
// takes descriptors (SCM_RIGHTS): by receiving it, or only by closing the connection in which it lies, a
// thread comes to wait. The threads of this file close with a timer, whose signal ends such a wait after 10
// ms. What no signal ends (a file of a file system that its owner serves) holds one of a few threads, and the
// process ends without waiting for them.
//
// All functions are thread-safe and do not block.
#ifndef LOSSD_SERVER_CONNECTIONS_CLOSER_H_
#define LOSSD_SERVER_CONNECTIONS_CLOSER_H_

#include <cstddef>
#include <vector>

#include "proto/wire/region_packets.h"

namespace lossd::connections {

// Soon. Does nothing for -1.
void CloseElsewhere(wire::OwnedDescriptor descriptor);
void CloseElsewhere(std::vector<wire::OwnedDescriptor> descriptors);

// Whether so many descriptors wait to be closed that no more should be taken from those who send them.
bool ClosingIsBehind();

// How many descriptors were given to CloseElsewhere and may be open still.
size_t BeingClosed();

}  // namespace lossd::connections

#endif  // LOSSD_SERVER_CONNECTIONS_CLOSER_H_
