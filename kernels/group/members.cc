// SPDX-License-Identifier: Apache-2.0
// The threads of a group's members, and operations on all of their heads (members.h).
#include "kernels/group/members.h"

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/group/group_chunk.h"

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

Members::Members(std::vector<std::unique_ptr<Backend>> backends, std::function<absl::Status()> check)
    : backends_(std::move(backends)), check_(std::move(check)) {
  for (int i = 0; i < size(); ++i) {
    threads_.push_back(std::make_unique<MemberThread>(i, backend(i).max_chunks_in_flight()));
  }
}

absl::Status Members::ForEach(absl::FunctionRef<absl::Status(int member)> fn) const {
  std::vector<absl::Status> results(static_cast<size_t>(size()));
  std::vector<absl::Notification> done(results.size());
  for (int i = 0; i < size(); ++i) {
    thread(i).Post([&, i] {
      results[static_cast<size_t>(i)] = fn(i);
      done[static_cast<size_t>(i)].Notify();
    });
  }
  for (absl::Notification& one : done) one.WaitForNotification();
  absl::Status first;
  for (absl::Status& result : results) first.Update(std::move(result));
  return first;
}

absl::Status Members::On(int member, absl::FunctionRef<absl::Status()> fn) const {
  absl::Status result;
  absl::Notification done;
  thread(member).Post([&] {
    result = fn();
    done.Notify();
  });
  done.WaitForNotification();
  return result;
}

absl::Status Members::WithAll(absl::FunctionRef<absl::Status()> fn) const {
  std::vector<absl::Notification> waiting(threads_.size());
  std::vector<absl::Notification> done(threads_.size());
  absl::Notification go_on;
  for (int i = 0; i < size(); ++i) {
    thread(i).Post([&, i] {
      waiting[static_cast<size_t>(i)].Notify();
      go_on.WaitForNotification();
      done[static_cast<size_t>(i)].Notify();
    });
  }
  for (absl::Notification& one : waiting) one.WaitForNotification();
  absl::Status result = fn();
  go_on.Notify();
  for (absl::Notification& one : done) one.WaitForNotification();
  return result;
}

MemberHeads::~MemberHeads() {
  members_
      ->ForEach([this](int member) {
        heads_[static_cast<size_t>(member)].reset();
        return absl::OkStatus();
      })
      .IgnoreError();
}

int64_t MemberHeads::chunk_rows() const {
  const auto fewest = std::min_element(heads_.begin(), heads_.end(), [](const auto& a, const auto& b) {
    return a->slice_rows() < b->slice_rows();
  });
  return (*fewest)->slice_rows();
}

MemoryBytes MemberHeads::memory() const {
  MemoryBytes sum;
  for (const auto& head : heads_) {
    const MemoryBytes bytes = head->memory();
    for (size_t kind = 0; kind < kMemoryKinds; ++kind) sum.by_kind[kind] += bytes.by_kind[kind];
  }
  return sum;
}

std::vector<RemotePart> MemberHeads::Remote(Split split) const {
  std::vector<RemotePart> parts;
  for (int member = 0; member < size(); ++member) {
    for (RemotePart part : head(member).remote_parts()) {
      part.replica = {member, size()};
      part.split = split;
      parts.push_back(part);
    }
  }
  return parts;
}

void MemberHeads::SkipWritesTo(absl::Span<const int> ranks) const {
  ForEach([&](int, HeadKernels& head) {
    head.SkipWritesTo(ranks);
    return absl::OkStatus();
  }).IgnoreError();
}

absl::Status MemberHeads::ForEach(absl::FunctionRef<absl::Status(int member, HeadKernels& head)> fn) const {
  return members_->ForEach([&](int member) { return fn(member, head(member)); });
}

absl::Status MemberHeads::CheckTrainable() const {
  if (heads_.front()->config().trainable) return absl::OkStatus();
  return absl::FailedPreconditionError("the head is not trainable");
}

absl::StatusOr<double> MemberHeads::GradNorm() const {
  std::vector<double> norms(heads_.size());
  absl::Status status = ForEach([&](int member, HeadKernels& head) {
    absl::StatusOr<double> norm = head.GradNorm();
    if (norm.ok()) norms[static_cast<size_t>(member)] = *norm;
    return norm.status();
  });
  if (!status.ok()) return status;
  double squares = 0.0;
  for (const double norm : norms) squares += norm * norm;
  return std::sqrt(squares);
}

absl::Status MemberHeads::ApplyStep(const OptimizerOptions& options, int64_t update) const {
  return ForEach([&](int, HeadKernels& head) { return head.ApplyStep(options, update); });
}

absl::Status MemberHeads::ZeroGradients() const {
  return ForEach([](int, HeadKernels& head) { return head.ZeroGradients(); });
}

absl::Status MemberHeads::ZeroMoments() const {
  return ForEach([](int, HeadKernels& head) { return head.ZeroMoments(); });
}

absl::Status MemberHeads::CheckTeacher(const MemberHeads& teacher) const {
  for (int member = 0; member < size(); ++member) {
    if (absl::Status taken = head(member).CheckTeacher(teacher.head(member)); !taken.ok()) return taken;
  }
  return absl::OkStatus();
}

void MemberHeads::Refuse(absl::Status refusal, ChunkCallbacks callbacks) {
  order_->Add(std::make_shared<GroupChunk>(std::move(refusal), std::move(callbacks)));
}

void MemberHeads::Submit(Chunk* chunk, ChunkCallbacks callbacks, std::vector<ChunkPart> parts,
                         const MemberHeads* teacher) {
  if (absl::Status status = members_->Check(); !status.ok()) return Refuse(status, std::move(callbacks));
  const auto divided = std::make_shared<GroupChunk>(chunk, std::move(callbacks), std::move(parts));
  const size_t count = divided->parts();  // read before the parts start to run
  for (size_t part = 0; part < count && teacher != nullptr; ++part) {
    divided->chunk(part)->teacher = &teacher->head(divided->member(part));
  }
  order_->Add(divided);
  for (size_t part = 0; part < count; ++part) Start(divided, part);
}

void MemberHeads::Start(const std::shared_ptr<GroupChunk>& chunk, size_t part) {
  const int member = chunk->member(part);
  MemberThread& thread = members_->thread(member);
  thread.Post([chunk, part, &thread, &head = head(member), order = order_] {
    thread.StartChunk();
    head.Submit(chunk->chunk(part),
                {.on_results =
                     [chunk, part, order](const absl::Status& status) {
                       if (chunk->OnResults(part, status)) order->OnResults(*chunk);
                     },
                 .on_done =
                     [chunk, part, order, &thread](const absl::Status& status) {
                       thread.EndChunk(status.ok() ? std::optional(chunk->rows(part)) : std::nullopt);
                       if (chunk->OnDone(part, status)) order->OnDone(*chunk);
                     }});
  });
}

}  // namespace lossd::kernels
