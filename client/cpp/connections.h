// SPDX-License-Identifier: Apache-2.0
// The connections of one client, the stubs over them, and the server that they lead to: how they are opened,
// with which credentials, and what the first call on each finds there. A client that was not told how many
// connections to take opens further ones while it works: ConnectionChooser decides when.
//
// Connections is thread-safe; ConnectionChooser is thread-compatible; functions are stateless and
// thread-safe.
#ifndef LOSSD_CLIENT_CPP_CONNECTIONS_H_
#define LOSSD_CLIENT_CPP_CONNECTIONS_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/probe.h"
#include "client/cpp/regions.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/server.grpc.pb.h"
#include "lossd/v1/server.pb.h"
#include "proto/wire/direct_call.h"

namespace lossd::client::internal {

// Decides how many connections a client takes that chooses by itself. The client begins with one connection,
// which is all that small jobs ever have. Once payload keeps the present connections busy, the client tries
// one more for a while. It keeps that one if more bytes were moved; otherwise it drops it and tries again
// much later.
//
// Times come from the caller. tests/client/golden/connecting.json has cases.
//
// Thread-compatible.
class ConnectionChooser {
 public:
  static constexpr int kMost = 8;

  enum class Advice {
    kStay,
    kAdd,   // open one more connection, then call Added or Refused
    kDrop,  // the last connection is not used any more
  };

  // The connections that streams are spread over.
  int count() const { return count_; }

  // A stream begins.
  void Begin(absl::Time now);
  // A stream has ended. `moved`: the bytes of payload that all streams have ever moved in messages, both
  // ways.
  Advice End(uint64_t moved, absl::Time now);

  // The connection that was advised stands; count() is one more.
  void Added(uint64_t moved);
  // It does not, for this reason.
  void Refused(absl::string_view why, uint64_t moved);

  // Why there are so many, for people.
  const std::string& reason() const { return reason_; }

 private:
  struct Round {
    uint64_t moved_before = 0;
    absl::Duration busy;          // with at least one stream under way
    absl::Duration streams_busy;  // summed over streams
  };

  void Advance(absl::Time now);
  // What follows from a round in which so many bytes were moved a second.
  Advice Decide(double rate);
  void Rest();

  int count_ = 1;
  bool opening_ = false;  // another one is being opened
  bool trying_ = false;   // the last one is on trial
  double before_ = 0;     // bytes per second without it
  int rest_ = 0;          // rounds before the next trial
  int failures_ = 0;      // trials in a row
  int under_way_ = 0;     // streams
  absl::Time last_;       // when their number changed
  Round round_;
  std::string reason_ = "little was sent in messages so far";
};

// The server that calls go to.
struct Peer {
  std::string target;
  std::string version;  // of lossd, as the server says
};

// Ends calls of a thread that blocks in them, from another thread: whatever the thread waits for then, an
// answer or the time before a repeat, it stops waiting, and its call ends with CANCELLED.
//
//   Cancellation cancellation;
//   CancellableCalls calls(&cancellation);  // of this thread, while the object lives
//   client->DescribeHead("lm");
//
// Loss computations are not the thread's: PendingLoss::Cancel ends them. Thread-safe.
class Cancellation {
 public:
  Cancellation() = default;
  Cancellation(const Cancellation&) = delete;
  Cancellation& operator=(const Cancellation&) = delete;

  // May be repeated. Calls that begin later end at once.
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);
  bool cancelled() const ABSL_LOCKS_EXCLUDED(mu_);

  // That of the calling thread; null: it has none.
  static Cancellation* OfThread();
  // Sleeps, but not longer than until the thread's calls are cancelled: then CANCELLED.
  static absl::Status Sleep(absl::Duration time);

 private:
  friend class CancellableCalls;
  friend class CancellableContext;
  static Cancellation*& Slot();

  mutable absl::Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mu_);  // of calls under way
};

// Makes the thread's calls end with a cancellation, which outlives the object.
class CancellableCalls {
 public:
  explicit CancellableCalls(Cancellation* cancellation)
      : before_(std::exchange(Cancellation::Slot(), cancellation)) {}
  ~CancellableCalls() { Cancellation::Slot() = before_; }
  CancellableCalls(const CancellableCalls&) = delete;
  CancellableCalls& operator=(const CancellableCalls&) = delete;

 private:
  Cancellation* const before_;
};

// Stands beside the context of a call that a thread waits for, and goes before it.
class CancellableContext {
 public:
  explicit CancellableContext(grpc::ClientContext* context);
  ~CancellableContext();
  CancellableContext(const CancellableContext&) = delete;
  CancellableContext& operator=(const CancellableContext&) = delete;

 private:
  Cancellation* const cancellation_ = Cancellation::OfThread();
  grpc::ClientContext* const context_;
};

// This library's version, "1.2.3".
absl::string_view ClientVersion();

// The status of a finished call, with the server's detail. UNAVAILABLE and DEADLINE_EXCEEDED name the server,
// UNIMPLEMENTED says which side is older.
absl::Status CallStatus(const grpc::Status& status, const Peer& peer);

// The connections of one client. Thread-safe after construction.
class Connections {
 public:
  // Opens options.channels connections, or one, and waits until the server has answered on each; see
  // AwaitServer.
  static absl::StatusOr<std::unique_ptr<Connections>> Open(const ClientOptions& options);

  // Each has a connection of its own. Any index >= 0; wraps around. In place of one that is broken, and was
  // not to be had again yet, the next one that is not.
  std::shared_ptr<grpc::Channel> channel(size_t index) const ABSL_LOCKS_EXCLUDED(mu_);
  // How many there are at the moment, and why.
  ConnectionChoice choice() const ABSL_LOCKS_EXCLUDED(mu_);
  int count() const ABSL_LOCKS_EXCLUDED(mu_);

  // A stream of a loss computation begins, or has ended.
  void Begin() ABSL_LOCKS_EXCLUDED(mu_);
  void End() ABSL_LOCKS_EXCLUDED(mu_);
  // Counts the bytes of payload that streams move in messages, both ways.
  const std::shared_ptr<std::atomic<uint64_t>>& moved() const { return moved_; }

  const Peer& peer() const { return peer_; }
  // The number of this client among those of the process (wire::DirectServer).
  uint64_t direct_client() const { return direct_client_; }
  // Of the server that has answered, which may have been restarted since.
  uint64_t incarnation() const { return incarnation_; }  // 0: it does not tell this client

  // Of memory of the host.
  RegionSource& regions() const { return *regions_; }
  // The region for a call that begins, whose rows have so many bytes and are in memory of the host (nullopt)
  // or of a GPU; null: they are to go in messages. May open a region.
  std::shared_ptr<SharedRegion> RegionFor(std::optional<int> gpu, uint64_t call_bytes) const;
  // As Client::OpenMemory.
  bool OpenMemory(std::optional<int> gpu) const;
  // As Client::KnowsMemory.
  std::optional<bool> KnowsMemory(int gpu) const;
  void DropUnusableRegions() const;
  TransportChoice transport() const ABSL_LOCKS_EXCLUDED(mu_);

  v1::LossService::Stub* loss() const { return loss_.get(); }
  v1::HeadService::Stub* heads() const { return heads_.get(); }
  v1::ServerService::Stub* server() const { return server_.get(); }
  grpc::health::v1::Health::Stub* health() const { return health_.get(); }

 private:
  Connections(std::vector<std::shared_ptr<grpc::Channel>> channels, const ClientOptions& options,
              std::shared_ptr<const Credentials> credentials, v1::ServerDescription server);

  // Takes the connection that is being opened if it stands, or gives it up.
  void LookAtNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ClientOptions options_;
  const std::shared_ptr<const Credentials> credentials_;
  const std::shared_ptr<std::atomic<uint64_t>> moved_ = std::make_shared<std::atomic<uint64_t>>(0);
  mutable absl::Mutex mu_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_ ABSL_GUARDED_BY(mu_);
  ConnectionChooser chooser_ ABSL_GUARDED_BY(mu_);            // unless options_.channels says how many
  std::shared_ptr<grpc::Channel> next_ ABSL_GUARDED_BY(mu_);  // being opened; null: none
  absl::Time next_deadline_ ABSL_GUARDED_BY(mu_);
  const Peer peer_;
  const uint64_t direct_client_ = wire::DirectServer::NextClient();
  const uint64_t incarnation_;
  const std::unique_ptr<v1::LossService::Stub> loss_;
  const std::unique_ptr<v1::HeadService::Stub> heads_;
  const std::unique_ptr<v1::ServerService::Stub> server_;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health_;
  const std::unique_ptr<RegionSource> regions_;
  const std::unique_ptr<DeviceRegions> device_regions_;
};

void SetDeadline(absl::Time deadline, grpc::ClientContext* context);

// How a client connects: the channels that it opens with its credentials, the first call on each of them,
// which finds out whether a lossd is there, and the error that says what is there if not.
//
// Functions are stateless and thread-safe.

// The client's own view of Credentials, of which this is the only kind. Thread-safe.
class ChannelCredentials final : public Credentials {
 public:
  // `pem`: the contents of the files that `options` names.
  ChannelCredentials(CredentialOptions options, CredentialOptions pem)
      : options_(std::move(options)), pem_(std::move(pem)) {}

  // INVALID_ARGUMENT if a token would go to another host in the clear.
  absl::Status CheckTarget(const std::string& target) const;
  std::shared_ptr<grpc::Channel> Open(const std::string& target,
                                      const grpc::ChannelArguments& arguments) const;
  // Why no connection to `target` comes about (Explain); OK: nothing was found, so that a
  // server that has not answered may be busy. Connects to it once or twice, which takes some seconds at most.
  absl::Status Diagnose(const std::string& target) const;

 private:
  bool has_tls() const { return !options_.ca.empty(); }

  const CredentialOptions options_;
  const CredentialOptions pem_;
};

// The error that a finding at `target` means, in words that say what to do; OK for kUnknown. UNAVAILABLE if
// no server is there, which may change; FAILED_PRECONDITION and UNAUTHENTICATED for what waiting cannot mend.
// `options`: what the client was given. tests/client/golden/connecting.json has cases.
absl::Status Explain(const Finding& finding, const std::string& target, const CredentialOptions& options);

// UNAVAILABLE: there is no server at `target`, because of `why`, a sentence without its full stop, or "".
absl::Status NoServerError(const std::string& target, absl::string_view why);

// Waits until the server has answered on this channel. UNAVAILABLE if nobody is there: at once, unless
// options.wait_for_server. What waiting cannot mend (TLS on one side only, another program, ...) is returned
// at once in any case. A server that takes connections but says nothing may be busy, so it has until the
// deadline. The description is empty if the server does not know this client, or gives it no role.
absl::StatusOr<v1::ServerDescription> AwaitServer(const std::shared_ptr<grpc::Channel>& channel,
                                                  const ChannelCredentials& credentials,
                                                  const ClientOptions& options, absl::Time deadline);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CONNECTIONS_H_
