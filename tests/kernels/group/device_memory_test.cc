// SPDX-License-Identifier: Apache-2.0
// Memory that a group shares with other programs: it is the member's that is asked for, and all members reach it.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/cpu_replicas.h"
#include "kernels/device_memory_sharer.h"
#include "kernels/errors/field_error.h"
#include "kernels/group/group_backend.h"
#include "tests/kernels/group/member_group.h"
#include "tests/server/app/forwarding_backend.h"

namespace lossd::kernels::device_memory_test {
namespace {

// What has been asked of the members.
struct Asked {
  std::vector<std::string> calls;
  int shared = 0;  // memory that is there now
};

class Memory final : public SharedDeviceMemory {
 public:
  Memory(Asked* asked, int64_t bytes) : asked_(asked), bytes_(static_cast<size_t>(bytes)) {
    ++asked_->shared;
  }
  ~Memory() override { --asked_->shared; }
  absl::Span<uint8_t> bytes() const override { return absl::MakeSpan(bytes_); }
  int descriptor() const override { return -1; }
  absl::Status CopyToHost(absl::Span<const uint8_t>, uint8_t*) const override { return absl::OkStatus(); }
  absl::Status CopyFromHost(const uint8_t*, absl::Span<uint8_t>) const override { return absl::OkStatus(); }

 private:
  Asked* const asked_;
  mutable std::vector<uint8_t> bytes_;
};

class Sharer final : public ForwardingBackend, public DeviceMemorySharer {
 public:
  Sharer(std::unique_ptr<Backend> backend, std::string device, Asked* asked, bool reaches)
      : ForwardingBackend(std::move(backend)), device_(std::move(device)), asked_(asked), reaches_(reaches) {}

  std::vector<std::string> SharingDevices() const override {
    return device_.empty() ? std::vector<std::string>() : std::vector<std::string>{device_};
  }
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(absl::string_view device,
                                                                        int64_t bytes) override {
    EXPECT_EQ(device, device_);
    asked_->calls.push_back(absl::StrCat(device_, " gives ", bytes));
    return std::make_unique<Memory>(asked_, bytes);
  }
  absl::Status ReachDeviceMemory(absl::Span<uint8_t> memory) override {
    asked_->calls.push_back(absl::StrCat(device_, " reaches ", memory.size()));
    return reaches_ ? absl::OkStatus() : absl::UnimplementedError("nothing connects them");
  }

 private:
  const std::string device_;
  Asked* const asked_;
  const bool reaches_;
};

struct Member {
  bool shares = true;
  std::string device;
  bool reaches = true;
};

std::unique_ptr<Backend> GroupOf(const std::vector<Member>& members, Asked* asked) {
  auto backends = CreateCpuMembers({.threads = 1}, static_cast<int>(members.size()));
  EXPECT_TRUE(backends.ok()) << backends.status();
  for (size_t i = 0; i < members.size(); ++i) {
    std::unique_ptr<Backend>& backend = (*backends)[i];
    if (members[i].shares)
      backend = std::make_unique<Sharer>(std::move(backend), members[i].device, asked, members[i].reaches);
  }
  auto group = CreateGroupBackend(*std::move(backends), MakeCpuReplicas, {.members_share_memory = true});
  EXPECT_TRUE(group.ok()) << group.status();
  return *std::move(group);
}

DeviceMemorySharer& SharerOf(Backend& backend) { return dynamic_cast<DeviceMemorySharer&>(backend); }

TEST(GroupDeviceMemoryTest, IsTheMembersThatIsAskedForAndReachedByAll) {
  Asked asked;
  const auto group = GroupOf({{true, "a"}, {true, "b"}, {true, "c"}}, &asked);
  EXPECT_EQ(SharerOf(*group).SharingDevices(), (std::vector<std::string>{"a", "b", "c"}));
  const std::map<std::string, std::vector<std::string>> wanted = {
      {"a", {"a gives 4096", "b reaches 4096", "c reaches 4096"}},
      {"b", {"b gives 4096", "a reaches 4096", "c reaches 4096"}},
      {"c", {"c gives 4096", "a reaches 4096", "b reaches 4096"}}};
  for (const auto& [device, calls] : wanted) {
    asked.calls.clear();
    auto memory = SharerOf(*group).ShareDeviceMemory(device, 4096);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ((*memory)->bytes().size(), 4096u);
    EXPECT_EQ(asked.calls, calls);
    memory->reset();
    EXPECT_EQ(asked.shared, 0);
  }
}

TEST(GroupDeviceMemoryTest, IsOfNoOtherDevice) {
  Asked asked;
  const auto group = GroupOf({{true, "a"}, {true, "b"}}, &asked);
  for (const std::string device : {"", "c", "A", "a, b"}) {
    const absl::Status refused = SharerOf(*group).ShareDeviceMemory(device, 4096).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    const auto violation = errors::GetFieldViolation(refused);
    ASSERT_TRUE(violation.has_value());
    EXPECT_EQ(violation->field, "device");
    EXPECT_EQ(violation->rule, "must be one of a, b");
    EXPECT_EQ(violation->value, device);
  }
  EXPECT_TRUE(asked.calls.empty());
}

TEST(GroupDeviceMemoryTest, IsNotGivenIfAMemberDoesNotReachIt) {
  for (const std::string apart : {"a", "b", "c"}) {
    Asked asked;
    const auto group =
        GroupOf({{true, "a", apart != "a"}, {true, "b", apart != "b"}, {true, "c", apart != "c"}}, &asked);
    for (const std::string owner : {"a", "b", "c"}) {
      const auto memory = SharerOf(*group).ShareDeviceMemory(owner, 4096);
      // Its own memory it always has.
      EXPECT_EQ(memory.status(),
                owner == apart ? absl::OkStatus()
                               : absl::UnimplementedError(absl::StrCat("the server's GPU ", apart,
                                                                       " does not reach memory of ", owner,
                                                                       ": nothing connects them")));
    }
    EXPECT_EQ(asked.shared, 0) << "what the owner gave is gone";
  }
}

TEST(GroupDeviceMemoryTest, ThereIsNoneIfAMemberSharesNone) {
  for (const Member& other : {Member{.shares = false, .device = ""}, Member{.shares = true, .device = ""}}) {
    for (const bool first : {true, false}) {
      Asked asked;
      const Member sharer{true, "a"};
      const auto group = GroupOf({first ? other : sharer, first ? sharer : other}, &asked);
      EXPECT_TRUE(SharerOf(*group).SharingDevices().empty());
      EXPECT_EQ(SharerOf(*group).ShareDeviceMemory("a", 4096).status().code(),
                absl::StatusCode::kUnimplemented);
      EXPECT_TRUE(asked.calls.empty());
    }
  }
  EXPECT_TRUE(SharerOf(*testing::MakeCpuGroup(2, 8)).SharingDevices().empty())
      << "memory of the host is no device's";
}

}  // namespace
}  // namespace lossd::kernels::device_memory_test
