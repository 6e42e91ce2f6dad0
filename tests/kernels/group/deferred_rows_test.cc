// SPDX-License-Identifier: Apache-2.0
// Deferred rows of a head that lies on several members by rows: all of them compute some, and what one of
// them fails spoils neither the rows that are retained nor later gradients.
#include "tests/kernels/deferred_rows.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/cpu_replicas.h"
#include "kernels/group/group_backend.h"
#include "tests/server/app/forwarding_backend.h"

namespace lossd::kernels::testing::deferred_rows_test {
namespace {

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

}  // namespace
}  // namespace lossd::kernels::testing::deferred_rows_test
