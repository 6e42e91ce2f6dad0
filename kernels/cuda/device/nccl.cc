// SPDX-License-Identifier: Apache-2.0
// Nccl (collectives.h): sums and copies among GPUs by NCCL.
#include <nccl.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/cuda/device/collectives.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/device_choice.h"

namespace lossd::kernels::cuda {
namespace {

// Where NCCL may be installed, in order: the loader's search path, then the usual places of packages.
constexpr const char* kNcclFiles[] = {"libnccl.so.2", "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
                                      "/usr/local/cuda/lib64/libnccl.so.2", "/usr/local/lib/libnccl.so.2"};

// How often a thread that waits for an event asks the communicators for their errors.
constexpr absl::Duration kErrorsEvery = absl::Milliseconds(100);

absl::Status Late(absl::Duration timeout, int device, absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("an exchange among the GPUs has not ended within ",
                                             absl::FormatDuration(timeout), ": GPU ", device, what));
}

// MakeLinks runs exchanges of growing sizes. The largest has kScratchBytes for all members together; each is
// at most kLinkStep times as large as the one before. NCCL chooses by the size how it exchanges.
constexpr int64_t kScratchBytes = int64_t{64} << 20;
constexpr int64_t kLinkStep = 64;

ncclDataType_t ToNccl(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kBFloat16:
      return ncclBfloat16;
  }
  return ncclFloat32;
}

}  // namespace

// The functions of NCCL that we call, and the communicators.
struct Nccl::Library {
  SharedLibrary file;
  decltype(&ncclGetVersion) version = nullptr;
  decltype(&ncclCommInitAll) init_all = nullptr;
  decltype(&ncclGetUniqueId) unique_id = nullptr;
  decltype(&ncclCommInitRank) init_rank = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclReduce) reduce = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  std::vector<ncclComm_t> communicators;

  ~Library() { End(destroy); }

  // Ends the communicators, by ncclCommDestroy or ncclCommAbort. Communicators of one process use each
  // other's memory, which is freed when the last of them ends. Within a group NCCL tells all communicators
  // before it frees memory of any, and works on threads of its own. No other thread may be inside a call of
  // NCCL.
  void End(ncclResult_t (*end)(ncclComm_t)) {
    if (communicators.empty()) return;
    int device = 0;
    const bool has_device = cudaGetDevice(&device) == cudaSuccess;
    const bool grouped = group_start() == ncclSuccess;
    for (ncclComm_t communicator : std::exchange(communicators, {})) end(communicator);
    if (grouped) group_end();
    if (has_device) cudaSetDevice(device);  // NCCL below 2.27.6 changes the device
  }

  absl::Status Load() {
    SetNcclDefaults();
    LOSSD_RETURN_IF_ERROR(
        file.Load(kNcclFiles, "several GPUs need NCCL (package libnccl2), which cannot be loaded"));
    const bool complete =
        file.Find("ncclGetVersion", version) && file.Find("ncclCommInitAll", init_all) &&
        file.Find("ncclGetUniqueId", unique_id) && file.Find("ncclCommInitRank", init_rank) &&
        file.Find("ncclCommDestroy", destroy) && file.Find("ncclCommAbort", abort) &&
        file.Find("ncclCommGetAsyncError", async_error) && file.Find("ncclGetErrorString", error_string) &&
        file.Find("ncclGroupStart", group_start) && file.Find("ncclGroupEnd", group_end) &&
        file.Find("ncclReduce", reduce) && file.Find("ncclBroadcast", broadcast) &&
        file.Find("ncclAllReduce", all_reduce) && file.Find("ncclAllGather", all_gather) &&
        file.Find("ncclReduceScatter", reduce_scatter);
    if (!complete) return absl::UnavailableError(absl::StrCat("NCCL lacks ", dlerror()));
    // NCCL has threads of its own, which outlive communicators, and it keeps state of every thread that has
    // called it.
    file.KeepLoaded();
    return absl::OkStatus();
  }

  absl::Status Check(int result, const char* call) const {
    if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat(call, " failed: ", error_string(static_cast<ncclResult_t>(result))));
  }

  // As the functions of Collectives with the same names, but without a check for earlier failures.
  absl::Status SumOfAll(const Part& part, int64_t floats) const {
    return Check(all_reduce(part.data, part.data, static_cast<size_t>(floats), ncclFloat32, ncclSum, Of(part),
                            part.stream),
                 "ncclAllReduce");
  }
  absl::Status Gather(const Part& part, const void* own, int64_t bytes) const {
    return Check(all_gather(own, part.data, static_cast<size_t>(bytes), ncclUint8, Of(part), part.stream),
                 "ncclAllGather");
  }
  // Place `place` of data [members, floats] becomes the sum over all members.
  absl::Status SumPlace(const Part& part, int place, int64_t floats) const {
    return Check(reduce_scatter(part.data, static_cast<float*>(part.data) + place * floats,
                                static_cast<size_t>(floats), ncclFloat32, ncclSum, Of(part), part.stream),
                 "ncclReduceScatter");
  }
  ncclComm_t Of(const Part& part) const { return communicators[static_cast<size_t>(part.local)]; }
};

Nccl::Nccl(std::vector<int> devices, Replica replica, absl::Duration timeout)
    : devices_(std::move(devices)),
      replica_(replica),
      timeout_(timeout),
      library_(std::make_unique<Library>()) {
  for (const int device : devices_) waiters_.push_back(std::make_unique<EventWaiter>(device));
  if (!devices_.empty()) {
    watch_.emplace(timeout, [this] {
      Abort(absl::UnavailableError(absl::StrCat("an exchange among the GPUs has not ended within ",
                                                absl::FormatDuration(timeout_),
                                                ": a thread waits for its GPU, which waits for the others")))
          .IgnoreError();
    });
  }
}

Nccl::~Nccl() = default;

absl::StatusOr<std::unique_ptr<Nccl>> Nccl::Connect(std::vector<int> devices, absl::Duration timeout) {
  const auto count = static_cast<int>(devices.size());
  std::unique_ptr<Nccl> nccl(new Nccl(std::move(devices), {0, count}, timeout));
  LOSSD_RETURN_IF_ERROR(nccl->library_->Load());
  std::vector<ncclComm_t> communicators(nccl->devices_.size());
  LOSSD_RETURN_IF_ERROR(nccl->library_->Check(
      nccl->library_->init_all(communicators.data(), count, nccl->devices_.data()), "ncclCommInitAll"));
  nccl->library_->communicators = std::move(communicators);
  return nccl;
}

// Needs no communicator, only the library, so the object has no GPUs. The same holds for CheckLoads and
// Version.
absl::StatusOr<std::string> Nccl::NewId() {
  const Nccl nccl({}, Replica(), kTimeout);
  LOSSD_RETURN_IF_ERROR(nccl.library_->Load());
  ncclUniqueId id;
  LOSSD_RETURN_IF_ERROR(nccl.library_->Check(nccl.library_->unique_id(&id), "ncclGetUniqueId"));
  return std::string(id.internal, sizeof(id.internal));
}

absl::Status Nccl::CheckLoads() { return Nccl({}, Replica(), kTimeout).library_->Load(); }

absl::StatusOr<std::string> Nccl::Version() {
  const Nccl nccl({}, Replica(), kTimeout);
  LOSSD_RETURN_IF_ERROR(nccl.library_->Load());
  int code = 0;
  LOSSD_RETURN_IF_ERROR(nccl.library_->Check(nccl.library_->version(&code), "ncclGetVersion"));
  // The code of NCCL 2.9 and later: major * 10000 + minor * 100 + patch.
  return absl::StrCat(code / 10000, ".", code / 100 % 100, ".", code % 100);
}

// One attempt to join. The thread that joins shares it, and may go on after the caller has given up waiting.
struct Nccl::Joining {
  std::unique_ptr<Nccl> nccl;  // used by the thread alone until `done`
  absl::Mutex mutex;
  bool done ABSL_GUARDED_BY(mutex) = false;
  bool given_up ABSL_GUARDED_BY(mutex) = false;
  absl::Status status ABSL_GUARDED_BY(mutex);
};

absl::Status Nccl::MakeCommunicator(const std::string& id) {
  ncclUniqueId unique;
  std::copy(id.begin(), id.end(), unique.internal);
  LOSSD_RETURN_IF_CUDA_ERROR(cudaSetDevice(devices_.front()), "cudaSetDevice");
  ncclComm_t communicator = nullptr;
  LOSSD_RETURN_IF_ERROR(library_->Check(
      library_->init_rank(&communicator, replica_.count, unique, replica_.index), "ncclCommInitRank"));
  library_->communicators = {communicator};
  return absl::OkStatus();
}

namespace {

// Memory and a stream for the exchanges of MakeLinks.
struct Scratch {
  void* data = nullptr;
  cudaStream_t stream = nullptr;

  ~Scratch() {
    if (stream != nullptr) cudaStreamDestroy(stream);
    if (data != nullptr) cudaFree(data);
  }
  absl::Status Allocate(int64_t bytes) {
    LOSSD_RETURN_IF_CUDA_ERROR(cudaMalloc(&data, static_cast<size_t>(bytes)), "cudaMalloc");
    return ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
};

}  // namespace

// ncclCommInitRank waits for all processes and has no time limit. So a thread of its own calls it, and if
// that thread does not return in time it is left behind with the object.
absl::StatusOr<std::unique_ptr<Nccl>> Nccl::Join(int device, Replica replica, const std::string& id,
                                                 absl::Duration timeout) {
  if (id.size() != sizeof(ncclUniqueId::internal)) {
    return absl::InternalError(absl::StrCat("an id of NCCL with ", id.size(), " bytes"));
  }
  const auto joining = std::make_shared<Joining>();
  joining->nccl.reset(new Nccl({device}, replica, timeout));
  LOSSD_RETURN_IF_ERROR(joining->nccl->library_->Load());
  std::thread([joining, id] {
    absl::Status status = joining->nccl->MakeCommunicator(id);
    bool given_up = false;
    {
      absl::MutexLock lock(&joining->mutex);
      given_up = joining->given_up;
    }
    if (status.ok() && !given_up) status = joining->nccl->MakeLinks();
    absl::MutexLock lock(&joining->mutex);
    joining->status = std::move(status);
    joining->done = true;
  }).detach();
  absl::MutexLock lock(&joining->mutex);
  if (!clocks::AwaitFor(joining->mutex, absl::Condition(&joining->done), timeout)) {
    joining->given_up = true;
    return absl::UnavailableError(absl::StrCat("NCCL has not connected rank ", replica.index, " of ",
                                               replica.count, " within ", absl::FormatDuration(timeout)));
  }
  LOSSD_RETURN_IF_ERROR(joining->status);
  return std::move(joining->nccl);
}

absl::Status Nccl::MakeLinks() {
  std::vector<Scratch> scratch(devices_.size());
  std::vector<Part> parts;
  for (size_t i = 0; i < devices_.size(); ++i) {
    LOSSD_RETURN_IF_CUDA_ERROR(cudaSetDevice(devices_[i]), "cudaSetDevice");
    LOSSD_RETURN_IF_ERROR(scratch[i].Allocate(kScratchBytes));
    parts.push_back({static_cast<int>(i), scratch[i].data, scratch[i].stream});
  }
  return MakeLinks(parts, kScratchBytes / static_cast<int64_t>(sizeof(float)) / members());
}

absl::Status Nccl::Watched(absl::FunctionRef<absl::Status()> enqueue) {
  const auto watching = watch_->During();
  return enqueue();
}

absl::Status Nccl::Abort(absl::Status reason) {
  absl::MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  failure_ = std::move(reason);
  // NCCL restores the current device of the calling thread, which makes a context on that device: on GPU 0 if
  // the thread has never chosen one. So a thread that has chosen one of the GPUs ends the communicators.
  std::thread([this] {
    if (!devices_.empty()) cudaSetDevice(devices_.front());
    library_->End(library_->abort);
  }).join();
  return failure_;
}

absl::Status Nccl::failure() const {
  absl::ReaderMutexLock lock(&mutex_);
  return failure_;
}

absl::Status Nccl::WhileAlive(absl::FunctionRef<absl::Status()> fn) {
  absl::ReaderMutexLock lock(&mutex_);
  return failure_.ok() ? fn() : failure_;
}

absl::Status Nccl::Sum(const std::vector<Part>& parts, int64_t floats, int root) {
  for (const Part& part : parts) {
    LOSSD_RETURN_IF_ERROR(library_->Check(
        library_->reduce(part.data, part.data, static_cast<size_t>(floats), ncclFloat32, ncclSum, root,
                         library_->communicators[static_cast<size_t>(part.local)], part.stream),
        "ncclReduce"));
  }
  return absl::OkStatus();
}

absl::Status Nccl::Spread(const std::vector<Part>& parts, DType dtype, int64_t count, int root) {
  for (const Part& part : parts) {
    LOSSD_RETURN_IF_ERROR(library_->Check(
        library_->broadcast(part.data, part.data, static_cast<size_t>(count), ToNccl(dtype), root,
                            library_->communicators[static_cast<size_t>(part.local)], part.stream),
        "ncclBroadcast"));
  }
  return absl::OkStatus();
}

absl::Status Nccl::SumShards(const std::vector<Part>& parts, int64_t floats) {
  for (const Part& part : parts)
    LOSSD_RETURN_IF_ERROR(library_->SumPlace(part, first_member() + part.local, floats));
  return absl::OkStatus();
}

absl::Status Nccl::SpreadShards(const std::vector<Part>& parts, DType dtype, int64_t count) {
  const auto bytes = count * static_cast<int64_t>(SizeOf(dtype));
  for (const Part& part : parts) {
    const auto* const own = static_cast<const uint8_t*>(part.data) + (first_member() + part.local) * bytes;
    LOSSD_RETURN_IF_ERROR(library_->Gather(part, own, bytes));
  }
  return absl::OkStatus();
}

absl::Status Nccl::SumOfAll(const Part& part, int64_t floats) {
  return WhileAlive([&] { return library_->SumOfAll(part, floats); });
}

absl::Status Nccl::Gather(const Part& part, const void* own, int64_t bytes) {
  return WhileAlive([&] { return library_->Gather(part, own, bytes); });
}

absl::Status Nccl::SumPlaces(const Part& part, int64_t floats) {
  return WhileAlive([&] { return library_->SumPlace(part, first_member() + part.local, floats); });
}

absl::Status Nccl::MakeLinks(const std::vector<Part>& parts, int64_t floats) {
  const auto for_each = [&](absl::FunctionRef<absl::Status(const Part&)> call) {
    return Enqueue([&]() -> absl::Status {
      for (const Part& part : parts) LOSSD_RETURN_IF_ERROR(call(part));
      return absl::OkStatus();
    });
  };
  // Each round runs every kind of exchange with n floats a member.
  for (int64_t n = 1;; n = std::min(n * kLinkStep, floats)) {
    LOSSD_RETURN_IF_ERROR(for_each([&](const Part& part) { return library_->SumOfAll(part, n); }));
    LOSSD_RETURN_IF_ERROR(
        for_each([&](const Part& part) { return library_->SumPlace(part, first_member() + part.local, n); }));
    LOSSD_RETURN_IF_ERROR(for_each([&](const Part& part) {
      const float* const own = static_cast<const float*>(part.data) + (first_member() + part.local) * n;
      return library_->Gather(part, own, n * static_cast<int64_t>(sizeof(float)));
    }));
    LOSSD_RETURN_IF_ERROR(Enqueue([&] { return Sum(parts, n, 0); }));
    LOSSD_RETURN_IF_ERROR(Enqueue([&] { return Spread(parts, DType::kFloat32, n, 0); }));
    if (n >= floats) break;
  }
  return Wait(parts);
}

absl::Status Nccl::Enqueue(absl::FunctionRef<absl::Status()> exchange) {
  const auto group = [&]() -> absl::Status {
    LOSSD_RETURN_IF_ERROR(library_->Check(library_->group_start(), "ncclGroupStart"));
    const absl::Status status = exchange();
    // Also ends the group if `exchange` has failed.
    const absl::Status end = library_->Check(library_->group_end(), "ncclGroupEnd");
    return status.ok() ? end : status;
  };
  absl::Status status = WhileAlive(group);
  return status.ok() ? status : Abort(std::move(status));
}

absl::Status Nccl::AsynchronousError() const {
  absl::ReaderMutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  for (ncclComm_t communicator : library_->communicators) {
    ncclResult_t result = ncclSuccess;
    LOSSD_RETURN_IF_ERROR(
        library_->Check(library_->async_error(communicator, &result), "ncclCommGetAsyncError"));
    LOSSD_RETURN_IF_ERROR(library_->Check(result, "an exchange of NCCL"));
  }
  return absl::OkStatus();
}

// After an abort NCCL's kernels end, so the streams continue behind them.
absl::Status Nccl::Wait(const std::vector<Part>& parts, absl::Duration timeout) {
  const absl::Time start = clocks::SteadyNow();
  for (const Part& part : parts) {
    for (;;) {
      LOSSD_RETURN_IF_CUDA_ERROR(cudaSetDevice(devices_[static_cast<size_t>(part.local)]), "cudaSetDevice");
      const cudaError_t state = cudaStreamQuery(part.stream);
      if (state == cudaSuccess) break;
      if (state != cudaErrorNotReady) return Abort(ToStatus(state, "cudaStreamQuery"));
      const absl::Duration waited = clocks::SteadyNow() - start;
      if (absl::Status status = AsynchronousError(); !status.ok()) return Abort(std::move(status));
      if (waited > timeout) {
        return Abort(Late(timeout, devices_[static_cast<size_t>(part.local)], " has not done its part"));
      }
      absl::SleepFor(PauseAfter(waited));
    }
  }
  return failure();
}

absl::Status Nccl::Wait(int local, cudaEvent_t event, absl::Duration timeout) {
  const absl::Time end = clocks::SteadyNow() + timeout;
  const auto look = [&]() -> absl::Status {
    LOSSD_RETURN_IF_ERROR(AsynchronousError());
    if (clocks::SteadyNow() < end) return absl::OkStatus();
    return Late(timeout, devices_[static_cast<size_t>(local)], " waits for the others");
  };
  EventWaiter& waiter = *waiters_[static_cast<size_t>(local)];
  const absl::StatusOr<cudaError_t> happened = waiter.Wait(event, std::min(kErrorsEvery, timeout), look);
  if (!happened.ok()) {
    absl::Status status = Abort(happened.status());
    waiter.Settle();  // the event happens now, after the abort
    return status;
  }
  return *happened == cudaSuccess ? failure() : Abort(ToStatus(*happened, "cudaEventSynchronize"));
}

}  // namespace lossd::kernels::cuda
