// SPDX-License-Identifier: Apache-2.0
#include "server/access/listening_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "tests/support/temp_folder.h"

namespace lossd::access::listening_socket_test {
namespace {

using ::testing::HasSubstr;

bool Connects(const std::string& path) {
  const int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {.sun_family = AF_UNIX};
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const int result = connect(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  close(descriptor);
  return result == 0;
}

class UnixSocketTest : public ::testing::Test {
 protected:
  absl::StatusOr<ListeningSocket> Open(mode_t mode = 0600) const {
    return ListeningSocket::OpenUnix(path_, mode, SOCK_STREAM);
  }

  test::TempFolder folder_;
  const std::string path_ = folder_.File("socket");
};

TEST_F(UnixSocketTest, HasTheModeWhateverTheUmaskIs) {
  for (const mode_t mode : {0600, 0660, 0666}) {
    for (const mode_t mask : {0000, 0077}) {
      const mode_t before = umask(mask);
      const auto socket = Open(mode);
      umask(before);
      ASSERT_TRUE(socket.ok()) << socket.status();
      struct stat status = {};
      ASSERT_EQ(stat(path_.c_str(), &status), 0);
      EXPECT_EQ(status.st_mode & 0777, mode);
      EXPECT_TRUE(Connects(path_));
    }
  }
}

TEST_F(UnixSocketTest, RemovesItsFile) {
  Open().IgnoreError();
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(UnixSocketTest, LeavesAFileThatIsNotItsOwn) {
  auto socket = std::make_unique<ListeningSocket>(*Open());
  std::filesystem::rename(path_, folder_.File("kept"));  // so that its inode is not used again
  test::WriteWholeFile(path_, "another one");
  socket.reset();
  EXPECT_EQ(test::ReadWholeFile(path_), "another one");
}

// A process that was killed leaves its file, which nobody listens on.
TEST_F(UnixSocketTest, ReplacesAStaleFile) {
  const int stale = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {.sun_family = AF_UNIX};
  std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(stale, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(stale);
  ASSERT_FALSE(Connects(path_));
  const auto socket = Open();
  ASSERT_TRUE(socket.ok()) << socket.status();
  EXPECT_TRUE(Connects(path_));
}

TEST_F(UnixSocketTest, TakesNothingAway) {
  const auto first = Open();
  ASSERT_TRUE(first.ok());
  const auto second = Open();
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another lossd listens"));
  EXPECT_TRUE(Connects(path_)) << "the first one is still there";
}

TEST_F(UnixSocketTest, LeavesSocketsOfOtherPrograms) {
  const int other = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {.sun_family = AF_UNIX};
  std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(other, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(other, 1), 0);
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("another program listens"));
  close(other);
}

TEST_F(UnixSocketTest, RefusesPathsThatCannotBe) {
  test::WriteWholeFile(path_, "precious");
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("not a socket"));
  EXPECT_EQ(test::ReadWholeFile(path_), "precious");
  const auto far = ListeningSocket::OpenUnix("/" + std::string(107, 'a'), 0600, SOCK_STREAM);
  EXPECT_THAT(std::string(far.status().message()), HasSubstr("108 bytes; a socket's has 1 to 107"));
  const auto nowhere = ListeningSocket::OpenUnix(folder_.File("none/socket"), 0600, SOCK_STREAM);
  EXPECT_THAT(std::string(nowhere.status().message()), HasSubstr("No such file"));
}

TEST(TcpSocketTest, APortThatIsTakenIsAnError) {
  const auto first = ListeningSocket::OpenTcp("127.0.0.1", 0);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = ListeningSocket::OpenTcp("127.0.0.1", first->front().port());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
}

TEST(TcpSocketTest, TakesNamesAndIpv6) {
  for (const char* host : {"localhost", "127.0.0.1", "0.0.0.0"}) {
    const auto sockets = ListeningSocket::OpenTcp(host, 0);
    ASSERT_TRUE(sockets.ok()) << host << sockets.status();
    EXPECT_GT(sockets->front().port(), 0);
  }
  EXPECT_FALSE(ListeningSocket::OpenTcp("no such host", 0).ok());
}

// Whether somebody listens there.
template <typename Address>
bool ConnectsTo(const Address& address) {
  const int descriptor =
      socket(reinterpret_cast<const sockaddr*>(&address)->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int result = connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  close(descriptor);
  return result == 0;
}

sockaddr_in LoopbackOfIpv4(int port) {
  sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port))};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

sockaddr_in6 LoopbackOfIpv6(int port) {
  sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_port = htons(static_cast<uint16_t>(port))};
  address.sin6_addr = in6addr_loopback;
  return address;
}

TEST(TcpSocketTest, AllAddressesOfIpv6AreThoseOfIpv4Too) {
  const auto one = ListeningSocket::OpenTcp("[::1]", 0);
  if (absl::IsUnavailable(one.status())) GTEST_SKIP() << one.status();  // a machine without IPv6
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_TRUE(ConnectsTo(LoopbackOfIpv6(one->front().port())));
  EXPECT_FALSE(ConnectsTo(LoopbackOfIpv4(one->front().port())));

  const auto all = ListeningSocket::OpenTcp("[::]", 0);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_TRUE(ConnectsTo(LoopbackOfIpv6(all->front().port())));
  EXPECT_TRUE(ConnectsTo(LoopbackOfIpv4(all->front().port())));
}

}  // namespace
}  // namespace lossd::access::listening_socket_test
