// SPDX-License-Identifier: Apache-2.0
// A region of a server as a client of the protocol alone has it (region.proto): a session, a descriptor and a
// mapping, each of which a test may give up when it likes. Memory of a GPU that is played
// (tests/server/app/shared_device.cc) is mapped like memory of the host.
//
// Thread-compatible.
#ifndef LOSSD_TESTS_SUPPORT_RAW_REGION_H_
#define LOSSD_TESTS_SUPPORT_RAW_REGION_H_

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>

#include <cstdint>
#include <string>
#include <utility>

#include "proto/wire/region_packets.h"

namespace lossd::test {

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
  uint8_t* data() const { return data_; }  // null once it is unmapped

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

#endif  // LOSSD_TESTS_SUPPORT_RAW_REGION_H_
