#include "client/cpp/region_source.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace lossd::client {
namespace internal {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(5);  // with the region socket
constexpr absl::Duration kPause = absl::Seconds(2);     // between attempts to get another region

}  // namespace

RegionSource::RegionSource(std::string transport, uint64_t bytes, std::string socket, AskFn ask)
    : transport_(std::move(transport)), bytes_(bytes), socket_(std::move(socket)), ask_(std::move(ask)) {}

absl::Status RegionSource::Check() {
  if (transport_ != "shared_memory" || Get() != nullptr) return absl::OkStatus();
  absl::MutexLock lock(&mu_);
  return problem_;
}

std::shared_ptr<SharedRegion> RegionSource::Get() {
  if (transport_ == "grpc") return nullptr;
  absl::MutexLock lock(&mu_);
  if (region_ != nullptr && region_->usable()) return region_;
  region_ = nullptr;
  // Who has got none the first time is on another host, or too late.
  if (tried_ && (!worked_ || absl::Now() < next_try_)) return nullptr;
  Open();
  return region_;
}

void RegionSource::Open() {
  next_try_ = absl::Now() + kPause;
  if (tried_) {  // the server may be another process by now
    absl::StatusOr<std::string> socket = ask_();
    problem_ = socket.status();
    if (!socket.ok()) return;
    socket_ = *std::move(socket);
  }
  tried_ = true;
  if (socket_.empty()) {
    problem_ = absl::UnavailableError("no shared memory: the server offers none");
    return;
  }
  absl::StatusOr<std::shared_ptr<SharedRegion>> region = SharedRegion::Open(socket_, bytes_, kPatience);
  problem_ = region.status();
  if (!region.ok()) return;
  region_ = *std::move(region);
  worked_ = true;
  next_try_ = absl::InfinitePast();
}

TransportChoice RegionSource::choice() const {
  if (transport_ == "grpc") return {"grpc", "the client was told so"};
  absl::MutexLock lock(&mu_);
  if (region_ != nullptr)
    return {"shared_memory", absl::StrCat("the server is on this host; ", region_->size() >> 20, " MiB")};
  if (!tried_) return {"grpc", "nothing was sent yet"};
  return {"grpc", std::string(problem_.message())};
}

}  // namespace internal

std::string TransportFromEnvironment() {
  const char* const value = std::getenv("LOSSD_TRANSPORT");
  return value == nullptr || *value == '\0' ? "auto" : value;
}

}  // namespace lossd::client
