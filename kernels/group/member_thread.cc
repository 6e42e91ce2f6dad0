// SPDX-License-Identifier: Apache-2.0
#include "kernels/group/member_thread.h"

#include <pthread.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::kernels {

MemberThread::MemberThread(int index, int max_chunks)
    : max_chunks_(max_chunks), thread_([this, index] { Run(index); }) {}

MemberThread::~MemberThread() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  thread_.join();
}

void MemberThread::Post(Task task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
}

void MemberThread::StartChunk() {
  absl::MutexLock lock(&mutex_);
  const auto takes_chunk = [this] {
    mutex_.AssertHeld();
    return chunks_ < max_chunks_;
  };
  mutex_.Await(absl::Condition(&takes_chunk));
  ++chunks_;
  busy_.Begin();
}

void MemberThread::EndChunk(std::optional<int64_t> rows) {
  busy_.End();
  absl::MutexLock lock(&mutex_);
  --chunks_;
  if (!rows.has_value()) return;
  ++chunks_done_;
  rows_done_ += *rows;
}

MemberWork MemberThread::work() const {
  absl::MutexLock lock(&mutex_);
  return {.chunks = chunks_done_, .rows = rows_done_, .busy = busy_.Total()};
}

void MemberThread::Run(int index) {
  pthread_setname_np(pthread_self(), absl::StrCat("lossd-member-", index).substr(0, 15).c_str());
  const auto has_news = [this] {
    mutex_.AssertHeld();
    return ending_ || !tasks_.empty();
  };
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_news));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    busy_.Begin();
    task();
    busy_.End();
  }
}

}  // namespace lossd::kernels
