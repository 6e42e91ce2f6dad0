// SPDX-License-Identifier: Apache-2.0
// Instance: the inside of a server, with checkpoints on a disk that tests can slow down, and a trainer for
// it.
#ifndef LOSSD_TESTS_SERVER_ADMIN_CHECKPOINTS_FIXTURE_H_
#define LOSSD_TESTS_SERVER_ADMIN_CHECKPOINTS_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/create_backend.h"
#include "server/admin/checkpoints.h"
#include "server/admin/head_operations.h"
#include "server/log/log.h"
#include "tests/kernels/problem.h"
#include "tests/server/head/faulty_disk.h"
#include "tests/support/temp_folder.h"

namespace lossd::admin {

inline constexpr int64_t kHidden = 24;
inline constexpr int64_t kClasses = 300;
inline constexpr int64_t kRows = 16;

// A disk on which each write takes `delay_us` longer, and no write begins while the gate is closed.
class SlowDisk final : public head::WatchedDisk {
 public:
  void CloseGate() { SetOpen(false); }
  void OpenGate() { SetOpen(true); }
  std::atomic<int64_t> delay_us{0};
  std::atomic<bool> full{false};

 private:
  absl::Status BeforeWrite(const std::string& path, absl::Span<const uint8_t> bytes) override {
    AwaitGate();
    absl::SleepFor(absl::Microseconds(delay_us.load()));
    if (full) return formats::FileError(path, absl::StrCat("write ", bytes.size()), ENOSPC);
    return absl::OkStatus();
  }
  void SetOpen(bool open) {
    absl::MutexLock lock(&mutex_);
    open_ = open;
  }
  void AwaitGate() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&open_));
  }

  absl::Mutex mutex_;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
};

class Finish final : public engine::StreamObserver {
 public:
  void OnMemory(absl::AnyInvocable<void()> receive) override { receive(); }
  void OnSlice(engine::SliceOutput) override {}
  void OnFinished(absl::Status status, const engine::StreamSummary&) override {
    status_ = std::move(status);
    done_.Notify();
  }
  absl::Status Wait() {
    done_.WaitForNotification();
    return status_;
  }

 private:
  absl::Notification done_;
  absl::Status status_;
};

using Weights = std::vector<std::vector<float>>;

// The inside of a server that has just started.
class Instance {
 public:
  Instance(const std::string& directory, uint64_t incarnation, head::Disk* disk, int64_t buffer_bytes,
           int64_t keep = 0)
      : backend_(std::move(kernels::CreateBackend({.backend = "cpu", .threads = 1})->backend)) {
    engine::EngineOptions options;
    options.slice_bytes = 64 << 10;
    options.staging_bytes = 1 << 20;
    engine_ = *engine::Engine::Create(options, backend_.get(), incarnation, {});
    HeadOperationsOptions head_options;
    head_options.checkpoints = {.directory = directory,
                                .transfer_bytes = 4 << 10,
                                .buffer_bytes = buffer_bytes,
                                .shards = {.most_bytes = 40 << 10, .threads = 2},  // four files
                                .keep = keep,
                                .disk = disk};
    head_options.transfer_bytes = 4 << 10;
    operations_ = std::make_unique<HeadOperations>(head_options, engine_.get(), &metrics_);
  }

  HeadOperations& operations() { return *operations_; }
  engine::Engine& engine() { return *engine_; }
  metrics::Metrics& metrics() { return metrics_; }

  void CreateHead() {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("head");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_spec()->set_bias(true);
    request.mutable_spec()->set_norm(v1::NORM_RMSNORM);
    const auto created = operations_->CreateHead(request);
    ASSERT_TRUE(created.ok()) << created.status();
  }

  // Accumulates one microbatch, whose rows depend only on the step and `history`.
  absl::Status Accumulate(const std::string& head, uint64_t step, uint64_t history = 0) {
    kernels::testing::Rng rng(step + 1 + 1000 * history);
    engine::StreamSpec spec;
    spec.head = head;
    spec.step = step;
    spec.microbatch_rows = kRows;
    spec.rows = {0, kRows};
    spec.hidden_dtype = kernels::DType::kFloat32;
    spec.accumulate_gradients = true;
    for (int64_t i = 0; i < kRows; ++i) {
      spec.targets.push_back(static_cast<int32_t>(kernels::testing::UniformInt(rng, 0, kClasses - 1)));
    }
    auto finish = std::make_shared<Finish>();
    auto stream = engine_->Open(spec, finish);
    if (!stream.ok()) return stream.status();
    (*stream)->Start();
    std::vector<float> hidden(kRows * kHidden);
    for (float& value : hidden) value = kernels::testing::Uniform(rng, -1.0f, 1.0f);
    const size_t bytes = hidden.size() * sizeof(float);
    (*stream)->Receive({.rows = {0, kRows},
                        .bytes = static_cast<int64_t>(bytes),
                        .copy = [&](uint8_t* to) { std::memcpy(to, hidden.data(), bytes); },
                        .on_queued = [](int64_t) {}});
    (*stream)->HalfClose();
    return finish->Wait();
  }

  static v1::ApplyStepRequest StepRequest(const std::string& head, uint64_t step) {
    v1::ApplyStepRequest request;
    request.set_head(head);
    request.set_step(step);
    request.set_expected_rows(kRows);
    request.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01 / static_cast<double>(step + 3));
    request.mutable_optimizer()->mutable_adamw()->set_weight_decay(0.1);
    return request;
  }
  absl::StatusOr<v1::ApplyStepResponse> Apply(const std::string& head, uint64_t step) {
    return operations_->ApplyStep(StepRequest(head, step));
  }
  void Train(const std::string& head, uint64_t begin, uint64_t end) {
    for (uint64_t step = begin; step < end; ++step) {
      absl::Status status = Accumulate(head, step);
      if (status.ok()) status = Apply(head, step).status();
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  absl::StatusOr<v1::SaveCheckpointResponse> Save(const std::string& name = "",
                                                  const Checkpoints::SaveCallbacks& callbacks = {}) {
    v1::SaveCheckpointRequest request;
    request.set_head("head");
    request.set_name(name);
    return operations_->checkpoints().Save(request, callbacks);
  }
  absl::StatusOr<v1::HeadDescription> Load(const std::string& checkpoint, const std::string& head) {
    v1::LoadCheckpointRequest request;
    request.set_checkpoint(checkpoint);
    request.set_head(head);
    return operations_->LoadCheckpoint(request);
  }

  // All values and moments of the head.
  Weights Read(const std::string& name) {
    Weights all;
    const auto snapshot = engine_->Describe(name);
    EXPECT_TRUE(snapshot.ok()) << snapshot.status();
    for (const kernels::TensorId id : head::CheckpointTensors(snapshot->config)) {
      const kernels::TensorShape shape = kernels::ShapeOf(snapshot->config, id.param);
      std::vector<float>& values = all.emplace_back(static_cast<size_t>(shape.elements()));
      const auto bytes = absl::MakeSpan(reinterpret_cast<uint8_t*>(values.data()), values.size() * 4);
      const absl::Status read = engine_->OnDevice(name, [&](head::Head& head) {
        return head.ReadRows(id, 0, shape.rows, kernels::DType::kFloat32, bytes);
      });
      EXPECT_TRUE(read.ok()) << read;
    }
    return all;
  }

 private:
  std::unique_ptr<kernels::Backend> backend_;
  metrics::Metrics metrics_{metrics::BuildInfo()};
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<HeadOperations> operations_;
};

class CheckpointsTest : public testing::Test {
 protected:
  CheckpointsTest() { log::Configure(log::LogLevel::kOff, log::LogFormat::kText); }

  test::TempFolder folder_;
  const std::string directory_ = folder_.File("checkpoints");
  SlowDisk disk_;
};

}  // namespace lossd::admin

#endif  // LOSSD_TESTS_SERVER_ADMIN_CHECKPOINTS_FIXTURE_H_
