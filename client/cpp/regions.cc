// SPDX-License-Identifier: Apache-2.0
// Shared memory on the client's side (regions.h): one region, the source of regions, and the regions of GPUs.
//
// A RegionSource has at most one region for new calls. It opens the region for the first call that wants one,
// and replaces it by a larger one when calls are larger or find no room in it (crowded). It drops a region
// that is not usable: the server has closed the session, or a call has failed while the server may still
// write to the region (Retire). Calls that use an old region keep it. After each failure to open a region it
// waits before it tries again, longer each time (Pause).
#include "client/cpp/regions.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/cuda_driver.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"

namespace lossd::client::internal {
namespace {

absl::Status NoRegion(absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("no shared memory: ", why));
}

uint64_t Aligned(uint64_t bytes) {
  constexpr uint64_t kUnit = SharedRegion::kAlignment;
  return (bytes + kUnit - 1) / kUnit * kUnit;
}

absl::StatusOr<wire::RegionPacket> AwaitPacket(int socket, absl::Duration timeout) {
  const absl::Time end = clocks::SteadyNow() + timeout;
  pollfd ready = {.fd = socket, .events = POLLIN};
  int result = 0;
  do {
    const absl::Duration left = std::max(end - clocks::SteadyNow(), absl::ZeroDuration());
    result = poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(left)));
  } while (result < 0 && errno == EINTR);
  if (result == 0) return NoRegion("the server does not answer on its socket");
  if (result < 0) return NoRegion(std::strerror(errno));
  return wire::ReceiveRegionPacket(socket);
}

// Whether the memory can never shrink below `bytes`, so that no access can fail.
bool IsSealed(int descriptor, uint64_t bytes) {
  struct stat status = {};
  const int seals = fcntl(descriptor, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(descriptor, &status) == 0 &&
         static_cast<uint64_t>(status.st_size) >= bytes;
}

// The GPU with this UUID; nullopt for an empty UUID, which means the host.
absl::StatusOr<std::optional<int>> FindGpu(const std::string& uuid) {
  if (uuid.empty()) return std::nullopt;
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return NoRegion(driver.status().message());
  const absl::StatusOr<std::optional<int>> gpu = (*driver)->Find(uuid);
  if (!gpu.ok()) return NoRegion(gpu.status().message());
  if (!gpu->has_value())
    return NoRegion(absl::StrCat("the server's GPU is ", uuid, ", which this process does not see"));
  return *gpu;
}

absl::string_view OwnerOf(absl::string_view uuid) { return uuid.empty() ? "the host" : uuid; }

// Maps the memory into this process.
absl::StatusOr<uint8_t*> MapOnHost(int descriptor, uint64_t bytes) {
  if (!IsSealed(descriptor, bytes))
    return NoRegion("what the server sent is not sealed memory of the size it says");
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  if (data == MAP_FAILED) return NoRegion(std::strerror(errno));
  madvise(data, bytes, MADV_DONTFORK);
  return static_cast<uint8_t*>(data);
}

absl::StatusOr<uint8_t*> MapOnGpu(int descriptor, uint64_t bytes, int gpu) {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return NoRegion(driver.status().message());
  const absl::StatusOr<uint8_t*> data = (*driver)->Import(descriptor, bytes, gpu);
  if (!data.ok()) return NoRegion(data.status().message());
  return data;
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Open(const std::string& socket, uint64_t bytes,
                                                                 absl::Duration timeout,
                                                                 const std::string& device) {
  LOSSD_TRY(const std::optional<int> gpu, FindGpu(device));
  absl::StatusOr<wire::OwnedDescriptor> session = wire::ConnectRegionSocket(socket);
  if (!session.ok()) return NoRegion(session.status().message());
  v1::RegionRequest request;
  request.set_bytes(bytes);
  request.set_of_device(!device.empty());
  request.set_device(device);
  const absl::Status sent = wire::SendRegionPacket(session->get(), request.SerializeAsString(), -1);
  // A server that refuses may have closed its end already, so sending may fail. Its reason can still be read.
  absl::StatusOr<wire::RegionPacket> packet = AwaitPacket(session->get(), timeout);
  if (!packet.ok()) return sent.ok() ? NoRegion(packet.status().message()) : NoRegion(sent.message());
  if (packet->closed) return NoRegion("the server has closed the session");
  const absl::StatusOr<v1::RegionAnswer> answer = wire::ParseRegionAnswer(packet->bytes);
  if (!answer.ok()) return NoRegion(answer.status().message());
  if (answer->has_refused()) return NoRegion(answer->refused().reason());
  if (!packet->descriptor) return NoRegion("the server sent no memory");
  if (answer->opened().device() != device)
    return NoRegion(absl::StrCat("the server gives memory of ", OwnerOf(answer->opened().device()),
                                 ", not of ", OwnerOf(device)));
  const uint64_t size = answer->opened().bytes();
  const int descriptor = packet->descriptor.get();
  LOSSD_TRY(uint8_t* const data,
            gpu.has_value() ? MapOnGpu(descriptor, size, *gpu) : MapOnHost(descriptor, size));
  return std::shared_ptr<SharedRegion>(
      new SharedRegion(*std::move(session), answer->opened().id(), data, size, gpu));
}

SharedRegion::SharedRegion(wire::OwnedDescriptor socket, std::string id, uint8_t* data, uint64_t size,
                           std::optional<int> gpu)
    : socket_(std::move(socket)),
      id_(std::move(id)),
      data_(data),
      size_(size),
      gpu_(gpu),
      process_(getpid()) {}

SharedRegion::~SharedRegion() {
  if (getpid() != process_) return;  // a forked child does not have the mapping
  if (gpu_.has_value()) {
    if (const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get(); driver.ok())
      (*driver)->Unmap(data_, size_, *gpu_);
  } else {
    Unpin();
    munmap(data_, size_);
  }
  // A forked child may have inherited the socket; then closing it here would not end the session.
  shutdown(socket_.get(), SHUT_RDWR);
}

void SharedRegion::PinFor(int gpu) {
  if (gpu_.has_value()) return;
  absl::MutexLock lock(&pin_mu_);
  if (pinned_for_.has_value() || !pin_problem_.ok()) return;
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  pin_problem_ = driver.ok() ? (*driver)->Pin(data_, size_, gpu) : driver.status();
  if (pin_problem_.ok()) pinned_for_ = gpu;
}

absl::Status SharedRegion::pin_problem() const {
  absl::MutexLock lock(&pin_mu_);
  return pin_problem_;
}

void SharedRegion::Unpin() {
  absl::MutexLock lock(&pin_mu_);
  if (!pinned_for_.has_value()) return;
  if (const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get(); driver.ok())
    (*driver)->Unpin(data_, *pinned_for_);
  pinned_for_ = std::nullopt;
}

std::optional<uint64_t> SharedRegion::Find(uint64_t bytes) const {
  uint64_t begin = 0;
  for (const auto& [offset, end] : taken_) {
    if (offset - begin >= bytes) break;
    begin = end;
  }
  if (begin > size_ || size_ - begin < bytes) return std::nullopt;
  return begin;
}

std::optional<uint64_t> SharedRegion::Take(uint64_t bytes) {
  const uint64_t whole = Aligned(bytes);
  absl::MutexLock lock(&mu_);
  const std::optional<uint64_t> begin = Find(whole);
  if (begin.has_value()) {
    taken_[*begin] = *begin + whole;
  } else {
    crowded_ = true;
  }
  return begin;
}

void SharedRegion::Give(uint64_t offset) {
  absl::MutexLock lock(&mu_);
  taken_.erase(offset);
  for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
    const bool fits = Find(waiter->second.bytes).has_value();
    if (fits) waiter->second.freed();
    waiter = fits ? waiters_.erase(waiter) : std::next(waiter);
  }
}

bool SharedRegion::Await(uint64_t bytes, const void* waiter, absl::AnyInvocable<void()> freed) {
  const uint64_t whole = Aligned(bytes);
  absl::MutexLock lock(&mu_);
  waiters_.erase(waiter);
  if (whole > size_ || retired_) return false;
  if (Find(whole).has_value()) {
    freed();
  } else {
    waiters_.emplace(waiter, Waiter{whole, std::move(freed)});
  }
  return true;
}

void SharedRegion::StopWaiting(const void* waiter) {
  absl::MutexLock lock(&mu_);
  waiters_.erase(waiter);
}

int SharedRegion::waiting() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int>(waiters_.size());
}

void SharedRegion::Retire() {
  absl::MutexLock lock(&mu_);
  retired_ = true;
  for (auto& [key, waiter] : waiters_) waiter.freed();
  waiters_.clear();
}

void SharedRegion::AfterFailure(const absl::Status& error, bool holds) {
  const std::optional<v1::ErrorDetail> detail = ErrorDetailOf(error);
  if (absl::IsUnavailable(error) && detail.has_value() && absl::EndsWith(detail->field(), "region")) {
    refused_ = true;
  }
  if (holds || absl::IsUnavailable(error)) Retire();
}

bool SharedRegion::usable() const {
  if (retired_ || getpid() != process_) return false;
  char byte = 0;
  const ssize_t received = recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);  // no data, and not closed
}

// ---- RegionSource ----

namespace {

constexpr absl::Duration kSocketPatience = absl::Seconds(5);  // the longest wait for the region socket

}  // namespace

RegionSource::RegionSource(std::string transport, RegionSizes sizes, std::string socket, AskFn ask,
                           RegionPauses pauses, std::string device)
    : transport_(std::move(transport)),
      sizes_(sizes),
      pauses_(pauses),
      device_(std::move(device)),
      ask_(std::move(ask)),
      socket_(std::move(socket)),
      growth_pause_(pauses.most),
      pause_(pauses.first) {}

absl::Status RegionSource::Check() {
  if (transport_ == "auto" || transport_ == "grpc" || Get() != nullptr) return absl::OkStatus();
  absl::MutexLock lock(&mu_);
  return problem_;
}

std::shared_ptr<SharedRegion> RegionSource::Get(uint64_t call_bytes) {
  if (transport_ == "grpc") return nullptr;
  bool ask = false;
  uint64_t bytes = 0;
  uint64_t bytes_before = 0;
  std::string socket;
  std::shared_ptr<SharedRegion> old;  // unmapped without the lock
  {
    // While the first region is being opened, calls wait for it. Later, calls use what there is while another
    // thread opens a region.
    const auto tried = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return tried_ || !opening_; };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&tried));
    const bool usable = region_ != nullptr && region_->usable();
    if (!usable) old = Drop();
    bytes = Wanted(call_bytes);
    if (opening_ || (usable && bytes <= region_->size()) ||
        clocks::SteadyNow() < (usable ? next_growth_ : next_try_)) {
      return region_;
    }
    opening_ = true;
    ask = tried_ && !usable;  // the server may be another process by now
    socket = socket_;
    bytes_before = usable ? region_->size() : 0;
    // If no call uses the region, it is given back before the larger one is opened: the server may have no
    // room for both.
    if (usable && region_.use_count() == 1) old = std::move(region_);
  }
  old = nullptr;
  absl::StatusOr<std::shared_ptr<SharedRegion>> region = Open(bytes, ask, &socket);
  absl::MutexLock lock(&mu_);
  opening_ = false;
  tried_ = true;
  socket_ = std::move(socket);
  old = Take(std::move(region), bytes, bytes_before);
  return region_;
}

uint64_t RegionSource::Wanted(uint64_t call_bytes) const {
  const uint64_t wanted = WantedRegion(call_bytes, sizes_);
  if (region_ == nullptr || !region_->crowded()) return wanted;
  return std::max(wanted, std::min(sizes_.most, kRegionGrowth * region_->size()));
}

std::shared_ptr<SharedRegion> RegionSource::Take(absl::StatusOr<std::shared_ptr<SharedRegion>> opened,
                                                 uint64_t bytes, uint64_t bytes_before) {
  // If the server gives less than the client asked for, later calls do not ask again at once.
  const bool is_enough = opened.ok() && (*opened)->size() >= bytes;
  if (!is_enough) {
    next_growth_ = clocks::SteadyNow() + growth_pause_;
    growth_pause_ = std::min(2 * growth_pause_, pauses_.most_growth);
  } else {
    growth_pause_ = pauses_.most;
  }
  if (region_ != nullptr && region_->usable()) {  // a larger region was wanted in its place
    if (!opened.ok() || (*opened)->size() <= bytes_before) return opened.ok() ? *std::move(opened) : nullptr;
    return std::exchange(region_, *std::move(opened));  // calls that use the old region keep it
  }
  std::shared_ptr<SharedRegion> old = Drop();
  problem_ = opened.status();
  if (!opened.ok()) {
    Pause();
    return old;
  }
  region_ = *std::move(opened);
  if (!refused_) pause_ = pauses_.first;
  return old;
}

bool RegionSource::IsOpen() const {
  absl::MutexLock lock(&mu_);
  return region_ != nullptr && region_->usable();
}

void RegionSource::DropUnusable() {
  std::shared_ptr<SharedRegion> dropped;  // unmapped without the lock
  absl::MutexLock lock(&mu_);
  if (region_ != nullptr && !region_->usable()) dropped = Drop();
}

std::shared_ptr<SharedRegion> RegionSource::Drop() {
  if (region_ == nullptr) return nullptr;
  const bool refused = region_->refused();
  // If the server refuses one region, it has probably been restarted. If it refuses the next region too, the
  // socket belongs to another server.
  if (refused && refused_) {
    problem_ = absl::UnavailableError("no shared memory: the server does not know the regions of its socket");
    Pause();
  }
  refused_ = refused;
  return std::exchange(region_, nullptr);
}

void RegionSource::Pause() {
  next_try_ = clocks::SteadyNow() + pause_;
  pause_ = std::min(2 * pause_, pauses_.most);
}

absl::StatusOr<std::shared_ptr<SharedRegion>> RegionSource::Open(uint64_t bytes, bool ask,
                                                                 std::string* socket) {
  if (ask) {
    LOSSD_TRY(*socket, ask_());
  }
  if (socket->empty()) return absl::UnavailableError("no shared memory: the server offers none");
  return SharedRegion::Open(*socket, bytes, kSocketPatience, device_);
}

TransportChoice RegionSource::choice() const {
  if (transport_ == "grpc") return {"grpc", "the client was told so"};
  absl::MutexLock lock(&mu_);
  if (region_ != nullptr && !device_.empty())
    return {"cuda_ipc",
            absl::StrCat("the server's GPU is of this host; ", region_->size() >> 20, " MiB of ", device_)};
  if (region_ != nullptr) {
    const absl::Status refused = region_->pin_problem();
    return {"shared_memory",
            absl::StrCat("the server is on this host; ", region_->size() >> 20, " MiB",
                         refused.ok() ? "" : "; GPUs copy to it by a detour: ", refused.message())};
  }
  if (opening_) return {"grpc", "the shared memory is being opened"};
  if (!tried_) return {"grpc", "nothing was sent yet"};
  if (problem_.ok())
    return {"grpc", "the shared memory was given up after a call that failed; later ones get other"};
  return {"grpc", absl::StrCat(problem_.message(), "; tried again from time to time")};
}

// ---- DeviceRegions ----

namespace {

// Why rows on any GPU travel as rows in host memory do.
std::string WhyNone(const std::string& transport, const v1::ServerDescription& server) {
  if (transport != "auto" && transport != "cuda_ipc") return absl::StrCat("the transport is ", transport);
  return absl::StrCat("the server shares no memory of a GPU",
                      server.ranks().empty() ? "" : ", as it has several processes");
}

}  // namespace

std::vector<std::string> SharingDevicesOf(const v1::ServerDescription& server) {
  if (!server.region_devices().empty())
    return {server.region_devices().begin(), server.region_devices().end()};
  if (server.region_device().empty()) return {};
  return {server.region_device()};  // an older server, which names one GPU only
}

DeviceRegions::DeviceRegions(const std::string& transport, RegionSizes sizes,
                             const v1::ServerDescription& server, AskFn ask)
    : transport_(transport), why_none_(WhyNone(transport, server)) {
  if (transport != "auto" && transport != "cuda_ipc") return;
  for (const std::string& device : SharingDevicesOf(server)) {
    gpus_.push_back({device, std::make_unique<RegionSource>(
                                 transport, sizes, server.region_socket(),
                                 [ask, device] { return ask(device); }, RegionPauses(), device)});
  }
}

absl::Status DeviceRegions::Check(std::optional<int> gpu) {
  if (transport_ != "cuda_ipc") return absl::OkStatus();
  if (gpus_.empty()) return absl::UnavailableError(absl::StrCat("no CUDA IPC: ", why_none_));
  const Gpu* chosen = nullptr;
  if (const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get(); driver.ok()) {
    const std::optional<int> wanted = gpu.has_value() ? gpu : (*driver)->Current();
    for (const Gpu& of_server : gpus_) {
      const absl::StatusOr<std::optional<int>> seen = (*driver)->Find(of_server.uuid);
      if (!seen.ok() || !seen->has_value()) continue;
      if (chosen == nullptr || *seen == wanted) chosen = &of_server;
    }
    if (chosen == nullptr && gpus_.size() > 1)
      return absl::UnavailableError(absl::StrCat("no shared memory: the server's GPUs are ", Names(),
                                                 ", none of which this process sees"));
  }
  if (chosen == nullptr) chosen = &gpus_.front();
  {
    absl::MutexLock lock(&mu_);
    checked_ = chosen->regions.get();
  }
  return chosen->regions->Check();
}

std::shared_ptr<SharedRegion> DeviceRegions::Get(int gpu, uint64_t call_bytes) {
  if (gpus_.empty()) return nullptr;
  RegionSource* regions = nullptr;
  {
    absl::MutexLock lock(&mu_);
    Route& route = routes_[gpu];
    if (route.regions == nullptr) route = RouteOf(gpu);  // the driver may have become available
    regions = route.regions;
  }
  return regions == nullptr ? nullptr : regions->Get(call_bytes);
}

bool DeviceRegions::IsOpen(int gpu) const {
  absl::MutexLock lock(&mu_);
  const auto route = routes_.find(gpu);
  return route != routes_.end() && route->second.regions != nullptr && route->second.regions->IsOpen();
}

std::shared_ptr<SharedRegion> DeviceRegions::GetAny() {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return nullptr;
  for (const Gpu& gpu : gpus_) {
    const absl::StatusOr<std::optional<int>> seen = (*driver)->Find(gpu.uuid);
    if (seen.ok() && seen->has_value()) return gpu.regions->Get();
  }
  return nullptr;
}

DeviceRegions::Route DeviceRegions::RouteOf(int gpu) const {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  const absl::StatusOr<std::string> uuid =
      driver.ok() ? (*driver)->UuidOf(gpu) : absl::StatusOr<std::string>(driver.status());
  if (!uuid.ok()) return {absl::StrCat("GPU ", gpu), nullptr, std::string(uuid.status().message())};
  for (const Gpu& of_server : gpus_) {
    if (of_server.uuid == *uuid) return {*uuid, of_server.regions.get(), ""};
  }
  if (transport_ == "cuda_ipc") return {*uuid, NearestTo(gpu), ""};
  return {*uuid, nullptr,
          absl::StrCat("the rows are on ", *uuid, ", and the server's ",
                       gpus_.size() == 1 ? "GPU is " : "GPUs are ", Names())};
}

RegionSource* DeviceRegions::NearestTo(int gpu) const {
  // The server's GPUs at the least distance. GPUs that cannot be reached directly (no distance) count only if
  // there are no others.
  std::vector<RegionSource*> nearest;
  std::optional<int> distance;
  for (const Gpu& of_server : gpus_) {
    const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
    if (!driver.ok()) break;
    const absl::StatusOr<std::optional<int>> seen = (*driver)->Find(of_server.uuid);
    if (!seen.ok() || !seen->has_value()) continue;
    const std::optional<int> here = (*driver)->Distance(gpu, **seen);
    const bool nearer = here.has_value() && (!distance.has_value() || *here < *distance);
    if (nearer) nearest.clear();
    if (nearest.empty() || here == distance) nearest.push_back(of_server.regions.get());
    if (nearer) distance = here;
  }
  if (nearest.empty()) return gpus_.front().regions.get();    // its error says why there is no region
  return nearest[static_cast<size_t>(gpu) % nearest.size()];  // different GPUs take different ones
}

void DeviceRegions::DropUnusable() {
  for (const Gpu& gpu : gpus_) gpu.regions->DropUnusable();
}

DeviceTransportChoice DeviceRegions::choice(absl::string_view of_host) const {
  // Without a region of the GPU, its rows travel as rows in host memory do.
  const auto way = [&](const Route& route) -> DeviceTransportChoice {
    if (route.regions == nullptr) return {std::string(of_host), route.reason};
    const TransportChoice made = route.regions->choice();
    return {made.transport == "cuda_ipc" ? made.transport : std::string(of_host), made.reason};
  };
  if (gpus_.empty()) return {std::string(of_host), why_none_};
  absl::MutexLock lock(&mu_);
  if (routes_.empty()) return way({.regions = checked_, .reason = "nothing was sent yet"});
  if (routes_.size() == 1) return way(routes_.begin()->second);
  DeviceTransportChoice all{"cuda_ipc", ""};
  for (const auto& [gpu, route] : routes_) {
    const DeviceTransportChoice one = way(route);
    if (one.transport != "cuda_ipc") all.transport = one.transport;
    absl::StrAppend(&all.reason, all.reason.empty() ? "" : "; ", "rows on ", route.rows, ": ", one.transport,
                    ", ", one.reason);
  }
  return all;
}

std::string DeviceRegions::Names() const {
  return absl::StrJoin(gpus_, ", ", [](std::string* out, const Gpu& gpu) { absl::StrAppend(out, gpu.uuid); });
}

}  // namespace lossd::client::internal
