// SPDX-License-Identifier: Apache-2.0
// LocalWorker: a worker in the process of the leader, for tests. In place of its connection it has a stream
// that counts bytes.
#ifndef LOSSD_TESTS_SERVER_RANKS_LOCAL_WORKER_H_
#define LOSSD_TESTS_SERVER_RANKS_LOCAL_WORKER_H_

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/rank_link.h"
#include "server/ranks/worker.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {

// A link of a worker that exchanges nothing.
class NoLink final : public kernels::RankLink {
 public:
  std::vector<std::string> CollectivesOffered() const override { return {kernels::kGloo}; }
  absl::Status UseCollectives(const std::string&) override { return {}; }
  absl::StatusOr<std::string> Address() override { return ""; }
  absl::Status Connect(const std::vector<std::string>&) override { return {}; }
  absl::StatusOr<std::unique_ptr<kernels::Replicas>> Join(kernels::HeadKernels*) override {
    return std::unique_ptr<kernels::Replicas>();
  }
  absl::Status JoinClasses(kernels::HeadKernels*) override { return {}; }
  void WatchChunks(std::function<absl::Status(const absl::Status&)>) override {}
  kernels::ExchangeTimes Times() const override { return {}; }
  void Abort(const absl::Status&) override {}
};

// A worker in this process, at the other end of a stream that counts the bytes of its messages.
class LocalWorker final : public WorkerTransport {
 public:
  explicit LocalWorker(std::unique_ptr<kernels::Backend> backend)
      : backend_(std::move(backend)),
        heads_(backend_.get(), &link_, [this](v1::FromWorker message) { Say(std::move(message)); }) {}

  kernels::Backend& backend() { return *backend_; }
  WorkerHeads& heads() { return heads_; }
  size_t bytes_sent() const { return sent_; }
  size_t bytes_heard() {
    absl::MutexLock lock(&mutex_);
    return heard_;
  }

  bool Write(const v1::ToWorker& message) override {
    sent_ += message.ByteSizeLong();
    if (message.has_request()) {
      v1::FromWorker answer;
      *answer.mutable_answer() = heads_.Execute(message.request());
      Say(std::move(answer));
    } else if (message.has_chunk()) {
      chunk_ = message.chunk();
    } else if (message.has_slice()) {
      slices_.push_back(message.slice());
      if (slices_.size() == chunk_.slices()) {
        const absl::Status status = heads_.Submit(chunk_, std::exchange(slices_, {}));
        EXPECT_TRUE(status.ok()) << status;
      }
    }
    return true;
  }
  bool Read(v1::FromWorker* message) override {
    absl::MutexLock lock(&mutex_);
    const auto news = [this] {
      mutex_.AssertHeld();
      return ended_ || !said_.empty();
    };
    mutex_.Await(absl::Condition(&news));
    if (said_.empty()) return false;
    *message = std::move(said_.front());
    said_.pop_front();
    heard_ += message->ByteSizeLong();
    return true;
  }
  void Cancel() override {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
  }

 private:
  void Say(v1::FromWorker message) {
    absl::MutexLock lock(&mutex_);
    said_.push_back(std::move(message));
  }

  NoLink link_;
  const std::unique_ptr<kernels::Backend> backend_;
  WorkerHeads heads_;
  size_t sent_ = 0;
  v1::ChunkStart chunk_;
  std::vector<v1::ChunkSlice> slices_;
  absl::Mutex mutex_;
  std::deque<v1::FromWorker> said_ ABSL_GUARDED_BY(mutex_);
  size_t heard_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::ranks

#endif  // LOSSD_TESTS_SERVER_RANKS_LOCAL_WORKER_H_
