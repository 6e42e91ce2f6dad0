// SPDX-License-Identifier: Apache-2.0
#include "server/app/addresses.h"

#include <gtest/gtest.h>

namespace lossd::app::addresses_test {
namespace {

TEST(AddressesTest, Parses) {
  const auto address = ParseAddress("listen", "127.0.0.1:7070");
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(address->host, "127.0.0.1");
  EXPECT_EQ(address->port, 7070);
  EXPECT_EQ(address->text(), "127.0.0.1:7070");
  EXPECT_EQ(ParseAddress("listen", "[::1]:0")->host, "[::1]");
  const auto unix_socket = ParseAddress("listen", "unix:/run/lossd:1");
  ASSERT_TRUE(unix_socket.ok());
  EXPECT_EQ(unix_socket->text(), "unix:/run/lossd:1");
  EXPECT_EQ(unix_socket->socket_path(), "/run/lossd:1");
  EXPECT_TRUE(IsLoopback(*unix_socket));
  EXPECT_EQ(ParseAddress("listen", "unix:///run/lossd")->socket_path(), "/run/lossd");
  EXPECT_EQ(ParseAddress("listen", "unix:lossd")->socket_path(), "lossd");
  EXPECT_TRUE(ParseAddress("listen", "unix:/" + std::string(106, 'a')).ok());
}

TEST(AddressesTest, ParsesSeveral) {
  const auto addresses = ParseAddresses("listen", "127.0.0.1:0,unix:/run/lossd,127.0.0.1:0");
  ASSERT_TRUE(addresses.ok()) << addresses.status();
  ASSERT_EQ(addresses->size(), 3u);
  EXPECT_EQ((*addresses)[1].socket_path(), "/run/lossd");
  for (const char* text : {"", "127.0.0.1:1,", "127.0.0.1:1,127.0.0.1:1", "unix:/a,unix:/a"}) {
    EXPECT_EQ(ParseAddresses("listen", text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(AddressesTest, Refuses) {
  const std::string long_path = "unix:/" + std::string(107, 'a');
  for (const std::string& text : {std::string(), std::string("unix:"), std::string("host"), std::string(":1"),
                                  std::string("host:"), std::string("host:x"), std::string("host:70000"),
                                  std::string("host:-1"), std::string("::1:80"), long_path}) {
    const auto address = ParseAddress("listen", text);
    EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(address.status().message().find("listen"), absl::string_view::npos);
  }
}

TEST(AddressesTest, KnowsLoopback) {
  for (const char* host : {"localhost", "127.0.0.1", "127.9.9.9", "[::1]"})
    EXPECT_TRUE(IsLoopback({host, 1})) << host;
  for (const char* host :
       {"0.0.0.0", "[::]", "10.0.0.1", "example.com", "128.0.0.1", "127.0.0.1.example.com"}) {
    EXPECT_FALSE(IsLoopback({host, 1})) << host;
  }
}

}  // namespace
}  // namespace lossd::app::addresses_test
