// SPDX-License-Identifier: Apache-2.0
// The connections of one Client (client.h) to its server. Connections owns the gRPC channels and stubs; Open
// connects, with the credentials of the client (ChannelCredentials), and waits for the server's first answer
// (AwaitServer). If ClientOptions::channels is not set, ConnectionChooser decides how many connections the
// client has.
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

// Decides how many connections a client uses if ClientOptions::channels is not set. The client begins with
// one connection; small jobs never have more. Once payload keeps the present connections busy, the client
// tries one more for a while. It keeps this connection if the payload then moves faster. Otherwise it drops
// the connection, and tries again much later.
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

  // The number of connections that streams are spread over.
  int count() const { return count_; }

  // A stream begins.
  void Begin(absl::Time now);
  // A stream has ended. `moved`: the bytes of payload that all streams of the client have moved in messages
  // so far, both ways.
  Advice End(uint64_t moved, absl::Time now);

  // The connection of kAdd is established; count() is one more.
  void Added(uint64_t moved);
  // The connection of kAdd could not be established; `why` is the reason.
  void Refused(absl::string_view why, uint64_t moved);

  // Why count() is what it is, as a text for users.
  const std::string& reason() const { return reason_; }

 private:
  struct Round {
    uint64_t moved_before = 0;
    absl::Duration busy;          // the time with at least one stream under way
    absl::Duration streams_busy;  // the time under way, summed over streams
  };

  void Advance(absl::Time now);
  // The advice after a round in which `rate` bytes per second were moved.
  Advice Decide(double rate);
  void Rest();

  int count_ = 1;
  bool opening_ = false;  // another connection is being opened
  bool trying_ = false;   // the last connection is on trial
  double before_ = 0;     // bytes per second without the connection on trial
  int rest_ = 0;          // rounds before the next trial
  int failures_ = 0;      // trials that have failed in a row
  int under_way_ = 0;     // streams under way
  absl::Time last_;       // when under_way_ last changed
  Round round_;
  std::string reason_ = "little was sent in messages so far";
};

// The server that calls go to.
struct Peer {
  std::string target;
  std::string version;  // the lossd version that the server reports
};

// Ends the blocking calls of one thread, from another thread. If the thread waits for an answer, or for the
// time before a repeat, it stops waiting, and its call ends with CANCELLED.
//
//   Cancellation cancellation;
//   CancellableCalls calls(&cancellation);  // of this thread, while the object lives
//   client->DescribeHead("lm");
//
// Does not end loss computations, which run on other threads; PendingLoss::Cancel ends those. Thread-safe.
class Cancellation {
 public:
  Cancellation() = default;
  Cancellation(const Cancellation&) = delete;
  Cancellation& operator=(const Cancellation&) = delete;

  // Ends the present calls; calls that begin later end at once. May be repeated.
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);
  bool cancelled() const ABSL_LOCKS_EXCLUDED(mu_);

  // The cancellation of the calling thread; null: there is none.
  static Cancellation* OfThread();
  // Sleeps for `time`. Ends early, with CANCELLED, when the thread's calls are cancelled.
  static absl::Status Sleep(absl::Duration time);

 private:
  friend class CancellableCalls;
  friend class CancellableContext;
  static Cancellation*& Slot();

  mutable absl::Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mu_);  // contexts of the calls under way
};

// While the object lives, `cancellation` ends the calls of this thread. The cancellation must outlive the
// object.
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

// Lets the thread's Cancellation cancel the call of `context`, on which the thread blocks. Destroy this
// object before the context.
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

// Converts the status of a finished call, with the detail that the server sent. The messages of UNAVAILABLE
// and DEADLINE_EXCEEDED then name the server, and that of UNIMPLEMENTED says which side is older.
absl::Status CallStatus(const grpc::Status& status, const Peer& peer);

// The connections of one client. Thread-safe after construction.
class Connections {
 public:
  // Opens options.channels connections (one if it is not set), and waits until the server has answered on
  // each; see AwaitServer.
  static absl::StatusOr<std::unique_ptr<Connections>> Open(const ClientOptions& options);

  // The channel with this index modulo count(). Each channel has a connection of its own. If the connection
  // is broken and not restored yet, returns the next channel that is not broken.
  std::shared_ptr<grpc::Channel> channel(size_t index) const ABSL_LOCKS_EXCLUDED(mu_);
  // How many connections there are now, and why.
  ConnectionChoice choice() const ABSL_LOCKS_EXCLUDED(mu_);
  int count() const ABSL_LOCKS_EXCLUDED(mu_);

  // Tells that a stream of a loss computation begins, or has ended.
  void Begin() ABSL_LOCKS_EXCLUDED(mu_);
  void End() ABSL_LOCKS_EXCLUDED(mu_);
  // Counts the bytes of payload that streams move in messages, both ways.
  const std::shared_ptr<std::atomic<uint64_t>>& moved() const { return moved_; }

  const Peer& peer() const { return peer_; }
  // The number of this client, which no other client of the process has (wire::DirectServer).
  uint64_t direct_client() const { return direct_client_; }
  // The incarnation of the server process that answered Open. The server may have been restarted since.
  uint64_t incarnation() const { return incarnation_; }  // 0: the server does not tell it to this client

  // The source of regions of host memory.
  RegionSource& regions() const { return *regions_; }
  // The region for a call that begins. Its rows have `call_bytes` and are in host memory (nullopt) or on a
  // GPU. Null: the rows go in messages. May open a region.
  std::shared_ptr<SharedRegion> RegionFor(std::optional<int> gpu, uint64_t call_bytes) const;
  // As Client::OpenMemory.
  bool OpenMemory(std::optional<int> gpu) const;
  // As MonitoringCalls::KnowsMemory.
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

  // Adds the connection that is being opened to channels_ if it is established; drops it after its deadline.
  void LookAtNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ClientOptions options_;
  const std::shared_ptr<const Credentials> credentials_;
  const std::shared_ptr<std::atomic<uint64_t>> moved_ = std::make_shared<std::atomic<uint64_t>>(0);
  mutable absl::Mutex mu_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_ ABSL_GUARDED_BY(mu_);
  ConnectionChooser chooser_ ABSL_GUARDED_BY(mu_);            // only used if options_.channels is not set
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

// How a client connects. ChannelCredentials opens channels. AwaitServer makes the first call on a channel,
// and so finds out whether a lossd server is there. Explain makes the error that says what is there instead.
//
// Functions are stateless and thread-safe.

// The implementation of Credentials; there is no other one. Thread-safe.
class ChannelCredentials final : public Credentials {
 public:
  // `pem`: the contents of the files that `options` names.
  ChannelCredentials(CredentialOptions options, CredentialOptions pem)
      : options_(std::move(options)), pem_(std::move(pem)) {}

  // INVALID_ARGUMENT if the token would go to another host without encryption.
  absl::Status CheckTarget(const std::string& target) const;
  std::shared_ptr<grpc::Channel> Open(const std::string& target,
                                      const grpc::ChannelArguments& arguments) const;
  // Finds out why no connection to `target` is established, and returns the error of Explain. OK: nothing was
  // found; a server that has not answered may be busy. Connects to `target` once or twice, which takes some
  // seconds at most.
  absl::Status Diagnose(const std::string& target) const;

 private:
  bool has_tls() const { return !options_.ca.empty(); }

  const CredentialOptions options_;
  const CredentialOptions pem_;
};

// The error for what a probe has found at `target`; the message says what to do. OK for kUnknown. UNAVAILABLE
// if no server is there, which may change. FAILED_PRECONDITION and UNAUTHENTICATED for faults that do not end
// by waiting. `options` are the client's credentials, for the message. tests/client/golden/connecting.json
// has cases.
absl::Status Explain(const Finding& finding, const std::string& target, const CredentialOptions& options);

// The UNAVAILABLE error that there is no server at `target`. `why` is the reason, a sentence without its full
// stop, or "".
absl::Status NoServerError(const std::string& target, absl::string_view why);

// Waits until the server has answered on this channel, and returns its description. UNAVAILABLE if there is
// no server; with options.wait_for_server only after the deadline, else at once. Faults that do not end by
// waiting (TLS on one side only, another program, ...) are returned at once in any case. A server that takes
// connections but does not answer may be busy, so AwaitServer waits for it until the deadline. The
// description is empty if the server does not know this client, or gives it no role.
absl::StatusOr<v1::ServerDescription> AwaitServer(const std::shared_ptr<grpc::Channel>& channel,
                                                  const ChannelCredentials& credentials,
                                                  const ClientOptions& options, absl::Time deadline);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CONNECTIONS_H_
