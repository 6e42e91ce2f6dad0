// SPDX-License-Identifier: Apache-2.0
// The C interface of the client (lossd_client.h) on the C++ client. CallState is the state of a lossd_call. A
// function that waits for the server runs on a thread of its own (CarryOut), unless its call blocks; loss
// computations run on the client's threads.
#include "client/library/lossd_client.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/connections.h"
#include "client/cpp/contexts.h"
#include "client/cpp/cuda_driver.h"
#include "client/cpp/loss_plan.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "server/messages/convert.h"

namespace lossd::client {
namespace {

// Errors of the C++ client name members of its structs. Replaces them by the names that options and arguments
// have in Python.
std::string InCallersWords(const std::string& text) {
  return absl::StrReplaceAll(text, {{"options.credentials.", ""},
                                    {"options.loss.", "options."},
                                    {"options.", ""},
                                    {"microbatch.", ""},
                                    {"outputs.", ""},
                                    {"gradients.", ""},
                                    {"accumulate_gradients", "accumulate"},
                                    {"REDUCTION_NONE", "reduction 'none'"},
                                    {"Backward", "backward()"}});
}

// Whether the field is a member of a struct of the C++ client, and not a field that the server names.
bool IsOfClient(absl::string_view field) {
  return absl::StartsWith(field, "options.") || absl::StartsWith(field, "microbatch.") ||
         absl::StartsWith(field, "outputs.") || absl::StartsWith(field, "gradients.");
}

// The state of a lossd_call. It is shared, because a loss computation ends on a thread of the client, where
// the handle may be freed already. Thread-safe.
class CallState {
 public:
  internal::Cancellation& cancellation() { return cancellation_; }

  // ---- For the function that uses the call ----

  // Tells that the function begins. False if the call was cancelled before, and so has ended.
  bool Begin() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    begun_ = !ended_;
    return begun_;
  }
  // Runs `body` when the call has ended; it gives back the call's place in Places. Call it once, before the
  // function begins. `body` must take no lock that is held while a function of this class is called.
  void OnEnd(absl::AnyInvocable<void()> body) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (ended_) return body();
    on_end_ = std::move(body);
  }
  void End(absl::Status status, std::string answer = "") ABSL_LOCKS_EXCLUDED(mu_) {
    EndLoss(std::move(status), std::move(answer), {});
  }
  // Ends the call of a loss computation. `cost` has its loss and its costs.
  void EndLoss(absl::Status status, std::string answer, const lossd_result& cost) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (ended_) return;
    // The place is free before any thread can see the end.
    if (on_end_ != nullptr) std::exchange(on_end_, nullptr)();
    status_ = std::move(status);
    message_ = std::string(status_.message());
    answer_ = std::move(answer);
    result_ = cost;
    if (std::optional<v1::ErrorDetail> detail = ErrorDetailOf(status_); detail.has_value()) {
      if (IsOfClient(detail->field())) {
        if (absl::StartsWith(message_, detail->field())) message_ = InCallersWords(message_);
        detail->set_field(InCallersWords(detail->field()));
      }
      detail_ = detail->SerializeAsString();
    }
    ended_ = true;
  }
  void Tell(const v1::SaveProgress& progress) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    progress_ = progress.SerializeAsString();
  }
  // A loss computation has been started.
  void SetPending(PendingLoss pending) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    pending_ = std::move(pending);
    if (cancellation_.cancelled()) pending_->Cancel();
  }

  // ---- For the caller ----

  void Cancel() ABSL_LOCKS_EXCLUDED(mu_) {
    cancellation_.Cancel();
    {
      absl::MutexLock lock(&mu_);
      if (pending_.has_value()) pending_->Cancel();
      if (begun_) return;
    }
    End(absl::CancelledError("cancelled by the caller"));
  }
  bool Wait(absl::Duration limit) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return clocks::AwaitFor(mu_, absl::Condition(&ended_), limit);
  }
  // Removes the PendingLoss and returns it, so that the caller destroys it without the lock.
  std::optional<PendingLoss> TakePending() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return std::exchange(pending_, std::nullopt);
  }
  std::optional<std::string> TakeProgress() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return std::exchange(progress_, std::nullopt);
  }

  // The result. Only after the call has ended; then nothing changes it any more.
  lossd_result Result() const ABSL_NO_THREAD_SAFETY_ANALYSIS {
    lossd_result result = result_;
    result.code = static_cast<int32_t>(status_.code());
    result.reason = RestartOf(status_).has_value() ? 1 : IsStepDiscarded(status_) ? 2 : 0;
    result.message = message_.c_str();
    if (detail_.has_value()) result.detail = detail_->data();
    result.detail_size = detail_.has_value() ? detail_->size() : 0;
    result.answer = answer_.data();
    result.answer_size = answer_.size();
    return result;
  }

 private:
  internal::Cancellation cancellation_;
  absl::Mutex mu_;
  bool begun_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  absl::AnyInvocable<void()> on_end_ ABSL_GUARDED_BY(mu_);
  std::optional<PendingLoss> pending_ ABSL_GUARDED_BY(mu_);
  std::optional<std::string> progress_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::string message_ ABSL_GUARDED_BY(mu_);
  std::optional<std::string> detail_ ABSL_GUARDED_BY(mu_);
  std::string answer_ ABSL_GUARDED_BY(mu_);
  lossd_result result_ ABSL_GUARDED_BY(mu_) = {};  // only the loss and the costs
};

// The places of a client for loss computations (lossd_client_enter). It is shared, because calls that have a
// place may outlive the client. Thread-safe.
class Places {
 public:
  // Takes one of `most` places. False if no place becomes free within `limit`. Always true once the client is
  // closed.
  bool Take(size_t most, absl::Duration limit) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto free = [&] {
      mu_.AssertReaderHeld();
      return taken_ < most || closed_;
    };
    if (!clocks::AwaitFor(mu_, absl::Condition(&free), limit)) return false;
    ++taken_;
    return true;
  }
  void GiveBack() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    --taken_;
  }
  void Close() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }

 private:
  absl::Mutex mu_;
  size_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace
}  // namespace lossd::client

// The handle of a call. Only its state is shared with other threads.
struct lossd_call {
  const bool blocks;
  const std::shared_ptr<lossd::client::CallState> state = std::make_shared<lossd::client::CallState>();
  std::string progress;  // what lossd_call_progress returned last
};

// A client, and the calls under way on it. Thread-safe.
struct lossd_client {
 public:
  using Places = lossd::client::Places;

  // The target of the server and the run of the client; empty before WillConnect.
  std::string target() {
    absl::MutexLock lock(&mu_);
    return target_;
  }
  std::string run() {
    absl::MutexLock lock(&mu_);
    return run_;
  }

  // Notes that `call`, which has begun, is under way until Connect has ended.
  void WillConnect(const std::shared_ptr<lossd::client::CallState>& call,
                   const lossd::client::ClientOptions& options) {
    absl::MutexLock lock(&mu_);
    under_way_.push_back(call);
    target_ = options.target;
    run_ = options.run;
  }
  void Connect(const std::shared_ptr<lossd::client::CallState>& call,
               const lossd::client::ClientOptions& options) {
    auto connected = lossd::client::Client::Connect(options);
    absl::Status status = connected.status();
    // If the server has not told its version, it refuses to describe itself to this client. GetServer returns
    // its error.
    if (status.ok() && (*connected)->monitoring().server_version().empty())
      status = (*connected)->GetServer().status();
    if (status.ok()) {
      absl::MutexLock lock(&mu_);
      if (closed_) {
        status = absl::CancelledError("the client is closed");
      } else {
        client_ = *std::move(connected);
      }
    }
    call->End(std::move(status));
    Leave(call);
  }

  // Returns the client for the function of `call`, which is then under way until Leave. Returns null, and the
  // call has ended, if the call was cancelled before or the client is closed.
  std::shared_ptr<lossd::client::Client> Enter(const std::shared_ptr<lossd::client::CallState>& call) {
    if (!call->Begin()) return nullptr;
    {
      absl::MutexLock lock(&mu_);
      if (client_ != nullptr) {
        under_way_.push_back(call);
        return client_;
      }
    }
    call->End(absl::CancelledError("the client is closed"));
    return nullptr;
  }
  void Leave(const std::shared_ptr<lossd::client::CallState>& call) {
    absl::MutexLock lock(&mu_);
    const auto found = std::find(under_way_.begin(), under_way_.end(), call);
    if (found != under_way_.end()) under_way_.erase(found);
  }

  const std::shared_ptr<Places>& places() const { return places_; }

  void Close() {
    std::shared_ptr<lossd::client::Client> client;
    std::list<std::shared_ptr<lossd::client::CallState>> calls;
    {
      absl::MutexLock lock(&mu_);
      closed_ = true;
      client = std::exchange(client_, nullptr);
      calls = under_way_;
    }
    places_->Close();
    for (const auto& call : calls) call->Cancel();
    const auto none = [this] {
      mu_.AssertReaderHeld();
      return under_way_.empty();
    };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&none));
  }  // the client is destroyed here, or by another thread that closes it too

 private:
  absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::string target_ ABSL_GUARDED_BY(mu_), run_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<lossd::client::Client> client_ ABSL_GUARDED_BY(mu_);
  std::list<std::shared_ptr<lossd::client::CallState>> under_way_ ABSL_GUARDED_BY(mu_);
  const std::shared_ptr<Places> places_ = std::make_shared<Places>();
};

namespace lossd::client {
namespace {

absl::Duration Seconds(double seconds) {
  return seconds < 0 ? absl::InfiniteDuration() : absl::Seconds(seconds);
}

// Runs the work of a function of the library on a new thread. Runs it on this thread if the call blocks, or
// if no thread can be made.
template <typename Body>
void CarryOut(const lossd_call& call, Body body) {
  if (call.blocks) return body();
  auto shared = std::make_shared<Body>(std::move(body));
  try {
    std::thread([shared] { (*shared)(); }).detach();
  } catch (const std::system_error&) {
    (*shared)();
  }
}

// ---- Options ----

// Not-a-number becomes a negative timeout, which is refused later.
absl::Duration Timeout(double seconds) {
  return std::isnan(seconds) ? -absl::InfiniteDuration() : absl::Seconds(seconds);
}

// Joins texts, each with its NUL at the end.
std::string Joined(std::initializer_list<std::string> texts) {
  std::string joined;
  for (const std::string& text : texts) joined.append(text.c_str(), text.size() + 1);
  return joined;
}

// Options as texts "name=value". Each value is taken once.
class GivenOptions {
 public:
  explicit GivenOptions(const char* const* texts) {
    for (; *texts != nullptr; ++texts) {
      const std::pair<std::string, std::string> option = absl::StrSplit(*texts, absl::MaxSplits('=', 1));
      values_[option.first] = option.second;
    }
  }

  std::optional<std::string> Text(const std::string& name) {
    const auto found = values_.extract(name);
    return found.empty() ? std::nullopt : std::make_optional(std::move(found.mapped()));
  }

  // Stores the value of an option in `to`. Leaves `to` as it is if the option is not given. Notes an error if
  // `parse` refuses the text.
  template <typename T, typename Parse>
  void Take(const std::string& name, T& to, Parse parse, absl::string_view kind) {
    const std::optional<std::string> text = Text(name);
    if (!text.has_value()) return;
    if (!parse(*text, to)) {
      status_.Update(internal::ArgumentError(absl::StrCat("options.", name), *text,
                                             absl::StrCat("is ", *text, "; it must be ", kind)));
    }
  }
  template <typename T>
  void Whole(const std::string& name, T& to) {
    const auto parse = [](const std::string& text, T& number) { return absl::SimpleAtoi(text, &number); };
    Take(name, to, parse, absl::StrCat("a whole number of ", 8 * sizeof(T), " bits"));
  }
  template <typename T>
  void Whole(const std::string& name, std::optional<T>& to) {
    T number = 0;
    if (values_.count(name) == 0) return;
    Whole(name, number);
    to = number;
  }
  void Seconds(const std::string& name, absl::Duration& to) {
    Take(
        name, to,
        [](const std::string& text, absl::Duration& time) {
          double seconds = 0;
          const bool read = absl::SimpleAtod(text, &seconds);
          time = Timeout(seconds);
          return read;
        },
        "a number of seconds");
  }
  void Flag(const std::string& name, bool& to) {
    Take(
        name, to, [](const std::string& text, bool& flag) { return absl::SimpleAtob(text, &flag); },
        "true or false");
  }

  // The first error. An option that was not taken is unknown, which is an error too.
  absl::Status status() const {
    if (!status_.ok() || values_.empty()) return status_;
    const auto& [name, value] = *values_.begin();
    return internal::ArgumentError(absl::StrCat("options.", name), value, "is no option of a client");
  }

 private:
  std::map<std::string, std::string> values_;
  absl::Status status_;
};

// The result of reading the options. `client` has no credentials yet; they are made from `credentials`.
struct WantedClient {
  ClientOptions client;
  CredentialOptions credentials;
};

absl::StatusOr<WantedClient> ClientOf(const char* const* options) {
  GivenOptions given(options);
  const ServerArguments arguments = {.server = given.Text("target"),
                                     .context = given.Text("context"),
                                     .ca = given.Text("ca"),
                                     .cert = given.Text("cert"),
                                     .key = given.Text("key"),
                                     .token = given.Text("token")};
  LOSSD_TRY(const ChosenServer chosen, ChooseServer(arguments, CurrentContext::kIsIgnored));
  std::optional<std::string> run = given.Text("run");
  if (!run.has_value()) {
    run = RunFromEnvironment();
    LOSSD_RETURN_IF_ERROR(internal::CheckRunName(*run, "LOSSD_RUN"));
  }
  WantedClient wanted;
  wanted.credentials = chosen.credentials;
  ClientOptions& client = wanted.client;
  client.target = chosen.server;
  client.run = *std::move(run);
  if (auto transport = given.Text("transport"); transport.has_value())
    client.transport = *std::move(transport);
  given.Whole("channels", client.channels);
  given.Whole("max_message_bytes", client.max_message_bytes);
  given.Whole("shared_memory_bytes", client.shared_memory_bytes);
  given.Whole("expected_incarnation", client.expected_incarnation);
  given.Whole("max_attempts", client.retry.max_attempts);
  given.Seconds("initial_backoff", client.retry.initial_backoff);
  given.Seconds("max_backoff", client.retry.max_backoff);
  given.Seconds("connect_timeout", client.connect_timeout);
  given.Seconds("call_timeout", client.call_timeout);
  given.Seconds("transfer_timeout", client.transfer_timeout);
  given.Seconds("loss_timeout", client.loss_timeout);
  given.Seconds("dead_peer_timeout", client.dead_peer_timeout);
  given.Flag("wait_for_server", client.wait_for_server);
  LOSSD_RETURN_IF_ERROR(given.status());
  return wanted;
}

// ---- Requests ----

// A request of the caller, with its timeout and its call.
struct Request : lossd_request {
  Request(const lossd_request& given, CallState* of)
      : lossd_request(given), limit(Timeout(given.timeout)), call(of) {}

  absl::Span<char> Rows() const { return absl::MakeSpan(static_cast<char*>(payload), payload_size); }
  absl::Span<const uint64_t> Shape() const { return absl::MakeConstSpan(shape, dimensions); }

  absl::Duration limit;  // the timeout
  CallState* call;
};

template <typename Message>
absl::StatusOr<Message> Parse(const void* bytes, uint64_t size) {
  Message message;
  if (message.ParseFromArray(bytes, static_cast<int>(size))) return message;
  return absl::InvalidArgumentError(absl::StrCat("the request is no ", message.GetTypeName()));
}

template <typename Message>
absl::StatusOr<Message> Parsed(const Request& request) {
  return Parse<Message>(request.message, request.message_size);
}

template <typename Message>
absl::StatusOr<std::string> Serialized(const absl::StatusOr<Message>& answer) {
  if (!answer.ok()) return answer.status();
  return answer->SerializeAsString();
}

using Carry = absl::StatusOr<std::string> (*)(Client& client, const Request& request);

absl::StatusOr<std::string> Create(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::CreateHeadRequest>(request));
  return Serialized(client.CreateHead(message, request.limit, static_cast<IfExists>(request.if_exists)));
}
absl::StatusOr<std::string> Plan(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::CreateHeadRequest>(request));
  return Serialized(client.PlanHead(message, request.limit));
}
absl::StatusOr<std::string> Reset(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::ResetHeadRequest>(request));
  return Serialized(client.ResetHead(message, request.limit));
}
absl::StatusOr<std::string> Share(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::SetSharesRequest>(request));
  return Serialized(client.SetShares(message, request.limit));
}
absl::StatusOr<std::string> DescribeOne(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::DescribeHeadRequest>(request));
  return Serialized(client.DescribeHead(message.head(), request.limit));
}
absl::StatusOr<std::string> List(Client& client, const Request& request) {
  LOSSD_TRY(const auto heads, client.ListHeads(request.limit));
  v1::ListHeadsResponse answer;
  for (const v1::HeadDescription& head : heads) *answer.add_heads() = head;
  return answer.SerializeAsString();
}
absl::StatusOr<std::string> Delete(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::DeleteHeadRequest>(request));
  LOSSD_RETURN_IF_ERROR(client.DeleteHead(message.head(), request.limit));
  return "";
}
absl::StatusOr<std::string> Norm(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::GradNormRequest>(request));
  const auto step = message.has_step() ? std::make_optional(message.step()) : std::nullopt;
  return Serialized(client.GradNorm(message.head(), step, request.limit));
}
absl::StatusOr<std::string> Apply(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::ApplyStepRequest>(request));
  return Serialized(client.ApplyStep(message, request.limit));
}
absl::StatusOr<std::string> Zero(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::ZeroGradientsRequest>(request));
  return Serialized(client.ZeroGradients(message.head(), message.step(), request.limit));
}
absl::StatusOr<std::string> Save(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::SaveCheckpointRequest>(request));
  const auto tell = [&](const v1::SaveProgress& progress) { request.call->Tell(progress); };
  return Serialized(client.SaveCheckpoint(message, tell, request.limit));
}
absl::StatusOr<std::string> ListSaved(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::ListCheckpointsRequest>(request));
  return Serialized(client.ListCheckpoints(message.head(), request.limit));
}
absl::StatusOr<std::string> Load(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::LoadCheckpointRequest>(request));
  return Serialized(client.LoadCheckpoint(message.checkpoint(), message.head(), request.limit));
}
absl::StatusOr<std::string> DeleteSaved(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::DeleteCheckpointRequest>(request));
  return Serialized(client.DeleteCheckpoint(message.checkpoint(), request.limit));
}
absl::StatusOr<std::string> Read(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::ReadTensorRequest>(request));
  LOSSD_TRY(const auto before, Parse<v1::HeadDescription>(request.head, request.head_size));
  LOSSD_RETURN_IF_ERROR(
      client.ReadTensor(message, request.Rows(), request.limit, request.head == nullptr ? nullptr : &before)
          .status());
  return "";
}
absl::StatusOr<std::string> Write(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::OpenTensor>(request));
  return Serialized(client.WriteTensor(message, request.Rows(), request.limit, request.Shape()));
}
absl::StatusOr<std::string> Add(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::OpenGradient>(request));
  return Serialized(client.AddGradient(message, request.Rows(), request.limit, request.Shape()));
}
absl::StatusOr<std::string> Release(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::ReleaseMicrobatchRequest>(request));
  LOSSD_TRY(const bool released,
            client.ReleaseMicrobatch(message.head(), message.microbatch_id(), request.limit));
  v1::ReleaseMicrobatchResponse answer;
  answer.set_released(released);
  return answer.SerializeAsString();
}
absl::StatusOr<std::string> Server(Client& client, const Request& request) {
  return Serialized(client.GetServer(request.limit));
}
absl::StatusOr<std::string> Streams(Client& client, const Request& request) {
  LOSSD_TRY(const auto message, Parsed<v1::ListStreamsRequest>(request));
  return Serialized(client.monitoring().ListStreams(message.max_streams(), request.limit));
}

constexpr std::pair<absl::string_view, Carry> kMethods[] = {
    {"CreateHead", Create},        {"PlanHead", Plan},
    {"ResetHead", Reset},          {"SetShares", Share},
    {"DescribeHead", DescribeOne}, {"ListHeads", List},
    {"DeleteHead", Delete},        {"GradNorm", Norm},
    {"ApplyStep", Apply},          {"ZeroGradients", Zero},
    {"SaveCheckpoint", Save},      {"ListCheckpoints", ListSaved},
    {"LoadCheckpoint", Load},      {"DeleteCheckpoint", DeleteSaved},
    {"ReadTensor", Read},          {"WriteTensor", Write},
    {"AddGradient", Add},          {"ReleaseMicrobatch", Release},
    {"GetServer", Server},         {"ListStreams", Streams},
};

absl::StatusOr<std::string> Carried(Client& client, const Request& request) {
  if (!(request.limit >= absl::ZeroDuration())) {
    return internal::ArgumentError("timeout", request.timeout,
                                   absl::StrCat("is ", request.timeout, "; it must be positive"));
  }
  for (const auto& [name, carry] : kMethods) {
    if (name == request.method) return carry(client, request);
  }
  return absl::InvalidArgumentError(absl::StrCat("there is no method \"", request.method, "\""));
}

// ---- Loss computations ----

template <typename T>
absl::Span<const T> Values(const T* values, uint64_t count) {
  return values == nullptr ? absl::Span<const T>() : absl::MakeConstSpan(values, static_cast<size_t>(count));
}
template <typename T>
absl::Span<T> Room(T* values, uint64_t count) {
  return values == nullptr ? absl::Span<T>() : absl::MakeSpan(values, static_cast<size_t>(count));
}

// Sets the members that Microbatch and RetainedGradients have in common.
template <typename Rows, typename Open>
void SetRows(Rows& rows, const lossd_loss& given, const Open& open) {
  rows.head = open.head();
  if (open.has_step()) rows.step = open.step();
  rows.id = open.microbatch_id();
  rows.hidden_size = given.hidden_size;
  rows.memory = given.on_device != 0 ? Memory::kDevice : Memory::kHost;
  if (given.has_stream != 0) rows.stream = given.stream;
}

Microbatch MicrobatchOf(const lossd_loss& loss, const v1::OpenMicrobatch& open) {
  Microbatch microbatch;
  SetRows(microbatch, loss, open);
  microbatch.hidden_dtype = open.hidden_dtype();
  microbatch.hidden = loss.hidden;
  microbatch.targets = Values(loss.targets, loss.rows);
  microbatch.row_weights = Values(loss.row_weights, loss.rows);
  microbatch.advantages = Values(loss.advantages, loss.rows);
  microbatch.old_logprobs = Values(loss.old_logprobs, loss.rows);
  microbatch.ref_logprobs = Values(loss.ref_logprobs, loss.rows);
  microbatch.teacher_hidden = loss.teacher_hidden;
  microbatch.teacher_hidden_size = loss.teacher_hidden_size;
  microbatch.target_count = open.target_count();
  microbatch.target_classes = Values(loss.target_classes, loss.rows * open.target_count());
  microbatch.target_weights = Values(loss.target_weights, loss.rows * open.target_count());
  microbatch.classes = Values(loss.classes, loss.classes_size);
  microbatch.embedding = open.embedding();
  for (const lossd_depth& depth : Values(loss.depths, loss.depth_count)) {
    Depth& added = microbatch.depths.emplace_back();
    added.rows = depth.rows;
    added.weight = depth.weight;
    if (depth.has_normalizer != 0) added.normalizer = depth.normalizer;
    added.hidden = depth.hidden;
    added.grad_hidden = depth.grad_hidden;
  }
  return microbatch;
}

LossOutputs OutputsOf(const lossd_loss& loss, const v1::OpenMicrobatch& open) {
  LossOutputs outputs;
  outputs.grad_hidden = loss.grad_hidden;
  outputs.row_loss = Room(loss.row_loss, loss.rows);
  outputs.row_lse = Room(loss.row_lse, loss.rows);
  outputs.row_entropy = Room(loss.row_entropy, loss.rows);
  outputs.row_logprob = Room(loss.row_logprob, loss.rows);
  outputs.row_argmax = Room(loss.row_argmax, loss.rows);
  outputs.class_count = open.class_count();
  outputs.class_logprobs = Room(loss.class_logprobs, loss.rows * open.class_count());
  outputs.top_k = open.top_k();
  outputs.top_logprobs = Room(loss.top_logprobs, loss.rows * open.top_k());
  outputs.top_classes = Room(loss.top_classes, loss.rows * open.top_k());
  return outputs;
}

ComputeOptions OptionsOf(const lossd_loss& loss, const v1::OpenMicrobatch& open) {
  ComputeOptions options;
  options.loss = open.options();
  options.reduction = open.reduction();
  if (open.has_normalizer()) options.normalizer = open.normalizer();
  if (open.has_grad_output()) options.grad_output = open.grad_output();
  options.accumulate_gradients = open.accumulate_gradients();
  options.retain = open.retain();
  options.streams = loss.streams;
  if (loss.slice_bytes != 0) options.slice_bytes = loss.slice_bytes;
  options.timeout = absl::Seconds(loss.timeout);
  options.short_callback = true;
  return options;
}

RetainedGradients GradientsOf(const lossd_loss& backward, const v1::OpenBackward& open) {
  RetainedGradients gradients;
  SetRows(gradients, backward, open);
  gradients.hidden_dtype = static_cast<v1::DType>(backward.hidden_dtype);
  gradients.grad_loss = Values(backward.grad_loss, backward.rows);
  gradients.grad_lse = Values(backward.grad_lse, backward.rows);
  gradients.grad_entropy = Values(backward.grad_entropy, backward.rows);
  return gradients;
}

BackwardOptions OptionsOf(const lossd_loss& backward, const v1::OpenBackward& open) {
  return {.accumulate_gradients = open.accumulate_gradients(),
          .streams = backward.streams,
          .timeout = absl::Seconds(backward.timeout),
          .short_callback = true};
}

std::string SummaryOf(const LossResult& result) {
  v1::MicrobatchSummary summary;
  summary.mutable_state()->set_incarnation(result.incarnation);
  summary.mutable_state()->set_step(result.step);
  summary.mutable_state()->set_weights_version(result.weights_version);
  summary.set_loss_sum(result.loss_sum);
  summary.set_z_loss_sum(result.z_loss_sum);
  summary.set_entropy_sum(result.entropy_sum);
  summary.set_normalizer(result.normalizer);
  summary.set_dropped_mass(result.dropped_mass);
  summary.set_sampling_variance(result.sampling_variance);
  summary.set_squared_gradient(result.squared_gradient);
  *summary.mutable_objective() = result.objective;
  summary.set_divergence_sum(result.divergence_sum);
  summary.set_target_loss_sum(result.target_loss_sum);
  summary.set_valid_rows(result.valid_rows);
  summary.set_unlisted_rows(result.unlisted_rows);
  summary.set_correct_rows(result.correct_rows);
  summary.set_accumulated_rows(result.accumulated_rows);
  summary.set_repeated_rows(result.repeated_rows);
  summary.set_queue_seconds(result.queue_seconds);
  summary.set_compute_seconds(result.compute_seconds);
  for (const DepthResult& depth : result.depths) {
    v1::DepthSummary* const added = summary.add_depths();
    added->set_loss_sum(depth.loss_sum);
    added->set_z_loss_sum(depth.z_loss_sum);
    added->set_entropy_sum(depth.entropy_sum);
    added->set_normalizer(depth.normalizer);
    added->set_valid_rows(depth.valid_rows);
    added->set_correct_rows(depth.correct_rows);
    added->set_accumulated_rows(depth.accumulated_rows);
    added->set_repeated_rows(depth.repeated_rows);
  }
  return summary.SerializeAsString();
}

lossd_result CostOf(const LossResult& result) {
  lossd_result cost = {};
  cost.loss = result.loss;
  cost.wall_seconds = result.wall_seconds;
  cost.sent_bytes = result.sent_bytes;
  cost.received_bytes = result.received_bytes;
  cost.streams = result.streams;
  cost.repeats = result.repeats;
  return cost;
}

// Starts a loss computation for `call`. `start` gets a Client and a callback, and returns the PendingLoss.
// Closing the client waits for the end of the computation.
template <typename Start>
void StartLoss(lossd_client* client, lossd_call* call, Start start) {
  const std::shared_ptr<CallState> state = call->state;
  const std::shared_ptr<Client> open = client->Enter(state);
  if (open == nullptr) return;
  auto end = [client, state](const absl::StatusOr<LossResult>& result) {
    if (result.ok()) {
      state->EndLoss(absl::OkStatus(), SummaryOf(*result), CostOf(*result));
    } else {
      state->End(result.status());
    }
    client->Leave(state);
  };
  state->SetPending(start(*open, std::move(end)));
}

void CopyText(const std::string& text, char* room) {
  const size_t size = std::min<size_t>(text.size(), 63);
  std::memcpy(room, text.data(), size);
  room[size] = '\0';
}

}  // namespace
}  // namespace lossd::client

namespace client = lossd::client;
namespace v1 = lossd::v1;

// ---- Calls ----

lossd_call* lossd_call_new(int blocks) { return new lossd_call{.blocks = blocks != 0}; }

void lossd_call_cancel(lossd_call* call) { call->state->Cancel(); }

int lossd_call_wait(lossd_call* call, double seconds) {
  return call->state->Wait(client::Seconds(seconds)) ? 1 : 0;
}

void lossd_call_result(const lossd_call* call, lossd_result* result) { *result = call->state->Result(); }

const void* lossd_call_progress(lossd_call* call, size_t* size) {
  std::optional<std::string> progress = call->state->TakeProgress();
  *size = 0;
  if (!progress.has_value()) return nullptr;
  call->progress = *std::move(progress);
  *size = call->progress.size();
  return call->progress.data();
}

void lossd_call_free(lossd_call* call) {
  call->state->Cancel();
  call->state->TakePending();  // waits for the end of a loss computation
  call->state->Wait(absl::InfiniteDuration());
  delete call;
}

// ---- Clients ----

void lossd_client_complete(const char* const* options, lossd_call* call) {
  const absl::StatusOr<client::WantedClient> wanted = client::ClientOf(options);
  if (!wanted.ok()) return call->state->End(wanted.status());
  const client::CredentialOptions& shown = wanted->credentials;
  call->state->End(absl::OkStatus(),
                   client::Joined({wanted->client.target, shown.ca, shown.cert, shown.key, shown.token,
                                   wanted->client.transport, wanted->client.run}));
}

lossd_client* lossd_client_new() {
  lossd::clocks::TakeLocksWithoutSearch();
  return new lossd_client();
}

void lossd_client_connect(lossd_client* client, const char* const* options, lossd_call* call) {
  const std::shared_ptr<client::CallState> state = call->state;
  if (!state->Begin()) return;
  absl::StatusOr<client::WantedClient> wanted = client::ClientOf(options);
  if (!wanted.ok()) return state->End(wanted.status());
  auto credentials = client::Credentials::Create(wanted->credentials);
  if (!credentials.ok()) return state->End(credentials.status());
  wanted->client.credentials = *std::move(credentials);
  if (wanted->client.transport == "cuda_ipc") {
    const auto driver = client::internal::CudaDriver::Get();
    if (driver.ok()) wanted->client.gpu = (*driver)->Current();
  }
  client->WillConnect(state, wanted->client);
  client::CarryOut(*call, [client, state, options = std::move(wanted->client)] {
    const client::internal::CancellableCalls cancellable(&state->cancellation());
    client->Connect(state, options);
  });
}

void lossd_client_close(lossd_client* client, lossd_call* call) {
  if (call == nullptr) return client->Close();
  const std::shared_ptr<client::CallState> state = call->state;
  if (!state->Begin()) return;
  client::CarryOut(*call, [client, state] {
    client->Close();
    state->End(absl::OkStatus());
  });
}

void lossd_client_free(lossd_client* client) {
  if (client != nullptr) client->Close();
  delete client;
}

void lossd_client_request(lossd_client* client, const lossd_request* request, lossd_call* call) {
  const std::shared_ptr<client::CallState> state = call->state;
  std::shared_ptr<client::Client> open = client->Enter(state);
  if (open == nullptr) return;
  client::CarryOut(*call, [client, state, open = std::move(open), request]() mutable {
    const client::internal::CancellableCalls cancellable(&state->cancellation());
    absl::StatusOr<std::string> answer = client::Carried(*open, client::Request(*request, state.get()));
    open = nullptr;
    if (answer.ok()) {
      state->End(absl::OkStatus(), *std::move(answer));
    } else {
      state->End(answer.status());
    }
    client->Leave(state);
  });
}

void lossd_client_describe(lossd_client* client, lossd_call* call) {
  const auto under_way = std::make_shared<client::CallState>();
  client::TransportChoice made = {.transport = "grpc",
                                  .reason = "the client is closed",
                                  .connections = {0, "the client is closed"},
                                  .device = {"grpc", "the client is closed"}};
  if (const std::shared_ptr<client::Client> open = client->Enter(under_way); open != nullptr) {
    made = open->transport();
    client->Leave(under_way);
  }
  call->state->End(absl::OkStatus(),
                   client::Joined({client->target(), client->run(), made.transport, made.reason,
                                   absl::StrCat(made.connections.connections), made.connections.reason,
                                   made.device.transport, made.device.reason}));
}

void lossd_client_open_memory(lossd_client* client, int32_t device, lossd_call* call) {
  const std::shared_ptr<client::CallState> state = call->state;
  std::shared_ptr<client::Client> open = client->Enter(state);
  if (open == nullptr) return;
  const std::optional<bool> known = device < 0 ? std::nullopt : open->monitoring().KnowsMemory(device);
  auto end = [client, state](bool of_gpu) {
    state->End(absl::OkStatus(), of_gpu ? "1" : "");
    client->Leave(state);
  };
  if (known.has_value()) {  // no other thread is needed, because nothing blocks
    open = nullptr;
    return end(*known);
  }
  client::CarryOut(*call, [end, open = std::move(open), device]() mutable {
    const bool of_gpu = open->OpenMemory(device < 0 ? std::nullopt : std::make_optional<int>(device));
    open = nullptr;
    end(of_gpu);
  });
}

namespace {

// Runs `body` with the client, for a function without a lossd_call. Does nothing if the client is closed.
template <typename Body>
void WithClient(lossd_client* client, Body body) {
  const auto call = std::make_shared<client::CallState>();
  const std::shared_ptr<client::Client> open = client->Enter(call);
  if (open == nullptr) return;
  body(*open);
  client->Leave(call);
}

}  // namespace

uint64_t lossd_client_known_hidden_size(lossd_client* client, const char* head) {
  uint64_t known = 0;
  WithClient(client,
             [&](client::Client& open) { known = open.monitoring().KnownHiddenSize(head).value_or(0); });
  return known;
}

void lossd_client_acknowledge_restart(lossd_client* client, const char* head) {
  WithClient(client, [&](client::Client& open) { open.AcknowledgeRestart(head); });
}

int lossd_current_gpu(char* uuid) {
  const auto driver = client::internal::CudaDriver::Get();
  const std::optional<int> current = driver.ok() ? (*driver)->Current() : std::nullopt;
  if (!current.has_value()) return -1;
  const absl::StatusOr<std::string> found = (*driver)->UuidOf(*current);
  if (!found.ok()) return -1;
  client::CopyText(*found, uuid);
  return *current;
}

int lossd_gpu_of(const void* address, char* uuid, lossd_call* call) {
  const absl::StatusOr<int> device = [&]() -> absl::StatusOr<int> {
    LOSSD_TRY(client::internal::CudaDriver* const driver, client::internal::CudaDriver::Get());
    const absl::StatusOr<int> found = driver->DeviceOf(address);
    if (!found.ok())
      return absl::InvalidArgumentError(absl::StrCat("not memory of a GPU: ", found.status().message()));
    LOSSD_TRY(const std::string name, driver->UuidOf(*found));
    client::CopyText(name, uuid);
    return *found;
  }();
  call->state->End(device.status());
  return device.ok() ? *device : -1;
}

void lossd_await_stream(void* stream, const void* address, lossd_call* call) {
  call->state->End([&]() -> absl::Status {
    LOSSD_TRY(client::internal::CudaDriver* const driver, client::internal::CudaDriver::Get());
    LOSSD_TRY(const int device, driver->DeviceOf(address));
    LOSSD_TRY(const auto point, driver->PointOf(stream, device));
    return driver->Await(*point);
  }());
}

// ---- Loss computations ----

int lossd_client_enter(lossd_client* client, lossd_call* call, uint32_t most, double seconds) {
  if (!client->places()->Take(most, client::Seconds(seconds))) return 0;
  call->state->OnEnd([places = client->places()] { places->GiveBack(); });
  return 1;
}

void lossd_check_options(const void* options, uint64_t size, lossd_call* call) {
  const auto message = client::Parse<v1::LossOptions>(options, size);
  absl::Status status = message.ok() ? lossd::messages::CheckLossOptions(*message) : message.status();
  call->state->End(status.ok() ? status : lossd::messages::WithDetail(std::move(status), 0));
}

int lossd_check_loss(const lossd_loss* loss, lossd_call* call) {
  absl::Status status = [&]() -> absl::Status {
    if (loss->backward != 0) {
      LOSSD_TRY(const auto open, client::Parse<v1::OpenBackward>(loss->open, loss->open_size));
      return client::internal::ValidateBackward(client::GradientsOf(*loss, open),
                                                client::OptionsOf(*loss, open));
    }
    LOSSD_TRY(const auto open, client::Parse<v1::OpenMicrobatch>(loss->open, loss->open_size));
    return client::internal::ValidateCall(client::MicrobatchOf(*loss, open), client::OutputsOf(*loss, open),
                                          client::OptionsOf(*loss, open));
  }();
  if (status.ok()) return 1;
  call->state->End(std::move(status));
  return 0;
}

void lossd_client_compute(lossd_client* client, const lossd_loss* loss, lossd_call* call) {
  if (loss->backward != 0) {
    const auto open = client::Parse<v1::OpenBackward>(loss->open, loss->open_size);
    if (!open.ok()) return call->state->End(open.status());
    return client::StartLoss(client, call, [&](client::Client& on, client::LossCallback end) {
      return on.BackwardAsync(client::GradientsOf(*loss, *open), loss->grad_hidden,
                              client::OptionsOf(*loss, *open), std::move(end));
    });
  }
  const auto open = client::Parse<v1::OpenMicrobatch>(loss->open, loss->open_size);
  if (!open.ok()) return call->state->End(open.status());
  client::StartLoss(client, call, [&](client::Client& on, client::LossCallback end) {
    return on.ComputeLossAsync(client::MicrobatchOf(*loss, *open), client::OutputsOf(*loss, *open),
                               client::OptionsOf(*loss, *open), std::move(end));
  });
}
