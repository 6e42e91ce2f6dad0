// The connections of one client and the stubs over them.
//
// Thread-safe after construction.
#ifndef LOSSD_CLIENT_CPP_CONNECTIONS_H_
#define LOSSD_CLIENT_CPP_CONNECTIONS_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/peer.h"
#include "client/cpp/region_source.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/server.grpc.pb.h"

namespace lossd::client::internal {

class Connections {
 public:
  // Opens options.channels connections and waits until the server has answered on each; see AwaitServer.
  static absl::StatusOr<std::unique_ptr<Connections>> Open(const ClientOptions& options);

  // Each has a connection of its own. Any index >= 0; wraps around.
  const std::shared_ptr<grpc::Channel>& channel(size_t index) const {
    return channels_[index % channels_.size()];
  }

  const Peer& peer() const { return peer_; }
  // Of the server that has answered, which may have been restarted since.
  uint64_t incarnation() const { return incarnation_; }  // 0: it does not tell this client

  RegionSource& regions() const { return *regions_; }

  v1::LossService::Stub* loss() const { return loss_.get(); }
  v1::HeadService::Stub* heads() const { return heads_.get(); }
  v1::ServerService::Stub* server() const { return server_.get(); }
  grpc::health::v1::Health::Stub* health() const { return health_.get(); }

 private:
  Connections(std::vector<std::shared_ptr<grpc::Channel>> channels, const ClientOptions& options,
              v1::ServerDescription server);

  const std::vector<std::shared_ptr<grpc::Channel>> channels_;
  const Peer peer_;
  const uint64_t incarnation_;
  const std::unique_ptr<v1::LossService::Stub> loss_;
  const std::unique_ptr<v1::HeadService::Stub> heads_;
  const std::unique_ptr<v1::ServerService::Stub> server_;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health_;
  const std::unique_ptr<RegionSource> regions_;
};

void SetDeadline(absl::Time deadline, grpc::ClientContext* context);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CONNECTIONS_H_
