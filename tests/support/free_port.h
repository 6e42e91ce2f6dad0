// SPDX-License-Identifier: Apache-2.0
// Ports for the servers of a test. Thread-safe.
#ifndef LOSSD_TESTS_SUPPORT_FREE_PORT_H_
#define LOSSD_TESTS_SUPPORT_FREE_PORT_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace lossd::test {

// A port of the loopback that was free a moment ago.
inline int FreePort() {
  const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(descriptor, any, length), 0);
  EXPECT_EQ(getsockname(descriptor, any, &length), 0);
  close(descriptor);
  return ntohs(address.sin_port);
}

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_FREE_PORT_H_
