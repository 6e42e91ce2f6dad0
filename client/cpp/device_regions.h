// SPDX-License-Identifier: Apache-2.0
// Where the loss calls of one client get their regions from whose rows are on GPUs: a RegionSource for each GPU
// of the server that shares memory. Rows on one of these GPUs take memory of that GPU. Rows on another GPU take
// memory of the nearest one if the client was told so ("cuda_ipc"), and else go as rows of the host do.
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_DEVICE_REGIONS_H_
#define LOSSD_CLIENT_CPP_DEVICE_REGIONS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client_options.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/region_source.h"
#include "client/cpp/shared_region.h"
#include "lossd/v1/server.pb.h"

namespace lossd::client::internal {

// The GPUs whose memory the server shares ("GPU-..."), in its order.
std::vector<std::string> SharingDevicesOf(const v1::ServerDescription& server);

class DeviceRegions {
 public:
  // Asks the server, which may be another process by now, for its region socket; takes a second or two at most.
  // An error if it does not share memory of `device` any more.
  using AskFn = std::function<absl::StatusOr<std::string>(const std::string& device)>;

  // `transport` as in ClientOptions.
  DeviceRegions(const std::string& transport, RegionSizes sizes, const v1::ServerDescription& server, AskFn ask);
  DeviceRegions(const DeviceRegions&) = delete;
  DeviceRegions& operator=(const DeviceRegions&) = delete;

  // With the transport "cuda_ipc": whether there is a region to be had. Opens it, on the GPU that the calling
  // thread works on if that is one of the server's, and else on the first one that this process sees.
  absl::Status Check() ABSL_LOCKS_EXCLUDED(mu_);
  // The region for a call that begins, whose rows have so many bytes and are on `gpu`; null: they are to go as
  // rows of the host do. May open a region.
  std::shared_ptr<SharedRegion> Get(int gpu, uint64_t call_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // As RegionSource::DropUnusable, of all.
  void DropUnusable();
  // How rows on GPUs travel where rows of the host travel by `of_host`, over all GPUs that rows came from.
  DeviceTransportChoice choice(absl::string_view of_host) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Gpu {
    std::string uuid;
    std::unique_ptr<RegionSource> regions;
  };
  // Where rows on one GPU go.
  struct Route {
    std::string rows;                // the GPU that they are on: its UUID, or "GPU n"
    RegionSource* regions = nullptr;  // null: `reason` says why not
    std::string reason;
  };

  Route RouteOf(int gpu) const;
  // The sharing GPU that is nearest to `gpu`, which is another one, and the one at the same place in its
  // order of several that are as near.
  RegionSource* NearestTo(int gpu) const;
  // All UUIDs, for people.
  std::string Names() const;

  const std::string transport_;
  const std::string why_none_;  // if there are no GPUs
  std::vector<Gpu> gpus_;
  mutable absl::Mutex mu_;
  std::map<int, Route> routes_ ABSL_GUARDED_BY(mu_);  // by the GPU that rows came from
  RegionSource* checked_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_DEVICE_REGIONS_H_
