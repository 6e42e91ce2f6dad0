// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/device_regions.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/cuda_driver.h"

namespace lossd::client::internal {
namespace {

// Why rows on GPUs go as rows of the host do, of all of them.
std::string WhyNone(const std::string& transport, const v1::ServerDescription& server) {
  if (transport != "auto" && transport != "cuda_ipc") return absl::StrCat("the transport is ", transport);
  return absl::StrCat("the server shares no memory of a GPU",
                      server.ranks().empty() ? "" : ", as it has several processes");
}

}  // namespace

std::vector<std::string> SharingDevicesOf(const v1::ServerDescription& server) {
  if (!server.region_devices().empty()) return {server.region_devices().begin(), server.region_devices().end()};
  if (server.region_device().empty()) return {};
  return {server.region_device()};  // of a server that knows of one alone
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

absl::Status DeviceRegions::Check() {
  if (transport_ != "cuda_ipc") return absl::OkStatus();
  if (gpus_.empty()) return absl::UnavailableError(absl::StrCat("no CUDA IPC: ", why_none_));
  const Gpu* chosen = nullptr;
  if (const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get(); driver.ok()) {
    const std::optional<int> current = (*driver)->Current();
    for (const Gpu& gpu : gpus_) {
      const absl::StatusOr<std::optional<int>> seen = (*driver)->Find(gpu.uuid);
      if (!seen.ok() || !seen->has_value()) continue;
      if (chosen == nullptr || *seen == current) chosen = &gpu;
    }
    if (chosen == nullptr && gpus_.size() > 1)
      return absl::UnavailableError(
          absl::StrCat("no shared memory: the server's GPUs are ", Names(), ", none of which this process sees"));
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
    if (route.regions == nullptr) route = RouteOf(gpu);  // the driver may know by now
    regions = route.regions;
  }
  return regions == nullptr ? nullptr : regions->Get(call_bytes);
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
          absl::StrCat("the rows are on ", *uuid, ", and the server's ", gpus_.size() == 1 ? "GPU is " : "GPUs are ",
                       Names())};
}

RegionSource* DeviceRegions::NearestTo(int gpu) const {
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
  if (nearest.empty()) return gpus_.front().regions.get();  // which says why there is none
  return nearest[static_cast<size_t>(gpu) % nearest.size()];
}

void DeviceRegions::DropUnusable() {
  for (const Gpu& gpu : gpus_) gpu.regions->DropUnusable();
}

DeviceTransportChoice DeviceRegions::choice(absl::string_view of_host) const {
  // Without a region of the GPU, rows go as those of the host do.
  const auto way = [&](const Route& route) -> DeviceTransportChoice {
    if (route.regions == nullptr) return {std::string(of_host), route.reason};
    const TransportChoice made = route.regions->choice();
    return {made.transport == "cuda_ipc" ? made.transport : std::string(of_host), made.reason};
  };
  if (gpus_.empty()) return {std::string(of_host), why_none_};
  absl::MutexLock lock(&mu_);
  if (routes_.empty())
    return way({.regions = checked_, .reason = "nothing was sent yet"});
  if (routes_.size() == 1) return way(routes_.begin()->second);
  DeviceTransportChoice all{"cuda_ipc", ""};
  for (const auto& [gpu, route] : routes_) {
    const DeviceTransportChoice one = way(route);
    if (one.transport != "cuda_ipc") all.transport = one.transport;
    absl::StrAppend(&all.reason, all.reason.empty() ? "" : "; ", "rows on ", route.rows, ": ", one.transport, ", ",
                    one.reason);
  }
  return all;
}

std::string DeviceRegions::Names() const {
  return absl::StrJoin(gpus_, ", ", [](std::string* out, const Gpu& gpu) { absl::StrAppend(out, gpu.uuid); });
}

}  // namespace lossd::client::internal
