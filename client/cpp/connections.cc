// SPDX-License-Identifier: Apache-2.0
// The connections of a client (connections.h): when to open another one, the gRPC channels and their
// credentials, calls that end early, and the first call with its diagnosis of errors.
//
// ConnectionChooser measures in rounds: in each it counts the bytes that were moved and the time in which
// streams were under way. If a round shows that the connections are busy, one more is opened (Advice::kAdd),
// and the next round is its trial. After a trial that brings too little the connection is dropped (kDrop),
// and some rounds pass without a trial (Rest).
#include "client/cpp/connections.h"

#include <grpc/grpc.h>
#include <grpcpp/support/client_interceptor.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "proto/wire/status_details.h"

namespace lossd::client::internal {

// ---- ConnectionChooser ----

namespace {

// A round ends when at least kRoundBytes of payload were moved and streams were under way for at least
// kRoundTime.
constexpr uint64_t kRoundBytes = uint64_t{64} << 20;
constexpr absl::Duration kRoundTime = absl::Milliseconds(200);
// A round that takes longer than this is not judged, because something other than the connections is slow.
constexpr absl::Duration kLongestRound = absl::Seconds(30);
// The connections count as busy if the number of streams under way, averaged over the time in which there is
// at least one, is at least kBusy times the number of connections.
constexpr double kBusy = 0.9;
constexpr double kGain = 1.1;  // a new connection stays if the bytes per second grow by this factor
// After a failed trial of a new connection, the number of rounds until the next trial. Each further failure
// in a row doubles it, up to kLongestRest.
constexpr int kFirstRest = 8;
constexpr int kLongestRest = 512;

}  // namespace

void ConnectionChooser::Advance(absl::Time now) {
  if (under_way_ > 0) {
    round_.busy += now - last_;
    round_.streams_busy += under_way_ * (now - last_);
  }
  last_ = now;
}

void ConnectionChooser::Begin(absl::Time now) {
  Advance(now);
  ++under_way_;
}

ConnectionChooser::Advice ConnectionChooser::End(uint64_t moved, absl::Time now) {
  Advance(now);
  --under_way_;
  const Round round = round_;
  const uint64_t bytes = moved - round.moved_before;
  if (round.busy > kLongestRound) {
    round_ = {.moved_before = moved};
    return Advice::kStay;
  }
  if (opening_ || bytes < kRoundBytes || round.busy < kRoundTime) return Advice::kStay;
  round_ = {.moved_before = moved};
  if (!trying_ && round.streams_busy < kBusy * count_ * round.busy) return Advice::kStay;
  return Decide(static_cast<double>(bytes) / absl::ToDoubleSeconds(round.busy));
}

ConnectionChooser::Advice ConnectionChooser::Decide(double rate) {
  if (trying_) {
    trying_ = false;
    const std::string compared =
        absl::StrFormat("%d moved %.2f GB/s, %d moved %.2f", count_ - 1, before_ / 1e9, count_, rate / 1e9);
    reason_ = compared;
    if (rate < kGain * before_) {
      --count_;
      Rest();
      return Advice::kDrop;
    }
    failures_ = 0;
  }
  if (count_ == kMost) return Advice::kStay;
  if (rest_ > 0) {
    --rest_;
    return Advice::kStay;
  }
  before_ = rate;
  opening_ = true;
  return Advice::kAdd;
}

void ConnectionChooser::Rest() {
  rest_ = std::min(kFirstRest << std::min(failures_, 16), kLongestRest);
  ++failures_;
}

void ConnectionChooser::Added(uint64_t moved) {
  opening_ = false;
  trying_ = true;
  ++count_;
  round_ = {.moved_before = moved};
}

void ConnectionChooser::Refused(absl::string_view why, uint64_t moved) {
  opening_ = false;
  reason_ = absl::StrCat("no further connection came about: ", why);
  Rest();
  round_ = {.moved_before = moved};
}

// ---- The server and the ends of calls ----

namespace {

// The numbers in a version such as "1.2.3"; empty if a part is not a number.
std::vector<uint32_t> Numbers(absl::string_view version) {
  std::vector<uint32_t> numbers;
  for (const absl::string_view part : absl::StrSplit(version, '.')) {
    if (!absl::SimpleAtoi(part, &numbers.emplace_back())) return {};
  }
  return numbers;
}

// A text that compares the server's version with this client's, and says what to do.
std::string Compared(absl::string_view server) {
  const std::vector<uint32_t> theirs = Numbers(server), ours = Numbers(ClientVersion());
  const std::string client = absl::StrCat("this client (lossd ", ClientVersion(), "); ");
  if (theirs.empty() || theirs == ours) {
    return absl::StrCat("of another version than ", client, "use the same version of both");
  }
  return theirs < ours ? absl::StrCat("older than ", client, "update the server")
                       : absl::StrCat("newer than ", client, "update the client");
}

}  // namespace

absl::string_view ClientVersion() { return LOSSD_VERSION; }

absl::Status CallStatus(const grpc::Status& status, const Peer& peer) {
  const absl::Status result = wire::FromGrpcStatus(status);
  switch (result.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return errors::WithMessage(result, absl::StrCat(result.message(), " (server ", peer.target, ")"));
    case absl::StatusCode::kUnimplemented:
      if (wire::GetErrorDetail(result).has_value()) return result;  // it knows the call, not the request
      return errors::WithMessage(result, absl::StrCat("lossd ", peer.version, " at ", peer.target,
                                                      " does not know this call: it is ",
                                                      Compared(peer.version), " (", result.message(), ")"));
    default:
      return result;
  }
}

}  // namespace lossd::client::internal

namespace lossd::client {

// ---- Connections ----

namespace internal {
namespace {

// The sizes of the regions that the client asks for if shared_memory_bytes is not set: the first region, and
// the largest one.
constexpr RegionSizes kRegionSizes = {.least = uint64_t{4} << 20, .most = uint64_t{256} << 20};

grpc::ChannelArguments Arguments(const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // else channels share one connection
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // the client knows itself which repeats are safe
  arguments.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // Keepalive also sets TCP_USER_TIMEOUT, which ends a write to a peer that takes no data any more. There is
  // a ping every ten minutes; by default servers tolerate one every five minutes.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10 * 60 * 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.dead_peer_timeout)));
  return arguments;
}

absl::Status Validate(const ClientOptions& options) {
  if (const std::string problem = TargetProblem(options.target); !problem.empty()) {
    return ArgumentError(kTargetField, options.target, absl::StrCat("is '", options.target, "'; ", problem));
  }
  LOSSD_RETURN_IF_ERROR(CheckRunName(options.run));
  if (options.transport != "auto" && options.transport != "grpc" && options.transport != "shared_memory" &&
      options.transport != "cuda_ipc") {
    return ArgumentError(
        "options.transport", options.transport,
        absl::StrCat("is '", options.transport, "'; it must be auto, grpc, shared_memory or cuda_ipc"));
  }
  if (const int64_t bytes = options.shared_memory_bytes.value_or(1); bytes < 1) {
    return ArgumentError("options.shared_memory_bytes", bytes,
                         absl::StrCat("is ", bytes, "; it must be at least 1"));
  }
  if (const int channels = options.channels.value_or(1); channels < 1 || channels > 64) {
    return ArgumentError("options.channels", channels,
                         absl::StrCat("is ", channels, "; it must be in [1, 64]"));
  }
  if (options.max_message_bytes < 1024 || options.max_message_bytes > (int64_t{1} << 31) - 1) {
    return ArgumentError(
        "options.max_message_bytes", options.max_message_bytes,
        absl::StrCat("is ", options.max_message_bytes, "; it must be in [1024, 2147483647]"));
  }
  if (options.retry.max_attempts < 1) {
    return ArgumentError("options.retry.max_attempts", options.retry.max_attempts,
                         absl::StrCat("is ", options.retry.max_attempts, "; it must be at least 1"));
  }
  const std::pair<absl::string_view, absl::Duration> timeouts[] = {
      {"options.connect_timeout", options.connect_timeout},
      {"options.call_timeout", options.call_timeout},
      {"options.transfer_timeout", options.transfer_timeout},
      {"options.loss_timeout", options.loss_timeout},
      {"options.dead_peer_timeout", options.dead_peer_timeout}};
  for (const auto& [field, timeout] : timeouts) {
    if (timeout > absl::ZeroDuration()) continue;
    const std::string text = absl::FormatDuration(timeout);
    return ArgumentError(field, text, absl::StrCat("is ", text, "; it must be positive"));
  }
  if (options.dead_peer_timeout > absl::Hours(24)) {
    const std::string text = absl::FormatDuration(options.dead_peer_timeout);
    return ArgumentError("options.dead_peer_timeout", text,
                         absl::StrCat("is ", text, "; it must be at most 24 hours"));
  }
  return absl::OkStatus();
}

// Asks the server for its region socket, for regions of the GPU `device` (empty: the host). Asks even if the
// socket was known, because by now another process with other GPUs may serve at the address.
absl::StatusOr<std::string> AskRegionSocket(v1::ServerService::Stub* server, const std::string& device) {
  grpc::ClientContext context;
  SetDeadline(clocks::SteadyNow() + absl::Seconds(2), &context);
  v1::ServerDescription description;
  const grpc::Status status = server->GetServer(&context, v1::GetServerRequest(), &description);
  if (!status.ok()) return absl::UnavailableError(absl::StrCat("no shared memory: ", status.error_message()));
  const std::vector<std::string> devices = SharingDevicesOf(description);
  if (!device.empty() && std::find(devices.begin(), devices.end(), device) == devices.end())
    return absl::UnavailableError(
        absl::StrCat("no shared memory: the server has no memory of ", device, " to share"));
  return description.region_socket();
}

RegionSizes SizesOf(const ClientOptions& options) {
  if (!options.shared_memory_bytes.has_value()) return kRegionSizes;
  const uint64_t bytes = static_cast<uint64_t>(*options.shared_memory_bytes);
  return {.least = bytes, .most = bytes};
}

// The source of regions in the host's memory. With "cuda_ipc" rows of the host travel as with "auto".
std::unique_ptr<RegionSource> HostRegions(const ClientOptions& options, const v1::ServerDescription& server,
                                          v1::ServerService::Stub* stub) {
  return std::make_unique<RegionSource>(options.transport == "cuda_ipc" ? "auto" : options.transport,
                                        SizesOf(options), server.region_socket(),
                                        [stub] { return AskRegionSocket(stub, ""); });
}

// Keeps gRPC initialized for the life of the process. Otherwise it would shut down with the last channel, and
// might then wait for its poller for ten seconds.
void KeepGrpcRunning() {
  static const bool initialized = (grpc_init(), true);
  (void)initialized;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Connections>> Connections::Open(const ClientOptions& options) {
  LOSSD_RETURN_IF_ERROR(Validate(options));
  KeepGrpcRunning();
  absl::StatusOr<std::shared_ptr<const Credentials>> credentials = options.credentials;
  if (options.credentials == nullptr) credentials = Credentials::FromEnvironment();
  if (!credentials.ok()) return credentials.status();
  const auto* maker = dynamic_cast<const ChannelCredentials*>(credentials->get());
  if (maker == nullptr)
    return ArgumentError("options.credentials", "another class", "is not one of this library's kinds");
  LOSSD_RETURN_IF_ERROR(maker->CheckTarget(options.target));

  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < options.channels.value_or(1); ++i) {
    channels.push_back(maker->Open(options.target, Arguments(options)));
    channels.back()->GetState(/*try_to_connect=*/true);
  }
  const absl::Time deadline = clocks::SteadyNow() + options.connect_timeout;
  absl::StatusOr<v1::ServerDescription> server;
  for (const auto& channel : channels) {
    server = AwaitServer(channel, *maker, options, deadline);
    if (!server.ok()) return server.status();
  }
  std::unique_ptr<Connections> connections(
      new Connections(std::move(channels), options, *std::move(credentials), *std::move(server)));
  LOSSD_RETURN_IF_ERROR(connections->regions_->Check());
  LOSSD_RETURN_IF_ERROR(connections->device_regions_->Check(options.gpu));
  return connections;
}

Connections::Connections(std::vector<std::shared_ptr<grpc::Channel>> channels, const ClientOptions& options,
                         std::shared_ptr<const Credentials> credentials, v1::ServerDescription server)
    : options_(options),
      credentials_(std::move(credentials)),
      channels_(std::move(channels)),
      peer_{options.target, server.version()},
      incarnation_(server.incarnation()),
      loss_(v1::LossService::NewStub(channels_[0])),
      heads_(v1::HeadService::NewStub(channels_[0])),
      server_(v1::ServerService::NewStub(channels_[0])),
      health_(grpc::health::v1::Health::NewStub(channels_[0])),
      regions_(HostRegions(options, server, server_.get())),
      device_regions_(std::make_unique<DeviceRegions>(
          options.transport, SizesOf(options), server,
          [stub = server_.get()](const std::string& device) { return AskRegionSocket(stub, device); })) {}

std::shared_ptr<SharedRegion> Connections::RegionFor(std::optional<int> gpu, uint64_t call_bytes) const {
  std::shared_ptr<SharedRegion> region;
  if (gpu.has_value()) region = device_regions_->Get(*gpu, call_bytes);
  if (region == nullptr) region = regions_->Get(call_bytes);
  if (region != nullptr && gpu.has_value()) region->PinFor(*gpu);
  return region;
}

bool Connections::OpenMemory(std::optional<int> gpu) const {
  if (!gpu.has_value()) return device_regions_->GetAny() != nullptr;
  const std::shared_ptr<SharedRegion> region = RegionFor(gpu, 0);
  return region != nullptr && region->gpu().has_value();
}

std::optional<bool> Connections::KnowsMemory(int gpu) const {
  if (device_regions_->IsOpen(gpu)) return true;
  if (device_regions_->empty() && regions_->IsOpen()) return false;
  return std::nullopt;
}

void Connections::DropUnusableRegions() const {
  regions_->DropUnusable();
  device_regions_->DropUnusable();
}

TransportChoice Connections::transport() const {
  TransportChoice made = regions_->choice();
  made.connections = choice();
  made.device = device_regions_->choice(made.transport);
  return made;
}

std::shared_ptr<grpc::Channel> Connections::channel(size_t index) const {
  absl::MutexLock lock(&mu_);
  for (size_t i = 0; i < channels_.size(); ++i) {
    const auto& channel = channels_[(index + i) % channels_.size()];
    if (channel->GetState(/*try_to_connect=*/false) != GRPC_CHANNEL_TRANSIENT_FAILURE) return channel;
  }
  return channels_[index % channels_.size()];
}

int Connections::count() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int>(channels_.size());
}

ConnectionChoice Connections::choice() const {
  absl::MutexLock lock(&mu_);
  ConnectionChoice choice{.connections = static_cast<int>(channels_.size())};
  if (options_.channels.has_value()) {
    choice.reason = "the client was told so";
  } else if (wire::DirectServer::Find(peer_.target) != nullptr) {
    choice.reason = "loss computations need none, as the server is in this process";
  } else {
    choice.reason = chooser_.reason();
  }
  return choice;
}

void Connections::Begin() {
  if (options_.channels.has_value()) return;
  absl::MutexLock lock(&mu_);
  LookAtNext();
  chooser_.Begin(clocks::SteadyNow());
}

void Connections::End() {
  if (options_.channels.has_value()) return;
  absl::MutexLock lock(&mu_);
  LookAtNext();
  switch (chooser_.End(*moved_, clocks::SteadyNow())) {
    case ConnectionChooser::Advice::kStay:
      return;
    case ConnectionChooser::Advice::kDrop:
      channels_.pop_back();  // streams under way on this channel keep it
      return;
    case ConnectionChooser::Advice::kAdd:
      next_ =
          dynamic_cast<const ChannelCredentials&>(*credentials_).Open(options_.target, Arguments(options_));
      next_->GetState(/*try_to_connect=*/true);
      next_deadline_ = clocks::SteadyNow() + options_.connect_timeout;
      return;
  }
}

void Connections::LookAtNext() {
  if (next_ == nullptr) return;
  if (next_->GetState(/*try_to_connect=*/true) == GRPC_CHANNEL_READY) {
    channels_.push_back(std::exchange(next_, nullptr));
    chooser_.Added(*moved_);
  } else if (clocks::SteadyNow() > next_deadline_) {
    next_ = nullptr;
    chooser_.Refused(
        absl::StrCat("the server did not take one within ", absl::FormatDuration(options_.connect_timeout)),
        *moved_);
  }
}

// ---- Calls that end early ----

Cancellation*& Cancellation::Slot() {
  thread_local Cancellation* of_thread = nullptr;
  return of_thread;
}

Cancellation* Cancellation::OfThread() { return Slot(); }

void Cancellation::Cancel() {
  absl::MutexLock lock(&mu_);
  cancelled_ = true;
  for (grpc::ClientContext* const context : contexts_) context->TryCancel();
}

bool Cancellation::cancelled() const {
  absl::MutexLock lock(&mu_);
  return cancelled_;
}

absl::Status Cancellation::Sleep(absl::Duration time) {
  Cancellation* const cancellation = OfThread();
  if (cancellation == nullptr) {
    absl::SleepFor(time);
    return absl::OkStatus();
  }
  absl::MutexLock lock(&cancellation->mu_);
  if (!clocks::AwaitFor(cancellation->mu_, absl::Condition(&cancellation->cancelled_), time)) {
    return absl::OkStatus();
  }
  return absl::CancelledError("cancelled by the caller");
}

CancellableContext::CancellableContext(grpc::ClientContext* context) : context_(context) {
  if (cancellation_ == nullptr) return;
  absl::MutexLock lock(&cancellation_->mu_);
  cancellation_->contexts_.push_back(context);
  if (cancellation_->cancelled_) context->TryCancel();
}

CancellableContext::~CancellableContext() {
  if (cancellation_ == nullptr) return;
  absl::MutexLock lock(&cancellation_->mu_);
  auto& contexts = cancellation_->contexts_;
  contexts.erase(std::remove(contexts.begin(), contexts.end(), context_), contexts.end());
}

void SetDeadline(absl::Time deadline, grpc::ClientContext* context) {
  if (deadline < absl::InfiniteFuture()) context->set_deadline(wire::GrpcTime(deadline));
}

}  // namespace internal

// ---- Credentials ----

namespace internal {
namespace {

// Adds the token to the metadata of every call.
class TokenInterceptor final : public grpc::experimental::Interceptor {
 public:
  explicit TokenInterceptor(const std::string& token) : authorization_(absl::StrCat("Bearer ", token)) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace("authorization", authorization_);
    }
    methods->Proceed();
  }

 private:
  const std::string authorization_;
};

class TokenInterceptorFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit TokenInterceptorFactory(std::string token) : token_(std::move(token)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo*) override {
    return new TokenInterceptor(token_);
  }

 private:
  const std::string token_;
};

absl::Status ReadPem(const char* option, const std::string& path, std::string* content) {
  if (path.empty()) return absl::OkStatus();
  // Uses no std::ifstream, because it throws an exception for a folder.
  if (FILE* const file = std::fopen(path.c_str(), "rb"); file != nullptr) {
    char part[4096];
    while (const size_t count = std::fread(part, 1, sizeof(part), file)) content->append(part, count);
    const bool whole = std::ferror(file) == 0;
    std::fclose(file);
    if (whole && !content->empty()) return absl::OkStatus();
  }
  return ArgumentError(absl::StrCat("options.credentials.", option), path,
                       absl::StrCat("is \"", path, "\", which cannot be read or is empty"));
}

absl::Status FileError(const FileProblem& found, const CredentialOptions& options) {
  const std::string& path = found.option == "ca"     ? options.ca
                            : found.option == "cert" ? options.cert
                                                     : options.key;
  return ArgumentError(absl::StrCat("options.credentials.", found.option), path,
                       absl::StrCat("is \"", path, "\", ", found.problem));
}

absl::Status Check(const CredentialOptions& options) {
  if (options.cert.empty() != options.key.empty()) {
    return ArgumentError(
        options.cert.empty() ? "options.credentials.cert" : "options.credentials.key", "nothing",
        "is not given; a certificate and its key are given together (LOSSD_CERT, LOSSD_KEY)");
  }
  if (!options.cert.empty() && options.ca.empty()) {
    return ArgumentError("options.credentials.ca", "nothing",
                         "is not given (LOSSD_CA); a client certificate is for TLS");
  }
  const bool visible = std::all_of(options.token.begin(), options.token.end(),
                                   [](char c) { return absl::ascii_isgraph(static_cast<unsigned char>(c)); });
  if (!visible) {  // the error must not show the value, which is a secret
    return ArgumentError("options.credentials.token", "something else",
                         "must be of visible ASCII characters");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ChannelCredentials::CheckTarget(const std::string& target) const {
  if (options_.token.empty() || has_tls() || IsLocalTarget(target)) return absl::OkStatus();
  return ArgumentError(
      "options.credentials.ca", "nothing",
      absl::StrCat("is not given (LOSSD_CA); without TLS the token would go to ", target, " unencrypted"));
}

std::shared_ptr<grpc::Channel> ChannelCredentials::Open(const std::string& target,
                                                        const grpc::ChannelArguments& arguments) const {
  const auto credentials =
      has_tls() ? grpc::SslCredentials({pem_.ca, pem_.key, pem_.cert}) : grpc::InsecureChannelCredentials();
  if (options_.token.empty()) return grpc::CreateCustomChannel(target, credentials, arguments);
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<TokenInterceptorFactory>(options_.token));
  return grpc::experimental::CreateCustomChannelWithInterceptors(target, credentials, arguments,
                                                                 std::move(interceptors));
}

absl::Status ChannelCredentials::Diagnose(const std::string& target) const {
  return Explain(Probe(target, {pem_.ca, pem_.cert, pem_.key}), target, options_);
}

}  // namespace internal

std::shared_ptr<const Credentials> Credentials::Insecure() {
  return std::make_shared<internal::ChannelCredentials>(CredentialOptions(), CredentialOptions());
}

absl::StatusOr<std::shared_ptr<const Credentials>> Credentials::Create(const CredentialOptions& options) {
  CredentialOptions pem;
  absl::Status status = internal::Check(options);
  status.Update(internal::ReadPem("ca", options.ca, &pem.ca));
  status.Update(internal::ReadPem("cert", options.cert, &pem.cert));
  status.Update(internal::ReadPem("key", options.key, &pem.key));
  if (!status.ok()) return status;
  const internal::FileProblem found = internal::ProblemOf({pem.ca, pem.cert, pem.key});
  if (!found.option.empty()) return internal::FileError(found, options);
  return std::make_shared<internal::ChannelCredentials>(options, std::move(pem));
}

CredentialOptions Credentials::OptionsFromEnvironment() {
  return {.ca = EnvironmentVariable("LOSSD_CA"),
          .cert = EnvironmentVariable("LOSSD_CERT"),
          .key = EnvironmentVariable("LOSSD_KEY"),
          .token = std::string(absl::StripAsciiWhitespace(EnvironmentVariable("LOSSD_TOKEN")))};
}

absl::StatusOr<std::shared_ptr<const Credentials>> Credentials::FromEnvironment() {
  return Create(OptionsFromEnvironment());
}

std::string TargetFromEnvironment() {
  std::string target = EnvironmentVariable("LOSSD_SERVER");
  return target.empty() ? absl::StrCat("127.0.0.1:", internal::kDefaultPort) : target;
}

}  // namespace lossd::client

namespace lossd::client::internal {

// ---- Diagnosis ----

namespace {

absl::Status NoAnswer(const std::string& target) {
  const HostAndPort at = HostAndPortOf(target);
  return NoServerError(target, absl::StrCat(at.host, " does not answer on port ", at.port,
                                            ". Is the address right, and does a firewall let this machine "
                                            "through?"));
}

absl::Status NoTrust(const std::string& target, const std::string& why, const CredentialOptions& options) {
  return absl::UnauthenticatedError(absl::StrCat("the certificate of the server at ", target,
                                                 " is not trusted: ", why, " (authorities: ", options.ca,
                                                 ")"));
}

absl::Status RefusedCertificate(const std::string& target, const CredentialOptions& options) {
  return absl::UnauthenticatedError(
      absl::StrCat("the server at ", target,
                   " ended the TLS handshake: it wants a client certificate that its authority has "
                   "signed (LOSSD_CERT, LOSSD_KEY)",
                   options.cert.empty() ? "" : ", and refused the one of ", options.cert));
}

}  // namespace

absl::Status NoServerError(const std::string& target, absl::string_view why) {
  return errors::WithViolation(
      absl::UnavailableError(absl::StrCat("no server at ", target, why.empty() ? "" : ": ", why)),
      {std::string(kTargetField), "must be the address of a server", target});
}

absl::Status Explain(const Finding& finding, const std::string& target, const CredentialOptions& options) {
  switch (finding.found) {
    case Found::kUnknown:
      return absl::OkStatus();
    case Found::kNoHost:
      return NoServerError(
          target, absl::StrCat(finding.why, ". Is '", HostAndPortOf(target).host, "' spelled right?"));
    case Found::kNoAnswer:
      return NoAnswer(target);
    case Found::kRefused:
      return NoServerError(target, "the connection was refused, because nothing listens there");
    case Found::kUnreachable:
      return NoServerError(target, finding.why);
    case Found::kClosed:
      return NoServerError(target,
                           "the connection was closed before a word was said. It may be a proxy or a tunnel "
                           "whose server is gone, or a server that has too many connections");
    case Found::kHttp2:
      return absl::FailedPreconditionError(absl::StrCat(
          "the server at ", target,
          " does not speak TLS, and this client does: give no certificate authority (LOSSD_CA)"));
    case Found::kHttp1:
      return absl::FailedPreconditionError(absl::StrCat(
          "what listens at ", target,
          " is an HTTP server, not lossd's gRPC port. Of a lossd this is the port of --http; give "
          "that of --listen"));
    case Found::kOther:
      return absl::FailedPreconditionError(
          absl::StrCat("what listens at ", target,
                       " does not speak gRPC: it is another program than lossd, or another port"));
    case Found::kTls:
      return absl::FailedPreconditionError(
          absl::StrCat("the server at ", target,
                       " speaks TLS and this client does not: name the certificate authority (LOSSD_CA)"));
    case Found::kNotTrusted:
      return NoTrust(target, finding.why, options);
    case Found::kNoClientCert:
      return RefusedCertificate(target, options);
    case Found::kTlsOther:
      return absl::FailedPreconditionError(
          absl::StrCat("what listens at ", target,
                       " speaks TLS, but does not speak gRPC: it is another program than lossd"));
  }
  return absl::OkStatus();
}

// ---- The first call ----

namespace {

// How long the first call waits for an answer, before the client looks for the reason of the silence.
constexpr absl::Duration kSilencePatience = absl::Milliseconds(500);
constexpr absl::Duration kRound = absl::Seconds(5);         // how long each later call waits for an answer
constexpr absl::Duration kPause = absl::Milliseconds(200);  // the wait between two calls

absl::StatusOr<v1::ServerDescription> Ask(const std::shared_ptr<grpc::Channel>& channel, absl::Time deadline,
                                          bool wait_for_ready) {
  grpc::ClientContext context;
  const CancellableContext cancellable(&context);
  context.set_deadline(wire::GrpcTime(deadline));
  context.set_wait_for_ready(wait_for_ready);
  v1::ServerDescription description;
  const grpc::Status status =
      v1::ServerService::NewStub(channel)->GetServer(&context, v1::GetServerRequest(), &description);
  if (!status.ok()) return wire::FromGrpcStatus(status);
  return description;
}

// The error for a server that has answered the first call with an error.
absl::Status Refusal(const absl::Status& status, const std::string& target) {
  if (absl::IsUnimplemented(status)) {
    return absl::UnimplementedError(absl::StrCat(
        "the gRPC server at ", target, " does not know lossd.v1, the protocol of this client (lossd ",
        ClientVersion(), "): it is another program, or a lossd of another version (", status.message(), ")"));
  }
  return status;
}

// Whether the server refuses to describe itself to this client.
bool KnowsNot(const absl::Status& status) {
  return absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status);
}

// Whether another call may succeed.
bool MayPass(const absl::Status& status) { return IsTransient(status) || absl::IsDeadlineExceeded(status); }

// The error after the last attempt. `reason`: what the last diagnosis found; OK: nothing.
absl::Status GaveUp(const absl::Status& reason, const ClientOptions& options) {
  const std::string waited = absl::FormatDuration(options.connect_timeout);
  if (!reason.ok()) {
    return errors::WithMessage(reason, absl::StrCat(reason.message(), "; waited ", waited));
  }
  return absl::UnavailableError(
      absl::StrCat("the server at ", options.target, CanProbe(options.target) ? " takes connections but" : "",
                   " has not answered within ", waited, ": it is busy, or it is another program than lossd"));
}

// Finds out why a call ended with `status`. OK: nothing was found, and the call may be sent again.
absl::Status Reason(const absl::Status& status, bool first, const ChannelCredentials& credentials,
                    const std::string& target) {
  absl::Status reason = credentials.Diagnose(target);
  // UNAVAILABLE means that there is no server. Exception: after the first call, if the probe of the address
  // has found nothing wrong, because then the server may have started since that call.
  const bool tells = absl::IsUnavailable(status) && !(first && CanProbe(target));
  return reason.ok() && tells ? NoServerError(target, status.message()) : reason;
}

}  // namespace

absl::StatusOr<v1::ServerDescription> AwaitServer(const std::shared_ptr<grpc::Channel>& channel,
                                                  const ChannelCredentials& credentials,
                                                  const ClientOptions& options, absl::Time deadline) {
  for (bool first = true;; first = false) {
    const absl::Time end = std::min(deadline, clocks::SteadyNow() + (first ? kSilencePatience : kRound));
    absl::StatusOr<v1::ServerDescription> server = Ask(channel, end, /*wait_for_ready=*/!first);
    if (server.ok()) return server;
    // A server that refuses to describe itself may still answer health checks, so this is no error here.
    // Later calls will return the server's error.
    if (KnowsNot(server.status()) && options.expected_incarnation == 0) return v1::ServerDescription();
    if (!MayPass(server.status())) return Refusal(server.status(), options.target);
    const absl::Status reason = Reason(server.status(), first, credentials, options.target);
    const bool waits = reason.ok() || (absl::IsUnavailable(reason) && options.wait_for_server);
    if (!waits) return reason;
    if (clocks::SteadyNow() >= deadline) return GaveUp(reason, options);
    LOSSD_RETURN_IF_ERROR(Cancellation::Sleep(std::min(kPause, deadline - clocks::SteadyNow())));
  }
}

}  // namespace lossd::client::internal
