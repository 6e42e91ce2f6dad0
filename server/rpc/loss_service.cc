#include "server/rpc/loss_service.h"

#include <algorithm>

namespace lossd::rpc {

// Calls that have not opened their microbatch yet count in the registry but not in the engine: twice as
// many calls as streams leave room for them.
LossService::LossService(const LossServiceOptions& options, engine::Engine* engine, metrics::Metrics* metrics)
    : registry_(static_cast<size_t>(2 * options.max_streams), options.send_timeout),
      senders_(options.sender_threads, static_cast<size_t>(4 * options.max_streams)) {
  environment_.engine = engine;
  environment_.metrics = metrics;
  environment_.registry = &registry_;
  environment_.senders = &senders_;
  environment_.max_slices_in_flight = std::max<int64_t>(1, options.max_slices_in_flight);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* LossService::ComputeLoss(
    grpc::CallbackServerContext* context) {
  return ComputeLossCall::Start(&environment_, context);
}

}  // namespace lossd::rpc
