// SPDX-License-Identifier: Apache-2.0
// A member of a group that computes nothing: the test says when a chunk has results, when it is done, and
// with what. Thread-safe but for what the backend's contract says of its driving thread.
#ifndef LOSSD_TESTS_KERNELS_GROUP_SCRIPTED_MEMBER_H_
#define LOSSD_TESTS_KERNELS_GROUP_SCRIPTED_MEMBER_H_

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace lossd::kernels::testing {

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

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_GROUP_SCRIPTED_MEMBER_H_
