// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/region_source.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace lossd::client {
namespace internal {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(5);  // with the region socket

}  // namespace

RegionSource::RegionSource(std::string transport, uint64_t bytes, std::string socket, AskFn ask,
                           RegionPauses pauses, std::string device)
    : transport_(std::move(transport)),
      bytes_(bytes),
      pauses_(pauses),
      device_(std::move(device)),
      ask_(std::move(ask)),
      socket_(std::move(socket)),
      pause_(pauses.first) {}

absl::Status RegionSource::Check() {
  if (transport_ == "auto" || transport_ == "grpc" || Get() != nullptr) return absl::OkStatus();
  absl::MutexLock lock(&mu_);
  return problem_;
}

std::shared_ptr<SharedRegion> RegionSource::Get() {
  if (transport_ == "grpc") return nullptr;
  bool ask = false;
  std::string socket;
  {
    const auto tried = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return tried_ || !opening_; };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&tried));
    if (region_ != nullptr && region_->usable()) return region_;
    Drop();
    if (opening_ || absl::Now() < next_try_) return nullptr;
    opening_ = true;
    ask = tried_;  // the server may be another process by now
    socket = socket_;
  }
  absl::StatusOr<std::shared_ptr<SharedRegion>> region = Open(ask, &socket);
  absl::MutexLock lock(&mu_);
  opening_ = false;
  tried_ = true;
  socket_ = std::move(socket);
  problem_ = region.status();
  if (!region.ok()) {
    Pause();
    return nullptr;
  }
  region_ = *std::move(region);
  if (!refused_) pause_ = pauses_.first;
  return region_;
}

void RegionSource::DropUnusable() {
  absl::MutexLock lock(&mu_);
  if (region_ != nullptr && !region_->usable()) Drop();
}

void RegionSource::Drop() {
  if (region_ == nullptr) return;
  const bool refused = region_->refused();
  region_ = nullptr;
  // Once it is a server that has been restarted. If it does not know the next one either, the socket leads to
  // another server.
  if (refused && refused_) {
    problem_ = absl::UnavailableError("no shared memory: the server does not know the regions of its socket");
    Pause();
  }
  refused_ = refused;
}

void RegionSource::Pause() {
  next_try_ = absl::Now() + pause_;
  pause_ = std::min(2 * pause_, pauses_.most);
}

absl::StatusOr<std::shared_ptr<SharedRegion>> RegionSource::Open(bool ask, std::string* socket) {
  if (ask) {
    absl::StatusOr<std::string> told = ask_();
    if (!told.ok()) return told.status();
    *socket = *std::move(told);
  }
  if (socket->empty()) return absl::UnavailableError("no shared memory: the server offers none");
  return SharedRegion::Open(*socket, bytes_, kPatience, device_);
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
