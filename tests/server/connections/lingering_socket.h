// SPDX-License-Identifier: Apache-2.0
// A TCP socket that whoever closes it last waits for, for a minute: it lingers, and the other end takes
// nothing.
#ifndef LOSSD_TESTS_SERVER_CONNECTIONS_LINGERING_SOCKET_H_
#define LOSSD_TESTS_SERVER_CONNECTIONS_LINGERING_SOCKET_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <vector>

#include "proto/wire/region_packets.h"

namespace lossd::connections::testing {

inline bool IsOpen(int descriptor) { return fcntl(descriptor, F_GETFD) >= 0; }

// Thread-compatible.
struct LingeringSocket {
  LingeringSocket() {
    const wire::OwnedDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener.get(), any, size), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), any, &size), 0);
    near = wire::OwnedDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(near.get(), any, size), 0);
    far = wire::OwnedDescriptor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const linger wait = {.l_onoff = 1, .l_linger = 60};
    setsockopt(near.get(), SOL_SOCKET, SO_LINGER, &wait, sizeof(wait));
    const std::vector<char> block(size_t{1} << 16);
    while (send(near.get(), block.data(), block.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
  }

  wire::OwnedDescriptor near;
  wire::OwnedDescriptor far;
};

}  // namespace lossd::connections::testing

#endif  // LOSSD_TESTS_SERVER_CONNECTIONS_LINGERING_SOCKET_H_
