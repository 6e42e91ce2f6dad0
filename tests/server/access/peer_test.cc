// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "proto/wire/region_packets.h"
#include "server/access/entrance.h"

namespace lossd::access::peer_test {
namespace {

constexpr uid_t kStranger = 65534;

// A listening socket at 127.0.0.1 or [::1], and connections to it.
class Loopback {
 public:
  explicit Loopback(int family) : listener_(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.ss_family = static_cast<sa_family_t>(family);
    if (family == AF_INET) {
      reinterpret_cast<sockaddr_in&>(address_).sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    } else {
      reinterpret_cast<sockaddr_in6&>(address_).sin6_addr = in6addr_loopback;
    }
    size_ = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    ok_ = bind(listener_.get(), any(), size_) == 0 && listen(listener_.get(), 4) == 0 &&
          getsockname(listener_.get(), any(), &size_) == 0;
  }

  bool ok() const { return ok_; }
  wire::OwnedDescriptor Connect() {
    wire::OwnedDescriptor made(socket(address_.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(made.get(), any(), size_), 0);
    return made;
  }
  Peer Accept() {
    sockaddr_storage from = {};
    socklen_t size = sizeof(from);
    const wire::OwnedDescriptor accepted(accept(listener_.get(), reinterpret_cast<sockaddr*>(&from), &size));
    return PeerOf(accepted.get(), from);
  }

 private:
  sockaddr* any() { return reinterpret_cast<sockaddr*>(&address_); }

  const wire::OwnedDescriptor listener_;
  sockaddr_storage address_ = {};
  socklen_t size_ = 0;
  bool ok_ = false;
};

// The address of a socket's own end.
std::string TextOf(int descriptor) {
  sockaddr_storage own = {};
  socklen_t size = sizeof(own);
  EXPECT_EQ(getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &size), 0);
  const bool ipv4 = own.ss_family == AF_INET;
  const uint16_t port = ntohs(ipv4 ? reinterpret_cast<const sockaddr_in&>(own).sin_port
                                   : reinterpret_cast<const sockaddr_in6&>(own).sin6_port);
  return absl::StrCat(ipv4 ? "127.0.0.1:" : "[::1]:", port);
}

TEST(PeerTest, ProgramsOfThisHostAreKnownByTheirUser) {
  for (const int family : {AF_INET, AF_INET6}) {
    Loopback loopback(family);
    if (family == AF_INET6 && !loopback.ok()) continue;  // a host without IPv6
    ASSERT_TRUE(loopback.ok());
    if (!KnowsLoopbackUsers()) GTEST_SKIP() << "this kernel has no sock_diag";
    const wire::OwnedDescriptor client = loopback.Connect();
    const Peer peer = loopback.Accept();
    EXPECT_EQ(peer.user, geteuid());
    EXPECT_TRUE(peer.is_loopback);
    EXPECT_TRUE(IsOwnUser(peer));
    EXPECT_EQ(peer.name, absl::StrCat("uid ", geteuid()));
    EXPECT_EQ(peer.loopback_address, TextOf(client.get()));
  }
}

// The kernel gives such a connection to root.
TEST(PeerTest, WhoHasGoneIsNobody) {
  Loopback loopback(AF_INET);
  loopback.Connect() = wire::OwnedDescriptor();
  const Peer peer = loopback.Accept();
  EXPECT_FALSE(peer.user.has_value());
  EXPECT_FALSE(IsOwnUser(peer));
  EXPECT_EQ(peer.name, "loopback");
}

TEST(PeerTest, AnotherUserIsAnother) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  if (!KnowsLoopbackUsers()) GTEST_SKIP() << "this kernel has no sock_diag";
  Loopback loopback(AF_INET);
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(kStranger) != 0) _exit(1);
    const wire::OwnedDescriptor client = loopback.Connect();
    pause();
  }
  const Peer peer = loopback.Accept();
  EXPECT_EQ(peer.user, kStranger);
  EXPECT_FALSE(IsOwnUser(peer));
  EXPECT_EQ(peer.name, "uid 65534");
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace lossd::access::peer_test
