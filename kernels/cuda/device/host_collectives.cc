#include "kernels/cuda/device/host_collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda {
namespace {

absl::Status Copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  return ToStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream),
                  "cudaMemcpyAsync");
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostCollectives>> HostCollectives::Create(MemoryLedger* ledger,
                                                                         cudaStream_t stream,
                                                                         HostTransfers* transfers) {
  absl::StatusOr<PinnedBuffer> rooms =
      PinnedBuffer::Allocate(ledger, transfers->replica().count * kPieceBytes);
  if (!rooms.ok()) return rooms.status();
  return std::unique_ptr<HostCollectives>(new HostCollectives(*std::move(rooms), stream, transfers));
}

// What is enqueued uses the rooms.
HostCollectives::~HostCollectives() { cudaStreamSynchronize(stream_); }

// ---- On the host, in the order of the stream ----

std::vector<int> HostCollectives::Others() const {
  std::vector<int> others;
  for (int member = 0; member < members(); ++member) {
    if (!is(member)) others.push_back(member);
  }
  return others;
}

absl::Status HostCollectives::Launch(Exchange exchange) {
  exchange.collectives = this;
  auto launched = std::make_unique<Exchange>(std::move(exchange));
  const absl::Status status =
      ToStatus(cudaLaunchHostFunc(stream_, &HostCollectives::Run, launched.get()), "cudaLaunchHostFunc");
  if (status.ok()) (void)launched.release();  // Run's now
  return status;
}

void HostCollectives::Run(void* exchange) {
  const std::unique_ptr<const Exchange> mine(static_cast<const Exchange*>(exchange));
  mine->collectives->Do(*mine);
}

void HostCollectives::Do(const Exchange& exchange) {
  std::vector<RankTransfer> send, receive;
  for (const int member : exchange.send_to) send.push_back({member, Room(first_member()), exchange.bytes});
  for (const int member : exchange.receive_from) receive.push_back({member, Room(member), exchange.bytes});
  absl::Status status = failure();
  if (status.ok()) status = transfers_->Exchange(send, receive);
  if (!status.ok()) {
    // What is behind it on the stream goes on, and finds numbers.
    for (const RankTransfer& missing : receive) std::memset(missing.data, 0, missing.bytes);
    absl::MutexLock lock(&mutex_);
    failure_.Update(std::move(status));
    return;
  }
  if (!exchange.sums) return;
  std::vector<const float*> parts;
  for (int member = 0; member < members(); ++member) {
    parts.push_back(reinterpret_cast<const float*>(Room(member)));
  }
  auto* const sums = reinterpret_cast<float*>(Room(first_member()));
  for (size_t i = 0; i < exchange.bytes / sizeof(float); ++i) {
    float sum = 0.0f;
    for (const float* part : parts) sum += part[i];
    sums[i] = sum;
  }
}

absl::Status HostCollectives::ForPieces(
    int64_t bytes, absl::FunctionRef<absl::Status(int64_t begin, int64_t bytes)> piece) {
  for (int64_t begin = 0; begin < bytes; begin += kPieceBytes) {
    LOSSD_RETURN_IF_ERROR(piece(begin, std::min(kPieceBytes, bytes - begin)));
  }
  return absl::OkStatus();
}

// ---- Exchanges ----

absl::Status HostCollectives::Sum(const std::vector<Part>& parts, int64_t floats, int root) {
  auto* const data = static_cast<uint8_t*>(parts.front().data);
  return ForPieces(floats * static_cast<int64_t>(sizeof(float)), [&](int64_t begin, int64_t bytes) {
    Exchange exchange;
    exchange.bytes = static_cast<size_t>(bytes);
    exchange.sums = is(root);
    (is(root) ? exchange.receive_from : exchange.send_to) = is(root) ? Others() : std::vector<int>{root};
    LOSSD_RETURN_IF_ERROR(Copy(Room(first_member()), data + begin, bytes, stream_));
    LOSSD_RETURN_IF_ERROR(Launch(std::move(exchange)));
    return is(root) ? Copy(data + begin, Room(root), bytes, stream_) : absl::OkStatus();
  });
}

absl::Status HostCollectives::Spread(const std::vector<Part>& parts, DType dtype, int64_t count, int root) {
  auto* const data = static_cast<uint8_t*>(parts.front().data);
  return ForPieces(count * static_cast<int64_t>(SizeOf(dtype)), [&](int64_t begin, int64_t bytes) {
    Exchange exchange;
    exchange.bytes = static_cast<size_t>(bytes);
    if (is(root)) {
      exchange.send_to = Others();
      LOSSD_RETURN_IF_ERROR(Copy(Room(root), data + begin, bytes, stream_));
      return Launch(std::move(exchange));
    }
    exchange.receive_from = {root};
    LOSSD_RETURN_IF_ERROR(Launch(std::move(exchange)));
    return Copy(data + begin, Room(root), bytes, stream_);
  });
}

absl::Status HostCollectives::SumOfAll(const Part& part, int64_t floats) {
  auto* const data = static_cast<uint8_t*>(part.data);
  return ForPieces(floats * static_cast<int64_t>(sizeof(float)), [&](int64_t begin, int64_t bytes) {
    Exchange exchange;
    exchange.bytes = static_cast<size_t>(bytes);
    exchange.send_to = exchange.receive_from = Others();
    exchange.sums = true;
    LOSSD_RETURN_IF_ERROR(Copy(Room(first_member()), data + begin, bytes, stream_));
    LOSSD_RETURN_IF_ERROR(Launch(std::move(exchange)));
    return Copy(data + begin, Room(first_member()), bytes, stream_);
  });
}

absl::Status HostCollectives::Gather(const Part& part, const void* own, int64_t bytes) {
  auto* const all = static_cast<uint8_t*>(part.data);
  return ForPieces(bytes, [&](int64_t begin, int64_t n) -> absl::Status {
    Exchange exchange;
    exchange.bytes = static_cast<size_t>(n);
    exchange.send_to = exchange.receive_from = Others();
    LOSSD_RETURN_IF_ERROR(
        Copy(Room(first_member()), static_cast<const uint8_t*>(own) + begin, n, stream_));
    LOSSD_RETURN_IF_ERROR(Launch(std::move(exchange)));
    for (int member = 0; member < members(); ++member) {
      LOSSD_RETURN_IF_ERROR(Copy(all + member * bytes + begin, Room(member), n, stream_));
    }
    return absl::OkStatus();
  });
}

absl::Status HostCollectives::Enqueue(absl::FunctionRef<absl::Status()> exchange) {
  LOSSD_RETURN_IF_ERROR(failure());
  absl::Status status = exchange();
  return status.ok() ? status : Abort(std::move(status));
}

// ---- Their end ----

absl::Status HostCollectives::Wait(const std::vector<Part>&) {
  const absl::Status status = ToStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  return status.ok() ? failure() : Abort(status);
}

absl::Status HostCollectives::Wait(int, cudaEvent_t event) {
  const absl::Status status = ToStatus(cudaEventSynchronize(event), "cudaEventSynchronize");
  return status.ok() ? failure() : Abort(status);
}

absl::Status HostCollectives::Abort(absl::Status reason) {
  {
    absl::MutexLock lock(&mutex_);
    failure_.Update(std::move(reason));
  }
  const absl::Status first = failure();
  transfers_->Abort(first);
  return first;
}

absl::Status HostCollectives::failure() const {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

}  // namespace lossd::kernels::cuda
