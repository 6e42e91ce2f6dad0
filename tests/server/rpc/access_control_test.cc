// SPDX-License-Identifier: Apache-2.0
// Tests of access_control.h: which role each method needs, and who the peer of a call is.
#include "server/rpc/access_control.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/region.pb.h"
#include "lossd/v1/server.pb.h"

// ---- Access to methods ----

namespace lossd::rpc::method_access_test {
namespace {

// All methods of the services in proto/lossd/v1, by the files that are there.
std::multiset<std::string> MethodsOfTheProtocol() {
  // Registers the files.
  (void)v1::ListHeadsRequest::descriptor();
  (void)v1::OpenMicrobatch::descriptor();
  (void)v1::RegionRequest::descriptor();
  (void)v1::GetServerRequest::descriptor();
  std::multiset<std::string> methods;
  for (const auto& entry : std::filesystem::directory_iterator(LOSSD_PROTO_FOLDER "/lossd/v1")) {
    const std::string name = absl::StrCat("lossd/v1/", entry.path().filename().string());
    const auto* file = google::protobuf::DescriptorPool::generated_pool()->FindFileByName(name);
    EXPECT_NE(file, nullptr) << name << " is not in this test: include what is made from it";
    for (int i = 0; file != nullptr && i < file->service_count(); ++i) {
      for (int k = 0; k < file->service(i)->method_count(); ++k) {
        methods.insert(absl::StrCat(file->service(i)->full_name(), "/", file->service(i)->method(k)->name()));
      }
    }
  }
  return methods;
}

TEST(MethodAccessTest, EveryMethodOfTheProtocolHasOneLineAndNoOther) {
  std::multiset<std::string> lines;
  for (const MethodAccess& line : MethodAccessTable())
    lines.insert(absl::StrCat(line.service, "/", line.method));
  EXPECT_EQ(lines, MethodsOfTheProtocol());
  EXPECT_GE(lines.size(), 16u);
}

TEST(MethodAccessTest, NoTwoServicesHaveAMethodOfOneName) {
  std::set<std::string> names;
  for (const MethodAccess& line : MethodAccessTable()) {
    EXPECT_TRUE(names.emplace(line.method).second) << line.method;
    EXPECT_EQ(FindMethodAccess(line.method), &line);
  }
}

TEST(MethodAccessTest, ChangesOfHeadsAreAudited) {
  for (const char* method : {"CreateHead", "DeleteHead", "WriteTensor", "LoadCheckpoint"}) {
    EXPECT_EQ(FindMethodAccess(method)->role, access::Role::kAdmin) << method;
  }
  // Whoever saves may remove: a trainer keeps so many of its checkpoints.
  for (const char* method : {"SaveCheckpoint", "DeleteCheckpoint"}) {
    EXPECT_EQ(FindMethodAccess(method)->role, access::Role::kTrainer) << method;
    EXPECT_TRUE(FindMethodAccess(method)->audited) << method;
  }
  for (const MethodAccess& line : MethodAccessTable()) {
    if (line.role == access::Role::kAdmin) {
      EXPECT_TRUE(line.audited) << line.method;
    }
    if (line.role == access::Role::kReader) {
      EXPECT_FALSE(line.audited) << line.method;
    }
  }
  EXPECT_EQ(FindMethodAccess("NoSuchMethod"), nullptr);
}

}  // namespace
}  // namespace lossd::rpc::method_access_test

// ---- The peer of a call ----

namespace lossd::rpc::peer_test {
namespace {

TEST(PeerTest, IsTheAddressWithoutThePort) {
  EXPECT_EQ(PeerOf("ipv4:10.0.0.7:41234", 1), "10.0.0.7");
  EXPECT_EQ(PeerOf("ipv6:%5B2001:db8::7%5D:41234", 1), "[2001:db8::7]");
  EXPECT_EQ(PeerOf("ipv6:[2001:db8::7]:41234", 1), "[2001:db8::7]");
}

TEST(PeerTest, IsAConnectionOnTheServersOwnMachine) {
  EXPECT_EQ(PeerOf("ipv4:127.0.0.1:41234", 1), "127.0.0.1:41234");
  EXPECT_EQ(PeerOf("ipv6:%5B::1%5D:41234", 1), "[::1]:41234");
  EXPECT_EQ(PeerOf("ipv6:%5B::ffff:127.0.0.1%5D:41234", 1), "[::ffff:127.0.0.1]:41234");
}

TEST(PeerTest, IsNobodyInTheServersOwnProcess) {
  EXPECT_EQ(PeerOf("inproc", 1), "");
  EXPECT_EQ(PeerOf("inproc:server", 1), "");
}

TEST(PeerTest, IsAConnectionOverAUnixSocket) {
  EXPECT_EQ(PeerOf("unix:", 0x1a), "unix#1a");
  EXPECT_NE(PeerOf("unix:", 1), PeerOf("unix:", 2));
}

}  // namespace
}  // namespace lossd::rpc::peer_test
