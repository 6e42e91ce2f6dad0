// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_connections.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lossd::metrics::http_connections_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class HttpConnectionsTest : public ::testing::Test {
 protected:
  // The descriptors to shut down when connection `descriptor` arrives.
  std::vector<int> Add(int descriptor, absl::string_view address, absl::Duration at = absl::ZeroDuration()) {
    std::vector<int> drop;
    last_ = connections_.Add(descriptor, address, absl::UnixEpoch() + at, &drop);
    return drop;
  }

  HttpConnections connections_{{.in_all = 4, .per_address = 3, .age = absl::Seconds(30)}};
  HttpConnections::Handle last_;
};

TEST_F(HttpConnectionsTest, TheOldestOfAnAddressMakesRoom) {
  EXPECT_THAT(Add(1, "b"), IsEmpty());
  EXPECT_THAT(Add(2, "b"), IsEmpty());
  EXPECT_THAT(Add(3, "b"), IsEmpty());
  EXPECT_THAT(Add(4, "b"), ElementsAre(1));
  EXPECT_THAT(Add(10, "a"), IsEmpty());
}

// One that makes room both in all and for its address is enough.
TEST_F(HttpConnectionsTest, BothLimitsAtOnce) {
  for (int i = 1; i <= 3; ++i) Add(i, "b");
  Add(10, "a");
  EXPECT_THAT(Add(4, "b"), ElementsAre(1));
}

TEST_F(HttpConnectionsTest, TheOldestOfAllDoesNotMakeRoomForAnAddress) {
  Add(10, "a");
  for (int i = 1; i <= 3; ++i) Add(i, "b");
  EXPECT_THAT(Add(4, "b"), ElementsAre(10, 1));
}

TEST_F(HttpConnectionsTest, TheOldestOfAllMakesRoom) {
  for (int i = 0; i < 4; ++i) EXPECT_THAT(Add(i, std::string(1, static_cast<char>('a' + i))), IsEmpty());
  EXPECT_THAT(Add(4, "z"), ElementsAre(0));
  EXPECT_THAT(Add(5, "a"), ElementsAre(1));
  EXPECT_EQ(connections_.size(), 4u);
}

TEST_F(HttpConnectionsTest, OldConnectionsGoWhenANewOneArrives) {
  Add(0, "a");
  Add(1, "b", absl::Seconds(20));
  EXPECT_THAT(Add(2, "c", absl::Seconds(30)), IsEmpty());
  EXPECT_THAT(Add(3, "c", absl::Seconds(51)), ElementsAre(0, 1));
}

TEST_F(HttpConnectionsTest, ClosedConnectionsDoNotCount) {
  for (int i = 0; i < 100; ++i) {
    EXPECT_THAT(Add(i, "a"), IsEmpty());
    connections_.Remove(last_);
  }
  EXPECT_EQ(connections_.size(), 0u);
}

// A dropped connection no longer counts, and is dropped once, although it is entered until it is closed.
TEST_F(HttpConnectionsTest, DroppedConnectionsDoNotCount) {
  Add(0, "a");
  const HttpConnections::Handle first = last_;
  for (int i = 1; i < 3; ++i) Add(i, "a");
  EXPECT_THAT(Add(3, "a"), ElementsAre(0));
  EXPECT_EQ(connections_.size(), 3u);
  EXPECT_THAT(Add(4, "a"), ElementsAre(1));
  connections_.Remove(first);
  EXPECT_EQ(connections_.size(), 3u);
}

}  // namespace
}  // namespace lossd::metrics::http_connections_test
