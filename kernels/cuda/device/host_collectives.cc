// SPDX-License-Identifier: Apache-2.0
// HostCollectives (collectives.h): sums and copies among ranks through the memory of their hosts.
//
// A room is pinned memory for one piece of one rank; there is a room for each rank. An exchange of one piece:
// 1. The stream copies this rank's bytes into this rank's room, writes the number of the exchange to
//    arrived(), and waits until done() has reached the number.
// 2. The object's thread sees arrived(), sends this room, receives into the rooms of other ranks, adds up the
//    rooms if a sum is wanted, and writes the number to done().
// 3. The stream continues, and copies the result from a room back to the GPU.
#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "kernels/cuda/device/collectives.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device.h"

namespace lossd::kernels::cuda {
namespace {

absl::Status DriverStatus(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(call, " failed: error ", static_cast<int>(result)));
}

// How often a thread that waits for room in the queue checks that the stream still works.
constexpr absl::Duration kLook = absl::Seconds(1);

template <typename Function>
absl::Status FindInDriver(const char* name, Function& function) {
  LOSSD_RETURN_IF_CUDA_ERROR(FindDriverFunction(name, function), "cudaGetDriverEntryPointByVersion");
  if (function != nullptr) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("the NVIDIA driver lacks ", name, ", which collectives gloo need"));
}

CUdeviceptr AddressOf(const uint32_t* number) { return reinterpret_cast<CUdeviceptr>(number); }

// Whether the counter has reached `wanted`. Counters wrap around.
bool HasCome(const uint32_t* number, uint32_t wanted) {
  return static_cast<int32_t>(__atomic_load_n(number, __ATOMIC_ACQUIRE) - wanted) >= 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostCollectives>> HostCollectives::Create(int device,
                                                                         HostTransfers* transfers) {
  std::unique_ptr<HostCollectives> made(new HostCollectives(device, transfers));
  LOSSD_RETURN_IF_ERROR(made->Start());
  return made;
}

absl::Status HostCollectives::Start() {
  LOSSD_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_), "cudaSetDevice");
  LOSSD_RETURN_IF_ERROR(FindInDriver("cuStreamWaitValue32", await_value_));
  LOSSD_RETURN_IF_ERROR(FindInDriver("cuStreamWriteValue32", write_value_));
  LOSSD_RETURN_IF_ERROR(Take(PinnedBuffer::Allocate(&ledger_, MemoryBytes(members())), memory_));
  *arrived() = *done() = 0;
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

HostCollectives::~HostCollectives() {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
  cudaSetDevice(device_);
}

// ---- On the host, in the order of the stream ----

std::vector<int> HostCollectives::Others() const {
  std::vector<int> others;
  for (int member = 0; member < members(); ++member) {
    if (!is(member)) others.push_back(member);
  }
  return others;
}

// A stream that has failed reaches none of the queued exchanges, so room never comes; the loop looks for
// that.
absl::Status HostCollectives::AwaitRoom(cudaStream_t stream) {
  const auto has_room = [this] {
    mutex_.AssertHeld();
    return queue_.size() < kMostQueued;
  };
  for (;;) {
    {
      absl::MutexLock lock(&mutex_);
      if (clocks::AwaitFor(mutex_, absl::Condition(&has_room), kLook)) return absl::OkStatus();
    }
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaSuccess && state != cudaErrorNotReady) return Abort(ToStatus(state, "cudaStreamQuery"));
  }
}

absl::Status HostCollectives::Launch(Exchange exchange, cudaStream_t stream) {
  LOSSD_RETURN_IF_ERROR(AwaitRoom(stream));
  const uint32_t number = exchange.number = ++enqueued_;
  {
    absl::MutexLock lock(&mutex_);
    queue_.push_back(std::move(exchange));
  }
  LOSSD_RETURN_IF_ERROR(
      DriverStatus(write_value_(stream, AddressOf(arrived()), number, CU_STREAM_WRITE_VALUE_DEFAULT),
                   "cuStreamWriteValue32"));
  return DriverStatus(await_value_(stream, AddressOf(done()), number, CU_STREAM_WAIT_VALUE_GEQ),
                      "cuStreamWaitValue32");
}

// Calls no function of CUDA: on the object's thread such a call might wait for the stream while it holds a
// lock.
bool HostCollectives::AwaitArrival(uint32_t number) const {
  const absl::Time start = clocks::SteadyNow();
  while (!HasCome(arrived(), number)) {
    absl::SleepFor(PauseAfter(clocks::SteadyNow() - start));
    absl::MutexLock lock(&mutex_);
    if (stopping_ || !failure_.ok()) return false;
  }
  return true;
}

void HostCollectives::Run() {
  for (;;) {
    const Exchange* next = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [this] {
        mutex_.AssertHeld();
        return stopping_ || !queue_.empty();
      };
      mutex_.Await(absl::Condition(&ready));
      if (queue_.empty()) return;
      next = &queue_.front();  // stays there, whatever is added
    }
    absl::Status status = AwaitArrival(next->number) ? Do(*next) : failure();
    if (!status.ok()) {
      // The stream continues behind the exchange, and reads zeros instead of old memory.
      for (const int member : next->receive_from) std::memset(Room(member), 0, next->bytes);
      absl::MutexLock lock(&mutex_);
      failure_.Update(std::move(status));
    }
    // A caller that waits for the work behind the exchange gets the failure there.
    __atomic_store_n(done(), next->number, __ATOMIC_RELEASE);
    absl::MutexLock lock(&mutex_);
    queue_.pop_front();
  }
}

absl::Status HostCollectives::Do(const Exchange& exchange) {
  LOSSD_RETURN_IF_ERROR(failure());
  std::vector<RankTransfer> send, receive;
  for (const int member : exchange.send_to) send.push_back({member, Room(first_member()), exchange.bytes});
  for (const int member : exchange.receive_from) receive.push_back({member, Room(member), exchange.bytes});
  LOSSD_RETURN_IF_ERROR(transfers_->Exchange(send, receive));
  if (!exchange.sums) return absl::OkStatus();
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
  return absl::OkStatus();
}

absl::Status HostCollectives::ForPieces(int64_t bytes,
                                        absl::FunctionRef<absl::Status(int64_t begin, int64_t bytes)> piece) {
  for (int64_t begin = 0; begin < bytes; begin += kPieceBytes) {
    LOSSD_RETURN_IF_ERROR(piece(begin, std::min(kPieceBytes, bytes - begin)));
  }
  return absl::OkStatus();
}

// ---- Exchanges ----

// Only the root receives: it gets the bytes of all others, and adds them up.
absl::Status HostCollectives::Sum(const std::vector<Part>& parts, int64_t floats, int root) {
  auto* const data = static_cast<uint8_t*>(parts.front().data);
  const cudaStream_t stream = parts.front().stream;
  return ForPieces(floats * static_cast<int64_t>(sizeof(float)), [&](int64_t begin, int64_t bytes) {
    Exchange exchange;
    exchange.bytes = static_cast<size_t>(bytes);
    exchange.sums = is(root);
    (is(root) ? exchange.receive_from : exchange.send_to) = is(root) ? Others() : std::vector<int>{root};
    LOSSD_RETURN_IF_ERROR(Copy(Room(first_member()), data + begin, bytes, stream));
    LOSSD_RETURN_IF_ERROR(Launch(std::move(exchange), stream));
    return is(root) ? Copy(data + begin, Room(root), bytes, stream) : absl::OkStatus();
  });
}

absl::Status HostCollectives::Spread(const std::vector<Part>& parts, DType dtype, int64_t count, int root) {
  auto* const data = static_cast<uint8_t*>(parts.front().data);
  const cudaStream_t stream = parts.front().stream;
  return ForPieces(count * static_cast<int64_t>(SizeOf(dtype)), [&](int64_t begin, int64_t bytes) {
    Exchange exchange;
    exchange.bytes = static_cast<size_t>(bytes);
    if (is(root)) {
      exchange.send_to = Others();
      LOSSD_RETURN_IF_ERROR(Copy(Room(root), data + begin, bytes, stream));
      return Launch(std::move(exchange), stream);
    }
    exchange.receive_from = {root};
    LOSSD_RETURN_IF_ERROR(Launch(std::move(exchange), stream));
    return Copy(data + begin, Room(root), bytes, stream);
  });
}

absl::Status HostCollectives::SumOfAll(const Part& part, int64_t floats) {
  auto* const data = static_cast<uint8_t*>(part.data);
  const cudaStream_t stream = part.stream;
  return ForPieces(floats * static_cast<int64_t>(sizeof(float)), [&](int64_t begin, int64_t bytes) {
    Exchange exchange;
    exchange.bytes = static_cast<size_t>(bytes);
    exchange.send_to = exchange.receive_from = Others();
    exchange.sums = true;
    LOSSD_RETURN_IF_ERROR(Copy(Room(first_member()), data + begin, bytes, stream));
    LOSSD_RETURN_IF_ERROR(Launch(std::move(exchange), stream));
    return Copy(data + begin, Room(first_member()), bytes, stream);
  });
}

// A piece begins at the same byte in every rank's data, so the piece of rank i goes to all + i * bytes +
// begin.
absl::Status HostCollectives::Gather(const Part& part, const void* own, int64_t bytes) {
  auto* const all = static_cast<uint8_t*>(part.data);
  const cudaStream_t stream = part.stream;
  return ForPieces(bytes, [&](int64_t begin, int64_t n) -> absl::Status {
    Exchange exchange;
    exchange.bytes = static_cast<size_t>(n);
    exchange.send_to = exchange.receive_from = Others();
    LOSSD_RETURN_IF_ERROR(Copy(Room(first_member()), static_cast<const uint8_t*>(own) + begin, n, stream));
    LOSSD_RETURN_IF_ERROR(Launch(std::move(exchange), stream));
    for (int member = 0; member < members(); ++member) {
      LOSSD_RETURN_IF_ERROR(Copy(all + member * bytes + begin, Room(member), n, stream));
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

absl::Status HostCollectives::Wait(const std::vector<Part>& parts) {
  const absl::Status status = ToStatus(cudaStreamSynchronize(parts.front().stream), "cudaStreamSynchronize");
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
