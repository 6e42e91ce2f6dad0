// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/region_source.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"

namespace lossd::client {
namespace internal {
namespace {

constexpr absl::Duration kSocketPatience = absl::Seconds(5);  // with the region socket

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
  std::shared_ptr<SharedRegion> old;  // is unmapped without the lock
  {
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
    // Where no call uses it, the server gets it back first: it may have no room for both.
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
  // A server that gives less than it was asked for is not asked again with each call.
  const bool is_enough = opened.ok() && (*opened)->size() >= bytes;
  if (!is_enough) {
    next_growth_ = clocks::SteadyNow() + growth_pause_;
    growth_pause_ = std::min(2 * growth_pause_, pauses_.most_growth);
  } else {
    growth_pause_ = pauses_.most;
  }
  if (region_ != nullptr && region_->usable()) {  // which a larger one was wanted for
    if (!opened.ok() || (*opened)->size() <= bytes_before) return opened.ok() ? *std::move(opened) : nullptr;
    return std::exchange(region_, *std::move(opened));  // calls that use the other one keep it
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

void RegionSource::DropUnusable() {
  std::shared_ptr<SharedRegion> dropped;  // is unmapped without the lock
  absl::MutexLock lock(&mu_);
  if (region_ != nullptr && !region_->usable()) dropped = Drop();
}

std::shared_ptr<SharedRegion> RegionSource::Drop() {
  if (region_ == nullptr) return nullptr;
  const bool refused = region_->refused();
  // Once it is a server that has been restarted. If it does not know the next one either, the socket leads to
  // another server.
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
    absl::StatusOr<std::string> told = ask_();
    if (!told.ok()) return told.status();
    *socket = *std::move(told);
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

}  // namespace internal

std::string TransportFromEnvironment() {
  const char* const value = std::getenv("LOSSD_TRANSPORT");
  return value == nullptr || *value == '\0' ? "auto" : value;
}

}  // namespace lossd::client
