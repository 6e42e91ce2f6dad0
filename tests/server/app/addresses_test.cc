#include "server/app/addresses.h"

#include <gtest/gtest.h>

namespace lossd::app {
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
  EXPECT_TRUE(IsLoopback(*unix_socket));
}

TEST(AddressesTest, Refuses) {
  for (const char* text : {"", "unix:", "host", ":1", "host:", "host:x", "host:70000", "host:-1", "::1:80"}) {
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
}  // namespace lossd::app
