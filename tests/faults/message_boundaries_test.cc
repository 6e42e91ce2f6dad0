// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "tests/faults/fault_proxy.h"

namespace lossd::test::message_boundaries_test {
namespace {

using ::testing::ElementsAre;

constexpr char kData = 0, kHeaders = 1, kWindowUpdate = 8;

std::string Frame(char type, char stream, const std::string& payload) {
  const char header[] = {
      0, static_cast<char>(payload.size() >> 8), static_cast<char>(payload.size()), type, 0, 0, 0, 0, stream};
  return std::string(header, sizeof(header)) + payload;
}

std::string Message(size_t size) {
  const char prefix[] = {0, 0, 0, static_cast<char>(size >> 8), static_cast<char>(size)};
  return std::string(prefix, sizeof(prefix)) + std::string(size, 'x');
}

std::vector<size_t> Take(MessageBoundaries& boundaries, absl::string_view bytes) {
  return boundaries.Take({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

TEST(MessageBoundariesTest, FindsTheEndsOfHeadersAndMessages) {
  const std::string bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kWindowUpdate, 0, "1234") +
                            Frame(kHeaders, 1, "head") + Frame(kData, 1, Message(3) + Message(300)) +
                            Frame(kData, 1, "") + Frame(kData, 1, Message(0));
  MessageBoundaries boundaries(/*from_client=*/true);
  const size_t headers = 24 + 13 + 13;
  EXPECT_THAT(Take(boundaries, bytes),
              ElementsAre(headers, headers + 9 + 8, headers + 9 + 8 + 305, bytes.size()));
}

TEST(MessageBoundariesTest, FramesMayBeEmpty) {
  const std::string empty = Frame(kHeaders, 1, ""), data = Frame(kData, 1, "");
  MessageBoundaries boundaries(/*from_client=*/false);
  EXPECT_THAT(Take(boundaries, empty + data + empty), ElementsAre(empty.size(), 3 * empty.size()));
}

TEST(MessageBoundariesTest, MessagesOfSeveralStreamsInterleave) {
  const std::string one = Message(20), two = Message(10);
  const std::string begin = Frame(kData, 1, one.substr(0, 3)) + Frame(kData, 3, two.substr(0, 9));
  const std::string middle = Frame(kData, 1, one.substr(3)), end = Frame(kData, 3, two.substr(9));
  MessageBoundaries boundaries(/*from_client=*/false);
  EXPECT_THAT(Take(boundaries, begin + middle + end),
              ElementsAre(begin.size() + middle.size(), begin.size() + middle.size() + end.size()));
}

TEST(MessageBoundariesTest, DoesNotDependOnHowBytesArrive) {
  std::mt19937 random(std::random_device{}());
  std::string bytes;
  for (int i = 0; i < 30; ++i) {
    bytes += random() % 3 == 0 ? Frame(kHeaders, 1, std::string(random() % 40, 'h'))
                               : Frame(kData, 1, Message(random() % 400));
  }
  MessageBoundaries whole(false), pieces(false);
  const std::vector<size_t> want = Take(whole, bytes);
  EXPECT_EQ(want.size(), 30);
  std::vector<size_t> got;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t size = 1 + random() % 50;
    for (size_t end : Take(pieces, absl::string_view(bytes).substr(begin, size))) got.push_back(begin + end);
    begin += size;
  }
  EXPECT_EQ(got, want);
}

}  // namespace
}  // namespace lossd::test::message_boundaries_test
