// SPDX-License-Identifier: Apache-2.0
// Tests of a head that lies on several members (group_head.h): deferred rows, memory, what the engine hears,
// and what holds of the tensors of the members.
#include "kernels/group/group_head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/errors/field_error.h"
#include "kernels/group/group_backend.h"
#include "kernels/validation.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/group/member_group.h"
#include "tests/server/app/forwarding_backend.h"

namespace lossd::kernels::testing::group_head_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What a member has been given, and the test's hold of it.
class MemberScript {
 public:
  explicit MemberScript(int max_chunks) : max_chunks_(max_chunks) {}

  int max_chunks() const { return max_chunks_; }

  // ---- The test's ----
  // Waits for the next chunk to come that has no results yet, and gives it results.
  void GiveResults(const absl::Status& status = absl::OkStatus()) ABSL_LOCKS_EXCLUDED(mutex_) {
    Held held = Take(submitted_);
    for (Slice& slice : held.chunk->slices) slice.sums.loss = static_cast<double>(slice.rows);
    held.chunk->choices = {{.what = "gradients", .choice = "scripted"}};
    held.callbacks.on_results(status);
    absl::MutexLock lock(&mutex_);
    with_results_.push_back(std::move(held));
  }
  void Finish(const absl::Status& status = absl::OkStatus()) ABSL_LOCKS_EXCLUDED(mutex_) {
    Held held = Take(with_results_);
    {
      absl::MutexLock lock(&mutex_);
      --in_flight_;
    }
    held.callbacks.on_done(status);
  }
  // What the member says to everything but chunks from now on.
  void SayOfCalls(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    of_calls_ = status;
  }
  int in_flight() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return in_flight_;
  }

  // ---- The member's ----
  absl::Status of_calls() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return of_calls_;
  }
  void Submit(Chunk* chunk, ChunkCallbacks callbacks) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    EXPECT_LT(in_flight_, max_chunks_) << "more chunks than the member takes";
    ++in_flight_;
    submitted_.push_back({chunk, std::move(callbacks)});
  }

 private:
  struct Held {
    Chunk* chunk = nullptr;
    ChunkCallbacks callbacks;
  };

  Held Take(std::deque<Held>& from) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto has_one = [&from] { return !from.empty(); };
    mutex_.Await(absl::Condition(&has_one));
    Held held = std::move(from.front());
    from.pop_front();
    return held;
  }

  const int max_chunks_;
  absl::Mutex mutex_;
  std::deque<Held> submitted_;     // guarded by mutex_, as below; Take is given either
  std::deque<Held> with_results_;  // in the order of submission
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status of_calls_ ABSL_GUARDED_BY(mutex_);
};

class ScriptedHead final : public HeadKernels {
 public:
  ScriptedHead(const HeadConfig& config, MemberScript* script) : config_(config), script_(script) {}

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return DType::kFloat32; }
  int64_t chunk_rows() const override { return 8; }
  MemoryBytes memory() const override { return {}; }
  std::vector<Choice> Describe() const override { return {{.what = "chunk", .choice = "up to 8 rows"}}; }
  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override {
    script_->Submit(chunk, std::move(callbacks));
  }
  absl::Status ReadTensor(TensorId, int64_t, int64_t, DType, absl::Span<uint8_t>) override {
    return script_->of_calls();
  }
  absl::Status WriteTensor(TensorId, int64_t, int64_t, DType, absl::Span<const uint8_t>) override {
    return script_->of_calls();
  }
  absl::Status AddGradient(Param, int64_t, int64_t, DType, float, absl::Span<const uint8_t>) override {
    return script_->of_calls();
  }
  absl::StatusOr<double> GradNorm() override {
    if (absl::Status status = script_->of_calls(); !status.ok()) return status;
    return 3.0;
  }
  absl::Status ApplyStep(const OptimizerOptions&, int64_t) override { return script_->of_calls(); }
  absl::Status ZeroGradients() override { return script_->of_calls(); }
  absl::Status ZeroMoments() override { return script_->of_calls(); }

 private:
  const HeadConfig config_;
  MemberScript* const script_;
};

class ScriptedBackend final : public Backend {
 public:
  explicit ScriptedBackend(MemberScript* script) : script_(script) {}

  BackendInfo info() const override { return {"scripted", "scripted"}; }
  MemoryStats memory() const override { return {}; }
  int max_chunks_in_flight() const override { return script_->max_chunks(); }
  absl::StatusOr<MemoryBytes> PlanHead(const HeadConfig&) const override { return MemoryBytes(); }
  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    return std::make_unique<ScriptedHead>(config, script_);
  }
  absl::StatusOr<std::unique_ptr<StagingMemory>> AllocateStaging(int64_t) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<std::unique_ptr<RetainedMemory>> AllocateRetained(int64_t) override {
    return absl::UnimplementedError("");
  }
  absl::Status PlanHostMemory(MemoryKind, int64_t) override { return {}; }

 private:
  MemberScript* const script_;
};

// Says what the test wants of it.
class ScriptedReplicas final : public Replicas {
 public:
  struct Says {
    absl::Status sum;
    int sums = 0;
    int spreads = 0;
  };
  explicit ScriptedReplicas(Says* says) : says_(says) {}
  absl::Status SumGradients() override {
    ++says_->sums;
    return says_->sum;
  }
  absl::Status SpreadValues() override {
    ++says_->spreads;
    return {};
  }

 private:
  Says* const says_;
};

// ---- Deferred rows ----
// Deferred rows of a head that lies on several members by rows: all of them compute some, and what one of
// them fails spoils neither the rows that are retained nor later gradients.

// What the test knows of a member, and wants of it. Thread-safe.
class Watch {
 public:
  struct Rows {
    int64_t kept = 0;   // whose hidden states the member kept
    int64_t taken = 0;  // or took from where they were kept
    int64_t direct = 0;
  };

  // The member fails its next chunk.
  void FailNext() {
    absl::MutexLock lock(&mutex_);
    fails_ = true;
  }
  // Whether the chunk is to fail; else counts its rows.
  bool OnChunk(const Chunk& chunk) {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(fails_, false)) return true;
    for (const Slice& slice : chunk.slices) {
      int64_t& rows = slice.retained_offset < 0 ? rows_.direct
                      : slice.hidden == nullptr ? rows_.taken
                                                : rows_.kept;
      rows += slice.rows;
    }
    return false;
  }
  Rows rows() const {
    absl::MutexLock lock(&mutex_);
    return rows_;
  }

 private:
  mutable absl::Mutex mutex_;
  bool fails_ ABSL_GUARDED_BY(mutex_) = false;
  Rows rows_ ABSL_GUARDED_BY(mutex_);
};

class WatchedHead final : public ForwardingHead {
 public:
  WatchedHead(std::unique_ptr<HeadKernels> head, Watch* watch)
      : ForwardingHead(std::move(head)), watch_(watch) {}

  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override {
    if (!watch_->OnChunk(*chunk)) return ForwardingHead::Submit(chunk, std::move(callbacks));
    callbacks.on_results(absl::InternalError("the member fails"));
    callbacks.on_done(absl::InternalError("the member fails"));
  }

 private:
  Watch* const watch_;
};

class WatchedBackend final : public ForwardingBackend {
 public:
  WatchedBackend(std::unique_ptr<Backend> backend, Watch* watch)
      : ForwardingBackend(std::move(backend)), watch_(watch) {}

  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    auto head = ForwardingBackend::CreateHead(config);
    if (!head.ok()) return head;
    return std::make_unique<WatchedHead>(*std::move(head), watch_);
  }

 private:
  Watch* const watch_;
};

absl::StatusOr<std::unique_ptr<Replicas>> Connect(absl::Span<HeadKernels* const> heads) {
  std::vector<HeadKernels*> inner;
  for (HeadKernels* const head : heads) inner.push_back(&static_cast<WatchedHead*>(head)->inner());
  return MakeCpuReplicas(inner);
}

class GroupDeferredRowsTest : public ::testing::TestWithParam<int> {
 protected:
  // Chunks of fewer rows than `least_rows` are one member's.
  void MakeGroup(int64_t least_rows) {
    auto members = CreateCpuMembers({.threads = 1, .workspace_bytes = 4 << 20}, GetParam());
    ASSERT_TRUE(members.ok()) << members.status();
    std::vector<std::unique_ptr<Backend>> watched;
    watches_ = std::vector<Watch>(static_cast<size_t>(GetParam()));
    for (size_t i = 0; i < watches_.size(); ++i) {
      watched.push_back(std::make_unique<WatchedBackend>(std::move((*members)[i]), &watches_[i]));
    }
    auto group = CreateGroupBackend(std::move(watched), Connect,
                                    {.least_rows = least_rows, .members_share_memory = true});
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
  }

  ProblemSpec Spec() const {
    ProblemSpec spec;
    spec.config.hidden_size = 13;
    spec.config.vocab_size = 37;
    spec.config.split = Split::kRows;
    return spec;
  }

  std::vector<Watch> watches_;
  std::unique_ptr<Backend> group_;
  Rng rng_ = FreshRng();
};

TEST_P(GroupDeferredRowsTest, AreDividedAsOthers) {
  for (const int64_t least_rows : {0, 512}) {
    SCOPED_TRACE(absl::StrCat("least_rows ", least_rows));
    MakeGroup(least_rows);
    DeferredRows rows(*group_, Spec(), rng_);
    for (int repeat = 0; repeat < 250; ++repeat) {
      Chance(rng_, 0.5) ? rows.Forward() : rows.Backward();
      if (Chance(rng_, 0.4)) rows.Release();
    }
    rows.ExpectGradients();
    for (const Watch& watch : watches_) {
      EXPECT_GT(watch.rows().kept, 0);
      EXPECT_GT(watch.rows().taken, 0);
      EXPECT_GT(watch.rows().direct, 0);
    }
  }
}

TEST_P(GroupDeferredRowsTest, OutliveTheFailuresOfAMember) {
  MakeGroup(0);
  DeferredRows rows(*group_, Spec(), rng_);
  rows.ExpectFailures(true);
  for (int repeat = 0; repeat < 60; ++repeat) {
    if (Chance(rng_, 0.3)) watches_[static_cast<size_t>(UniformInt(rng_, 0, GetParam() - 1))].FailNext();
    Chance(rng_, 0.5) ? rows.Forward() : rows.Backward();
    if (Chance(rng_, 0.3)) rows.Release();
    if (Chance(rng_, 0.1)) rows.ExpectGradients();
  }
  EXPECT_GT(rows.failures(), 0);
  rows.ExpectGradients();
}

INSTANTIATE_TEST_SUITE_P(Members, GroupDeferredRowsTest, ::testing::Values(1, 2, 3, 4));

// ---- Memory of the device ----
// Memory that a group shares with other programs: it is the member's that is asked for, and all members reach
// it.

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

class Sharer final : public ForwardingBackend {
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

TEST(GroupDeviceMemoryTest, IsTheMembersThatIsAskedForAndReachedByAll) {
  Asked asked;
  const auto group = GroupOf({{true, "a"}, {true, "b"}, {true, "c"}}, &asked);
  EXPECT_EQ(group->SharingDevices(), (std::vector<std::string>{"a", "b", "c"}));
  const std::map<std::string, std::vector<std::string>> wanted = {
      {"a", {"a gives 4096", "b reaches 4096", "c reaches 4096"}},
      {"b", {"b gives 4096", "a reaches 4096", "c reaches 4096"}},
      {"c", {"c gives 4096", "a reaches 4096", "b reaches 4096"}}};
  for (const auto& [device, calls] : wanted) {
    asked.calls.clear();
    auto memory = group->ShareDeviceMemory(device, 4096);
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
    const absl::Status refused = group->ShareDeviceMemory(device, 4096).status();
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
      const auto memory = group->ShareDeviceMemory(owner, 4096);
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
      EXPECT_TRUE(group->SharingDevices().empty());
      EXPECT_EQ(group->ShareDeviceMemory("a", 4096).status().code(), absl::StatusCode::kUnimplemented);
      EXPECT_TRUE(asked.calls.empty());
    }
  }
  EXPECT_TRUE(testing::MakeCpuGroup(2, 8)->SharingDevices().empty()) << "memory of the host is no device's";
}

// ---- What the engine hears ----
// What the engine hears of a chunk that several members compute: once, in order, and the truth when some of
// them fail.

// "1 results", "1 done INTERNAL" and so on, in the order in which they were said.
class Heard {
 public:
  ChunkCallbacks Callbacks(int chunk) {
    return {.on_results = [this, chunk](const absl::Status& status) { Add(chunk, "results", status); },
            .on_done = [this, chunk](const absl::Status& status) { Add(chunk, "done", status); }};
  }
  std::vector<std::string> all() {
    absl::MutexLock lock(&mutex_);
    return all_;
  }

 private:
  void Add(int chunk, const char* what, const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    all_.push_back(absl::StrCat(chunk, " ", what, status.ok() ? "" : " ",
                                status.ok() ? "" : absl::StatusCodeToString(status.code())));
  }

  absl::Mutex mutex_;
  std::vector<std::string> all_;
};

class GroupHeadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::vector<std::unique_ptr<Backend>> members;
    for (MemberScript& script : scripts_) members.push_back(std::make_unique<ScriptedBackend>(&script));
    auto group = CreateGroupBackend(
        std::move(members),
        [this](absl::Span<HeadKernels* const>) -> absl::StatusOr<std::unique_ptr<Replicas>> {
          return std::make_unique<ScriptedReplicas>(&says_);
        },
        {.least_rows = 4,
         .join_classes = [](absl::Span<HeadKernels* const>) { return absl::OkStatus(); },
         .check_members = [this] { return check_; }});
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
    CreateHead(Split::kRows);
  }

  void CreateHead(Split split) {
    HeadConfig config;
    config.hidden_size = 2;
    config.vocab_size = 5;
    config.split = split;
    head_.reset();
    auto head = group_->CreateHead(config);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = *std::move(head);
  }

  Chunk& Submit(std::vector<int64_t> rows, int number, const std::function<void(Chunk&)>& change = {}) {
    auto& slices = slices_.emplace_back(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      slices[i].rows = rows[i];
      slices[i].hidden = hidden_;
      slices[i].targets = targets_;
    }
    Chunk& chunk = chunks_.emplace_back();
    chunk.hidden_dtype = DType::kFloat32;
    chunk.slices = absl::MakeSpan(slices);
    if (change) change(chunk);
    head_->Submit(&chunk, heard_.Callbacks(number));
    return chunk;
  }

  MemberScript& member(size_t i) { return scripts_[i]; }
  std::vector<std::string> heard() { return heard_.all(); }

  const float hidden_[64] = {};
  const int32_t targets_[32] = {};
  std::deque<std::vector<Slice>> slices_;
  std::deque<Chunk> chunks_;
  ScriptedReplicas::Says says_;
  MemberScript scripts_[2] = {MemberScript(2), MemberScript(2)};
  Heard heard_;
  absl::Status check_;
  std::unique_ptr<Backend> group_;
  std::unique_ptr<HeadKernels> head_;
};

TEST_F(GroupHeadTest, SpeaksForAllMembers) {
  EXPECT_EQ(head_->chunk_rows(), 16);
  EXPECT_EQ(head_->slice_rows(), 8);
  EXPECT_EQ(group_->max_chunks_in_flight(), 3);
  EXPECT_EQ(group_->info().device, "scripted + scripted");
}

TEST_F(GroupHeadTest, ResultsComeOnceFromAllMembers) {
  const Chunk& chunk = Submit({3, 5, 2}, 1);
  member(1).GiveResults();
  EXPECT_THAT(heard(), IsEmpty());
  member(0).GiveResults();
  EXPECT_THAT(heard(), ElementsAre("1 results"));
  for (const Slice& slice : chunk.slices) EXPECT_EQ(slice.sums.loss, static_cast<double>(slice.rows));
  EXPECT_EQ(chunk.choices.front().choice, "scripted");
  member(0).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results"));
  member(1).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results", "1 done"));
}

TEST_F(GroupHeadTest, WhatEachMemberHasDoneIsCounted) {
  ASSERT_EQ(group_->MemberStates().size(), 2u);
  EXPECT_EQ(group_->MemberStates()[0].work.chunks, 0);
  Submit({3, 5, 2}, 1);  // 5 go to each
  Submit({1}, 2);        // few rows: by one, the second, which fails
  member(0).GiveResults();
  member(1).GiveResults();
  member(1).GiveResults(absl::InternalError("no"));
  member(0).Finish();
  member(1).Finish();
  member(1).Finish(absl::InternalError("no"));
  for (const size_t i : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(group_->MemberStates()[i].work.chunks, 1) << i;
    EXPECT_EQ(group_->MemberStates()[i].work.rows, 5) << i;
    EXPECT_GT(group_->MemberStates()[i].work.busy, absl::ZeroDuration()) << i;
  }
}

// Its chunk is under way until it is done, however soon it was handed over.
TEST_F(GroupHeadTest, AMemberIsBusyWithAChunkUntilItIsDone) {
  Submit({2}, 1);
  member(0).GiveResults();
  const absl::Duration before = group_->MemberStates()[0].work.busy;
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_GE(group_->MemberStates()[0].work.busy, before + absl::Milliseconds(20));
  member(0).Finish();
  head_->ZeroGradients().IgnoreError();  // the thread is done with everything
  const absl::Duration idle = group_->MemberStates()[0].work.busy;
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_LT(group_->MemberStates()[0].work.busy - idle, absl::Milliseconds(20));
}

// A member that is lost may still write where the rows of its last chunk were, and other rows may lie there
// now.
TEST_F(GroupHeadTest, OnceAMemberIsLostNoChunkIsComputed) {
  for (const Split split : {Split::kRows, Split::kVocabulary}) {
    SCOPED_TRACE(static_cast<int>(split));
    CreateHead(split);
    const auto before = static_cast<std::ptrdiff_t>(heard().size());
    check_ = absl::UnavailableError("rank 1 is lost");
    Submit({2}, 7);     // few rows: by one member
    Submit({3, 5}, 8);  // by both
    const std::vector<std::string> all = heard();
    EXPECT_THAT(std::vector<std::string>(all.begin() + before, all.end()),
                ElementsAre("7 results UNAVAILABLE", "7 done UNAVAILABLE", "8 results UNAVAILABLE",
                            "8 done UNAVAILABLE"));
    check_ = absl::OkStatus();
  }
}

TEST_F(GroupHeadTest, ChunksAreHeardOfInTheOrderOfSubmission) {
  Submit({2}, 1);
  Submit({3}, 2);  // few rows: by the other member
  member(1).GiveResults();
  member(1).Finish();
  EXPECT_THAT(heard(), IsEmpty());
  member(0).GiveResults();
  EXPECT_THAT(heard(), ElementsAre("1 results", "2 results"));
  member(0).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results", "2 results", "1 done", "2 done"));
}

TEST_F(GroupHeadTest, IndependentChunksThatAccumulateGoByTheirTurn) {
  for (const uint64_t turn : {3, 3, 0}) {
    Submit({2, 4}, static_cast<int>(turn), [&](Chunk& chunk) {
      chunk.independent = true;
      chunk.turn = turn;
    });
  }
  for (int i = 0; i < 2; ++i) member(1).GiveResults();
  for (int i = 0; i < 2; ++i) member(1).Finish();
  member(0).GiveResults();
  member(0).Finish();
  EXPECT_EQ(heard().size(), 6u);
}

TEST_F(GroupHeadTest, AMemberIsGivenNoMoreThanItTakes) {
  for (int i = 0; i < 3; ++i) Submit({8, 8}, i);
  for (int i = 0; i < 3; ++i) {
    for (MemberScript& script : scripts_) {
      script.GiveResults();
      script.Finish();
    }
  }
  EXPECT_EQ(heard().size(), 6u);
}

TEST_F(GroupHeadTest, AChunkThatAllMembersRefuseAccumulatedNothing) {
  Submit({3, 5}, 1);
  for (MemberScript& script : scripts_) {
    script.GiveResults(absl::InternalError("lost"));
    script.Finish(absl::InternalError("lost"));
  }
  EXPECT_THAT(heard(), ElementsAre("1 results INTERNAL", "1 done INTERNAL"));
}

TEST_F(GroupHeadTest, WhereOnlySomeMembersFailTheGradientsAreLost) {
  Submit({3, 5}, 1);
  member(0).GiveResults(absl::InternalError("lost"));
  member(0).Finish(absl::InternalError("lost"));
  EXPECT_THAT(heard(), IsEmpty()) << "another member still works on the slices";
  member(1).GiveResults();
  member(1).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results INTERNAL", "1 done DATA_LOSS"));
}

TEST_F(GroupHeadTest, WithoutGradientsNothingIsLost) {
  Submit({3, 5}, 1, [](Chunk& chunk) { chunk.accumulate_gradients = false; });
  member(0).GiveResults(absl::InternalError("lost"));
  member(0).Finish(absl::InternalError("lost"));
  member(1).GiveResults();
  member(1).Finish();
  EXPECT_THAT(heard(), ElementsAre("1 results INTERNAL", "1 done INTERNAL"));
}

TEST_F(GroupHeadTest, AnErrorAfterTheResultsIsHeardAtTheEnd) {
  Submit({3, 5}, 1);
  for (MemberScript& script : scripts_) script.GiveResults();
  member(0).Finish();
  member(1).Finish(absl::InternalError("lost"));
  EXPECT_THAT(heard(), ElementsAre("1 results", "1 done INTERNAL"));
}

TEST_F(GroupHeadTest, RefusalsNameTheSliceAndTheMost) {
  std::string message;
  Submit({9}, 1);
  EXPECT_THAT(heard(), ElementsAre("1 results INVALID_ARGUMENT", "1 done INVALID_ARGUMENT"));
  EXPECT_EQ(member(0).in_flight() + member(1).in_flight(), 0);
  Submit({8, 8, 1}, 2);
  EXPECT_EQ(heard().back(), "2 done INVALID_ARGUMENT");
}

TEST_F(GroupHeadTest, SumsAreFormedOncePerAccumulation) {
  EXPECT_TRUE(head_->GradNorm().ok());
  EXPECT_EQ(says_.sums, 0) << "nothing was accumulated";
  Submit({3}, 1);
  member(0).GiveResults();
  member(0).Finish();
  EXPECT_NEAR(*head_->GradNorm(), std::sqrt(18.0), 1e-12);
  EXPECT_TRUE(head_->GradNorm().ok());
  EXPECT_EQ(says_.sums, 1);
  Submit({3}, 2);
  member(1).GiveResults();
  member(1).Finish();
  EXPECT_TRUE(head_->ApplyStep({.kind = OptimizerOptions::Kind::kSgd}, 1).ok());
  EXPECT_EQ(says_.sums, 2);
  EXPECT_EQ(says_.spreads, 1);
}

TEST_F(GroupHeadTest, AfterASumThatFailedTheGradientsHaveToBeZeroed) {
  Submit({3}, 1);
  member(0).GiveResults();
  member(0).Finish();
  says_.sum = absl::InternalError("the link is down");
  EXPECT_THAT(std::string(head_->GradNorm().status().message()), HasSubstr("the link is down"));
  says_.sum = absl::OkStatus();
  EXPECT_FALSE(head_->ApplyStep({.kind = OptimizerOptions::Kind::kSgd}, 1).ok()) << "half of it is summed";
  EXPECT_EQ(says_.spreads, 0);
  EXPECT_TRUE(head_->ZeroGradients().ok());
  EXPECT_TRUE(head_->GradNorm().ok());
}

TEST_F(GroupHeadTest, AStepThatOneMemberFailsIsSpreadToNone) {
  member(1).SayOfCalls(absl::UnavailableError("it fell off the bus"));
  EXPECT_THAT(head_->ApplyStep({.kind = OptimizerOptions::Kind::kSgd}, 1).message(),
              HasSubstr("fell off the bus"));
  EXPECT_EQ(says_.spreads, 0);
  EXPECT_FALSE(head_->GradNorm().ok());
  EXPECT_FALSE(head_->ZeroGradients().ok());
}

// ---- By vocabulary, every member has a part in every row ----

TEST_F(GroupHeadTest, ByVocabularyOneAnswerOfWhatOneMemberFailed) {
  CreateHead(Split::kVocabulary);
  for (const bool accumulate : {true, false}) {
    for (const size_t failing : {0, 1}) {
      const int number = accumulate ? 1 : 2;
      Submit({3, 5}, number, [&](Chunk& chunk) { chunk.accumulate_gradients = accumulate; });
      const auto before = static_cast<std::ptrdiff_t>(heard().size());
      const absl::Status lost = absl::UnavailableError("lost");
      member(failing).GiveResults(lost);
      member(failing).Finish(lost);
      EXPECT_EQ(heard().size(), before) << "another member still works on the slices";
      member(1 - failing).GiveResults();
      member(1 - failing).Finish();
      const std::string done = accumulate ? " done DATA_LOSS" : " done UNAVAILABLE";
      ASSERT_EQ(heard().size(), before + 2);
      EXPECT_EQ(heard()[before], absl::StrCat(number, " results UNAVAILABLE"));
      EXPECT_EQ(heard()[before + 1], absl::StrCat(number, done));
    }
  }
}

TEST_F(GroupHeadTest, ByVocabularyTheErrorOfOneMemberIsThatOfTheHead) {
  CreateHead(Split::kVocabulary);
  EXPECT_NEAR(*head_->GradNorm(), std::sqrt(18.0), 1e-12);
  member(1).SayOfCalls(absl::UnavailableError("it fell off the bus"));
  std::vector<uint8_t> bytes(5 * 2 * sizeof(float));
  const TensorId weight{Param::kWeight, Role::kValue};
  for (const absl::Status& status :
       {head_->GradNorm().status(), head_->ZeroGradients(),
        head_->ApplyStep({.kind = OptimizerOptions::Kind::kSgd}, 1),
        head_->ReadTensor(weight, 0, 5, DType::kFloat32, absl::MakeSpan(bytes)),
        head_->WriteTensor(weight, 0, 5, DType::kFloat32, bytes),
        head_->AddGradient(Param::kWeight, 0, 5, DType::kFloat32, 1.0f, bytes)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr("fell off the bus"));
  }
}

// ---- Invariants ----
// What holds of the tensors of a group's members: the gradient of a class is the sum over them, its owner has
// the whole of it once somebody has looked, values are the same everywhere, and moments are the owner's
// alone.

constexpr int kMembers = 3;
bool AllZero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return v == 0.0f; });
}

class GroupInvariantsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto members = CreateCpuMembers({.threads = 1}, kMembers);
    ASSERT_TRUE(members.ok()) << members.status();
    auto group = CreateGroupBackend(*std::move(members),
                                    [this](absl::Span<HeadKernels* const> heads) {
                                      replicas_.assign(heads.begin(), heads.end());
                                      return MakeCpuReplicas(heads);
                                    },
                                    {.least_rows = 0, .members_share_memory = true});
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
    spec_.config.hidden_size = 13;
    spec_.config.vocab_size = 37;
    spec_.config.has_bias = true;
    spec_.config.norm = Norm::kLayerNorm;
    spec_.config.optimizer_state = OptimizerState::kAdam;
    spec_.slice_rows = {7, 8, 9, 3};
    spec_.ignored = 0.0;
  }

  // The gradients as the members have them, one after the other.
  std::vector<std::vector<float>> OfMembers(TensorId id) {
    std::vector<std::vector<float>> all;
    for (HeadKernels* replica : replicas_) all.push_back(ReadAll(*replica, id));
    return all;
  }

  std::unique_ptr<Backend> group_;
  std::vector<HeadKernels*> replicas_;
  ProblemSpec spec_;
  Rng rng_ = FreshRng();
};

TEST_F(GroupInvariantsTest, TheGradientIsTheSumAndThenItsOwners) {
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  ASSERT_TRUE(RunChunk(*head, problem).done.ok());
  for (const Param param : kTrainedParams) {
    const auto parts = OfMembers({param, Role::kGradient});
    for (const auto& part : parts) EXPECT_FALSE(AllZero(part)) << "every member computed some rows";
  }
  std::vector<std::vector<std::vector<float>>> before;
  for (const Param param : kTrainedParams) before.push_back(OfMembers({param, Role::kGradient}));
  double squares = 0.0;
  for (size_t p = 0; p < std::size(kTrainedParams); ++p) {
    const std::vector<float> sum = ReadGradient(*head, kTrainedParams[p]);
    const int64_t cols = ShapeOf(spec_.config, kTrainedParams[p]).cols;
    for (size_t i = 0; i < sum.size(); ++i) {
      EXPECT_EQ(sum[i], before[p][0][i] + before[p][1][i] + before[p][2][i]);
      squares += double{sum[i]} * double{sum[i]};
    }
    for (int member = 0; member < kMembers; ++member) {
      const ShardRows own = ShardRowsOf(spec_.config, kTrainedParams[p], {member, kMembers});
      const std::vector<float> part =
          ReadAll(*replicas_[static_cast<size_t>(member)], {kTrainedParams[p], Role::kGradient});
      for (int64_t i = 0; i < static_cast<int64_t>(part.size()); ++i) {
        const bool mine = i >= own.first * cols && i < own.end() * cols;
        EXPECT_EQ(part[static_cast<size_t>(i)], mine ? sum[static_cast<size_t>(i)] : 0.0f);
      }
    }
  }
  EXPECT_NEAR(*head->GradNorm(), std::sqrt(squares), 1e-9 * std::sqrt(squares));
}

TEST_F(GroupInvariantsTest, AStepLeavesTheSameValuesEverywhereAndNoGradients) {
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  for (int64_t update = 1; update <= 2; ++update) {
    ASSERT_TRUE(RunChunk(*head, problem).done.ok());
    ASSERT_TRUE(head->ApplyStep({.learning_rate = 0.1}, update).ok());
    for (const Param param : kTrainedParams) {
      for (const auto& values : OfMembers({param, Role::kValue})) {
        EXPECT_EQ(values, ReadAll(*head, {param, Role::kValue})) << Name(param);
      }
      for (const auto& gradient : OfMembers({param, Role::kGradient})) EXPECT_TRUE(AllZero(gradient));
    }
  }
  EXPECT_NE(ReadAll(*head, {Param::kWeight, Role::kValue}), problem.weight);
}

TEST_F(GroupInvariantsTest, MomentsAreTheOwnersAlone) {
  auto head = group_->CreateHead(spec_.config);
  ASSERT_TRUE(head.ok()) << head.status();
  int64_t optimizer_bytes = 0;
  for (int member = 0; member < kMembers; ++member) {
    HeadKernels& replica = *replicas_[static_cast<size_t>(member)];
    optimizer_bytes += replica.memory()[MemoryKind::kOptimizer];
    EXPECT_LT(replica.memory()[MemoryKind::kOptimizer], 37 * 13 * 4 * 2) << "not all of it";
    for (const Param param : kTrainedParams) {
      const TensorId id{param, Role::kMoment1};
      const ShardRows own = ShardRowsOf(spec_.config, param, {member, kMembers});
      const int64_t cols = ShapeOf(spec_.config, param).cols;
      const int64_t rows = ShapeOf(spec_.config, param).rows;
      std::vector<uint8_t> bytes(static_cast<size_t>(rows * cols) * sizeof(float));
      const auto read = [&](int64_t begin, int64_t n) {
        return replica
            .ReadTensor(id, begin, n, DType::kFloat32,
                        absl::MakeSpan(bytes).first(static_cast<size_t>(n * cols) * sizeof(float)))
            .code();
      };
      if (own.rows == 0) {
        EXPECT_EQ(read(0, rows), absl::StatusCode::kNotFound);
        continue;
      }
      EXPECT_EQ(read(own.first, own.rows), absl::StatusCode::kOk);
      if (own.first > 0) {
        EXPECT_EQ(read(own.first - 1, 1), absl::StatusCode::kInvalidArgument);
      }
      if (own.end() < rows) {
        EXPECT_EQ(read(own.end(), 1), absl::StatusCode::kInvalidArgument);
      }
    }
  }
  EXPECT_EQ((*head)->memory()[MemoryKind::kOptimizer], optimizer_bytes);
}

// Members on the CPU have one memory: its limit is that of all together, and of a head that does not fit into
// it, no member keeps a part.
TEST_F(GroupInvariantsTest, WhatDoesNotFitOnAllMembersIsOnNone) {
  const auto plan = group_->PlanHead(spec_.config);
  ASSERT_TRUE(plan.ok()) << plan.status();
  auto members = CreateCpuMembers({.threads = 1, .memory_limit_bytes = plan->Total() - 1}, kMembers);
  ASSERT_TRUE(members.ok()) << members.status();
  auto small = CreateGroupBackend(*std::move(members), MakeCpuReplicas, {.members_share_memory = true});
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_EQ((*small)->memory().limit, plan->Total() - 1);
  EXPECT_EQ((*small)->CreateHead(spec_.config).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ((*small)->memory().current.Total(), 0);
  auto staging = (*small)->AllocateStaging(plan->Total() - 1);
  EXPECT_TRUE(staging.ok()) << staging.status();
}

TEST_F(GroupInvariantsTest, MembersDoNotMix) {
  auto heads = group_->CreateHead(spec_.config);
  ASSERT_TRUE(heads.ok()) << heads.status();
  std::vector<HeadKernels*> wrong = {replicas_[1], replicas_[0], replicas_[2]};
  EXPECT_EQ(MakeCpuReplicas(wrong).status().code(), absl::StatusCode::kInvalidArgument);
  wrong = {replicas_[0], replicas_[1]};
  EXPECT_EQ(MakeCpuReplicas(wrong).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeCpuReplicas(std::vector<HeadKernels*>{heads->get()}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lossd::kernels::testing::group_head_test
