// SPDX-License-Identifier: Apache-2.0
// CudaTeacherPool (cuda_teacher_pool.h): its buffers, and the order of copies, chunks and transfers.
#include "kernels/cuda/heads/cuda_teacher_pool.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda {

CudaTeacherPool::~CudaTeacherPool() {
  if (stream_ == nullptr) return;
  cudaSetDevice(device_->options().device);
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

absl::Status CudaTeacherPool::Start() {
  if (stream_ != nullptr) return absl::OkStatus();
  for (Event* event : {&copied_, &downloads_end_, &uploads_end_, &workspace_free_}) {
    LOSSD_RETURN_IF_ERROR(Take(Event::Create(), *event));
  }
  return ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

absl::StatusOr<MemoryBytes> CudaTeacherPool::GrowthWith(const HostedBytes& bytes) const {
  const absl::StatusOr<int64_t> values = pool_.SizeWith(bytes.values);
  if (!values.ok()) return values.status();
  MemoryBytes growth;
  const auto add = [&](int64_t needed, const DeviceBuffer& buffer) {
    const int64_t rounded = RoundUp(needed, kDevicePage);
    if (rounded > buffer.bytes()) growth[MemoryKind::kTeacherPool] += rounded;
  };
  add(*values, memory_.values);
  add(bytes.workspace, memory_.workspace);
  add(bytes.slots, memory_.slots);
  return growth;
}

// Allocates all new buffers before it frees an old one, so that an error changes nothing.
absl::Status CudaTeacherPool::Grow(const HostedBytes& bytes) {
  const absl::StatusOr<int64_t> values = pool_.SizeWith(bytes.values);
  if (!values.ok()) return values.status();
  Memory grown;
  const auto allocate = [&](int64_t needed, const DeviceBuffer& has, DeviceBuffer& buffer) {
    if (RoundUp(needed, kDevicePage) <= has.bytes()) return absl::OkStatus();
    return Take(DeviceBuffer::Allocate(&device_->ledger(), MemoryKind::kTeacherPool, needed), buffer);
  };
  LOSSD_RETURN_IF_ERROR(allocate(*values, memory_.values, grown.values));
  LOSSD_RETURN_IF_ERROR(allocate(bytes.workspace, memory_.workspace, grown.workspace));
  LOSSD_RETURN_IF_ERROR(allocate(bytes.slots, memory_.slots, grown.slots));
  const bool other_memory = grown.values.bytes() + grown.workspace.bytes() + grown.slots.bytes() > 0;
  if (!other_memory && *values == pool_.size()) return absl::OkStatus();
  // If the size of the pool changes, TeacherPool::Add forgets where values lie, so no later copy waits for
  // chunks that read these values. So this function waits for all chunks.
  LOSSD_RETURN_IF_ERROR(device_->Synchronize());
  LOSSD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  if (!other_memory) return absl::OkStatus();
  for (auto [buffer, from] :
       {std::pair{&memory_.values, &grown.values}, std::pair{&memory_.workspace, &grown.workspace},
        std::pair{&memory_.slots, &grown.slots}}) {
    if (from->bytes() > 0) std::swap(*buffer, *from);
  }
  workspace_of_ = 0;
  for (auto& [id, member] : members_) LOSSD_RETURN_IF_ERROR(member.moved(PlacesAt(0)));
  return absl::OkStatus();
}

absl::StatusOr<CudaTeacherPool::Id> CudaTeacherPool::Add(const HostedBytes& bytes, OnMoved moved) {
  LOSSD_RETURN_IF_ERROR(Start());
  Member member = {.bytes = bytes, .moved = std::move(moved)};
  LOSSD_RETURN_IF_ERROR(Take(Event::Create(), member.last_use));
  absl::Status status = Grow(bytes);
  if (status.ok()) status = member.moved(PlacesAt(0));
  if (!status.ok()) {
    if (members_.empty()) memory_ = Memory();
    return status;
  }
  const Id id = pool_.Add(bytes.values);
  members_.emplace(id, std::move(member));
  return id;
}

void CudaTeacherPool::Remove(Id id) {
  cudaSetDevice(device_->options().device);
  cudaStreamSynchronize(stream_);  // a copy may still read memory of the head
  pool_.Remove(id);
  members_.erase(id);
  if (workspace_of_ == id) workspace_of_ = 0;
  if (members_.empty()) memory_ = Memory();
}

absl::StatusOr<std::unique_ptr<CudaTeacherPool::Copied>> CudaTeacherPool::CopyValues(
    Id id, const TeacherPool::Place& place, const uint8_t* home) {
  auto copied = std::make_unique<Copied>();
  copied->id = id;
  LOSSD_RETURN_IF_ERROR(Take(Event::Create(/*timing=*/true), copied->begin));
  LOSSD_RETURN_IF_ERROR(Take(Event::Create(/*timing=*/true), copied->end));
  // Members that left their places earlier need no wait: the copies that replaced them come before this copy
  // on the stream, and have waited for the last uses of these members.
  for (const Id other : place.evicted) {
    LOSSD_RETURN_IF_ERROR(Await(members_.at(other).last_use, stream_));
  }
  LOSSD_RETURN_IF_ERROR(Record(copied->begin, stream_));
  LOSSD_RETURN_IF_ERROR(
      Copy(memory_.values.data() + place.offset, home, members_.at(id).bytes.values, stream_));
  LOSSD_RETURN_IF_ERROR(Record(copied->end, stream_));
  LOSSD_RETURN_IF_ERROR(Record(copied_, stream_));
  LOSSD_RETURN_IF_ERROR(Await(copied_, device_->compute()));
  return copied;
}

// Transfers of the member before may still read or write the workspace, so the zeros wait for both streams of
// transfers. Uploads of this member wait for the zeros.
absl::Status CudaTeacherPool::TakeWorkspace(Id id) {
  if (workspace_of_ == id) return absl::OkStatus();
  const cudaStream_t compute = device_->compute();
  LOSSD_RETURN_IF_ERROR(Record(downloads_end_, device_->download()));
  LOSSD_RETURN_IF_ERROR(Record(uploads_end_, device_->upload()));
  LOSSD_RETURN_IF_ERROR(Await(downloads_end_, compute));
  LOSSD_RETURN_IF_ERROR(Await(uploads_end_, compute));
  const HostedBytes& bytes = members_.at(id).bytes;
  LOSSD_RETURN_IF_ERROR(Zero(memory_.workspace.data(), bytes.workspace, compute));
  LOSSD_RETURN_IF_ERROR(Zero(memory_.slots.data(), bytes.slots, compute));
  LOSSD_RETURN_IF_ERROR(Record(workspace_free_, compute));
  LOSSD_RETURN_IF_ERROR(Await(workspace_free_, device_->upload()));
  workspace_of_ = id;
  return absl::OkStatus();
}

absl::StatusOr<HostedPlaces> CudaTeacherPool::Use(Id id, const uint8_t* home,
                                                  std::unique_ptr<Copied>& copied) {
  const TeacherPool::Place place = pool_.Use(id);
  if (place.copy) {
    absl::StatusOr<std::unique_ptr<Copied>> copy = CopyValues(id, place, home);
    if (!copy.ok()) {
      pool_.Invalidate(id);  // the copy failed, so the pool does not have the values
      return copy.status();
    }
    copied = *std::move(copy);
  }
  LOSSD_RETURN_IF_ERROR(TakeWorkspace(id));
  return PlacesAt(place.offset);
}

absl::Status CudaTeacherPool::EndUse(Id id) { return Record(members_.at(id).last_use, device_->compute()); }

absl::Status PooledKernels::JoinPool(const HostedBytes& bytes, CudaTeacherPool::OnMoved moved) {
  absl::StatusOr<CudaTeacherPool::Id> id = pool_->Add(bytes, std::move(moved));
  if (!id.ok()) return id.status();
  id_ = *id;
  return absl::OkStatus();
}

void CudaTeacherPool::Count(const Copied& copied) {
  float milliseconds = 0.0f;
  if (cudaEventElapsedTime(&milliseconds, copied.begin.get(), copied.end.get()) != cudaSuccess) {
    cudaGetLastError();  // clears the error, which the thread's next check would report
    return;
  }
  pool_.AddCopying(copied.id, absl::Milliseconds(static_cast<double>(milliseconds)));
}

}  // namespace lossd::kernels::cuda
