// SPDX-License-Identifier: Apache-2.0
// Holdings: what a server holds for its clients, as counted by the system and by the server. A test compares
// it with the value before clients came. Also RawRegion, a region that a client holds.
//
// Thread-compatible.
#ifndef LOSSD_TESTS_SUPPORT_PROCESS_HOLDINGS_H_
#define LOSSD_TESTS_SUPPORT_PROCESS_HOLDINGS_H_

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <ostream>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "proto/wire/region_packets.h"

namespace lossd::test {

struct Holdings {
  uint64_t staging = 0;      // bytes, from GetServer
  int64_t descriptors = 0;   // connections, sessions, processes and memory
  int64_t mappings = 0;      // mappings of memory that is shared with clients
  int64_t shared_bytes = 0;  // the allocated bytes of such memory

  bool operator==(const Holdings&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, const Holdings& holdings) {
  return out << holdings.staging << " bytes of staging memory, " << holdings.descriptors << " descriptors, "
             << holdings.mappings << " mappings, " << holdings.shared_bytes << " shared bytes";
}

inline int64_t DescriptorsOf(pid_t process) {
  std::error_code error;
  const std::filesystem::directory_iterator folder(absl::StrCat("/proc/", process, "/fd"), error);
  return std::distance(begin(folder), end(folder));
}

// Counts the mappings of memory without a file (memfd): regions of the host and of a simulated GPU are such
// memory.
inline int64_t SharedMappingsOf(pid_t process) {
  std::ifstream maps(absl::StrCat("/proc/", process, "/maps"));
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) count += absl::StrContains(line, "/memfd:") ? 1 : 0;
  return count;
}

inline int64_t SharedBytesOf(pid_t process) {
  std::ifstream status(absl::StrCat("/proc/", process, "/status"));
  for (std::string line; std::getline(status, line);) {
    int64_t kibibytes = 0;
    absl::string_view text = line;
    if (!absl::ConsumePrefix(&text, "RssShmem:") || !absl::ConsumeSuffix(&text, "kB")) continue;
    if (absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &kibibytes)) return kibibytes << 10;
  }
  return 0;
}

// `client` is a client of that server that has nothing in shared memory.
inline Holdings HoldingsOf(pid_t process, client::Client& client) {
  const auto server = client.GetServer();
  EXPECT_TRUE(server.ok()) << server.status();
  return {.staging = server.ok() ? server->memory().staging() : 0,
          .descriptors = DescriptorsOf(process),
          .mappings = SharedMappingsOf(process),
          .shared_bytes = SharedBytesOf(process)};
}

// The same, after waiting until the values stay equal: the server may still have to notice that clients have
// ended.
inline Holdings SettledHoldingsOf(pid_t process, client::Client& client) {
  constexpr int kAlike = 20;
  Holdings last;
  for (int alike = 0; alike < kAlike; absl::SleepFor(absl::Milliseconds(10))) {
    const Holdings now = HoldingsOf(process, client);
    alike = now == last ? alike + 1 : 0;
    last = now;
  }
  return last;
}

// Waits until the server holds no more than `before`, except for `touched` bytes: pages of regions that
// existed before and are allocated when they are first used.
inline testing::AssertionResult BackTo(const Holdings& before, pid_t process, client::Client& client,
                                       int64_t touched = 0) {
  const absl::Time end = absl::Now() + absl::Seconds(120);
  while (true) {
    const Holdings now = HoldingsOf(process, client);
    if (now.staging == before.staging && now.descriptors <= before.descriptors &&
        now.mappings == before.mappings && now.shared_bytes <= before.shared_bytes + touched)
      return testing::AssertionSuccess();
    if (absl::Now() > end) return testing::AssertionFailure() << now << "; before: " << before;
    absl::SleepFor(absl::Milliseconds(5));
  }
}

// A region of a server, as a client that knows only the protocol holds it (region.proto): a session, a file
// descriptor and a mapping. A test may give up each of them at any time. Memory of a simulated GPU
// (tests/server/app/shared_device.cc) is mapped like host memory.
class RawRegion {
 public:
  RawRegion(const std::string& socket, uint64_t bytes, bool of_device) {
    auto session = wire::ConnectRegionSocket(socket);
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return;
    session_ = *std::move(session);
    v1::RegionRequest request;
    request.set_bytes(bytes);
    request.set_of_device(of_device);
    EXPECT_TRUE(wire::SendRegionPacket(session_.get(), request.SerializeAsString(), -1).ok());
    pollfd ready = {.fd = session_.get(), .events = POLLIN};
    EXPECT_EQ(poll(&ready, 1, 60'000), 1) << "the server does not answer";
    absl::StatusOr<wire::RegionPacket> packet = wire::ReceiveRegionPacket(session_.get());
    EXPECT_TRUE(packet.ok()) << packet.status();
    if (!packet.ok()) return;
    const auto answer = wire::ParseRegionAnswer(packet->bytes);
    EXPECT_TRUE(answer.ok() && answer->has_opened()) << answer.status();
    if (!answer.ok() || !answer->has_opened()) return;
    id_ = answer->opened().id();
    size_ = answer->opened().bytes();
    memory_ = std::move(packet->descriptor);
    void* const data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, memory_.get(), 0);
    EXPECT_NE(data, MAP_FAILED);
    if (data != MAP_FAILED) data_ = static_cast<uint8_t*>(data);
  }
  ~RawRegion() { Unmap(); }
  RawRegion(const RawRegion&) = delete;
  RawRegion& operator=(const RawRegion&) = delete;

  const std::string& id() const { return id_; }
  uint64_t size() const { return size_; }
  uint8_t* data() const { return data_; }  // null after Unmap

  void Unmap() {
    if (data_ != nullptr) munmap(std::exchange(data_, nullptr), size_);
  }
  void CloseDescriptor() { memory_ = wire::OwnedDescriptor(); }
  void CloseSession() { session_ = wire::OwnedDescriptor(); }

 private:
  wire::OwnedDescriptor session_;
  wire::OwnedDescriptor memory_;
  std::string id_;
  uint64_t size_ = 0;
  uint8_t* data_ = nullptr;
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_PROCESS_HOLDINGS_H_
