// SPDX-License-Identifier: Apache-2.0
#include "kernels/group/member_heads.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "kernels/group/group_chunk.h"

namespace lossd::kernels {

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
    for (RemotePart part : RemotePartsOf(head(member))) {
      part.replica = {member, size()};
      part.split = split;
      parts.push_back(part);
    }
  }
  return parts;
}

void MemberHeads::PassBy(absl::Span<const int> ranks) const {
  ForEach([&](int, HeadKernels& head) {
    kernels::PassBy(head, ranks);
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

void MemberHeads::Refuse(absl::Status refusal, ChunkCallbacks callbacks) {
  order_->Add(std::make_shared<GroupChunk>(std::move(refusal), std::move(callbacks)));
}

void MemberHeads::Submit(Chunk* chunk, ChunkCallbacks callbacks, std::vector<ChunkPart> parts) {
  if (absl::Status status = members_->Check(); !status.ok()) return Refuse(status, std::move(callbacks));
  const auto divided = std::make_shared<GroupChunk>(chunk, std::move(callbacks), std::move(parts));
  const size_t count = divided->parts();  // it may be over before the last part is posted
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
