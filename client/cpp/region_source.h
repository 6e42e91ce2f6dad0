// Where the loss calls of one client get their region of shared memory from: opens it with the first of them,
// and another one when that cannot be used any more.
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_REGION_SOURCE_H_
#define LOSSD_CLIENT_CPP_REGION_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/shared_region.h"

namespace lossd::client::internal {

class RegionSource {
 public:
  // Asks the server for ServerDescription.region_socket; takes a second or two at most.
  using AskFn = absl::AnyInvocable<absl::StatusOr<std::string>()>;

  // `transport` and `bytes` as in ClientOptions; `socket` as the server has told it already.
  RegionSource(std::string transport, uint64_t bytes, std::string socket, AskFn ask);

  // With the transport "shared_memory": whether there is a region to be had.
  absl::Status Check() ABSL_LOCKS_EXCLUDED(mu_);
  // The region for a call that begins; null: it is to send its slices in messages. May open a region, which
  // takes some milliseconds.
  std::shared_ptr<SharedRegion> Get() ABSL_LOCKS_EXCLUDED(mu_);
  TransportChoice choice() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Open() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string transport_;
  const uint64_t bytes_;
  mutable absl::Mutex mu_;
  std::string socket_ ABSL_GUARDED_BY(mu_);
  AskFn ask_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<SharedRegion> region_ ABSL_GUARDED_BY(mu_);
  bool tried_ ABSL_GUARDED_BY(mu_) = false;
  bool worked_ ABSL_GUARDED_BY(mu_) = false;  // there has been a region
  absl::Time next_try_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Status problem_ ABSL_GUARDED_BY(mu_);  // why there is no region
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_REGION_SOURCE_H_
