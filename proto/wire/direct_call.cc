// SPDX-License-Identifier: Apache-2.0
// Calls within one process (direct_call.h). DirectCall::Advance has the state machine of a call.
#include "proto/wire/direct_call.h"

#include <grpc/slice.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <limits>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"

namespace lossd::wire {
namespace {

// A reaction that copies more than this runs on another thread than the reaction that posts it, because the
// copy takes longer than waking a thread.
constexpr size_t kShortBytes = size_t{64} << 10;
// The most reactions that StartCall or RunHere runs on the thread that calls it.
constexpr int kReactionsOfCaller = 16;

grpc::ByteBuffer CopyOf(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  if (!message.Dump(&slices).ok()) return {};
  const grpc_slice bytes = grpc_slice_malloc(message.Length());
  uint8_t* to = GRPC_SLICE_START_PTR(const_cast<grpc_slice&>(bytes));
  for (const grpc::Slice& slice : slices) {
    std::memcpy(to, slice.begin(), slice.size());
    to += slice.size();
  }
  const grpc::Slice whole(bytes, grpc::Slice::STEAL_REF);
  return grpc::ByteBuffer(&whole, 1);
}

grpc::Status TooLarge(absl::string_view limited, size_t bytes, size_t most) {
  return grpc::Status(
      grpc::StatusCode::RESOURCE_EXHAUSTED,
      absl::StrCat("a message has ", bytes, " bytes; ", limited, " at most ", most, " (max_message_bytes)"));
}

// The published servers of this process, by the target of their clients.
struct Published {
  absl::Mutex mutex;
  std::map<std::string, DirectServer*> servers ABSL_GUARDED_BY(mutex);
};

Published& PublishedServers() {
  static Published& servers = *new Published;  // never destroyed: threads may outlive main
  return servers;
}

void Unpublish(const DirectServer* server) {
  Published& published = PublishedServers();
  absl::MutexLock lock(&published.mutex);
  for (auto it = published.servers.begin(); it != published.servers.end();) {
    it = it->second == server ? published.servers.erase(it) : std::next(it);
  }
}

}  // namespace

// ---- DirectServer ----

// The queue of reactions that one thread runs one after another, including short reactions that these
// reactions post.
class DirectServer::Turn {
 public:
  // `most`: the most time-consuming work of clients that runs in the turn.
  Turn(DirectServer* server, ClientWork most) : server_(server), most_(most) { Current() = this; }
  ~Turn() { Current() = nullptr; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // The turn of this thread; null: there is none.
  static Turn*& Current() {
    thread_local Turn* current = nullptr;
    return current;
  }
  const DirectServer* server() const { return server_; }
  bool Takes(ClientWork work) const { return work <= most_; }
  void Add(Task task) { tasks_.push_back(std::move(task)); }
  // Runs at most `most` tasks, and leaves the others to the server's threads.
  void Run(int most) {
    for (; !tasks_.empty() && most > 0; --most) {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      task();
    }
    for (Task& task : tasks_) server_->Post(std::move(task), /*is_short=*/false);
    tasks_.clear();
  }

 private:
  DirectServer* const server_;
  const ClientWork most_;
  std::deque<Task> tasks_;
};

std::shared_ptr<DirectServer> DirectServer::Create(size_t max_message_bytes, StartFn start) {
  auto server = absl::WrapUnique(new DirectServer(max_message_bytes, std::move(start)));
  DirectServer* const self = server.get();
  const int threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 2, 4);
  for (int i = 0; i < threads; ++i) server->threads_.emplace_back([self] { self->Run(); });
  server->threads_.emplace_back([self] { self->WatchDeadlines(); });
  return std::shared_ptr<DirectServer>(std::move(server));
}

DirectServer::~DirectServer() { Shutdown(); }

void DirectServer::Publish(const std::string& target) {
  Published& published = PublishedServers();
  absl::MutexLock lock(&published.mutex);
  published.servers[target] = this;
}

std::shared_ptr<DirectServer> DirectServer::Find(const std::string& target) {
  Published& published = PublishedServers();
  absl::MutexLock lock(&published.mutex);
  const auto found = published.servers.find(target);
  return found == published.servers.end() ? nullptr : found->second->weak_from_this().lock();
}

uint64_t DirectServer::NextClient() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

std::shared_ptr<DirectCall> DirectServer::Open(ClientReactor* reactor, const DirectCallOptions& options) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return nullptr;
  std::shared_ptr<DirectCall> call(new DirectCall(shared_from_this(), reactor, options));
  calls_.emplace(call.get(), call);
  deadlines_.emplace(options.deadline, call.get());
  return call;
}

void DirectServer::Remove(const DirectCall* call, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  deadlines_.erase({deadline, call});
  calls_.erase(call);
}

void DirectServer::Shutdown() {
  Unpublish(this);
  std::vector<std::shared_ptr<DirectCall>> open;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    for (const auto& [call, owner] : calls_) open.push_back(owner);
  }
  for (const auto& call : open) {
    call->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server has stopped"));
  }
  open.clear();
  {
    absl::MutexLock lock(&mutex_);
    const auto is_idle = [this] {
      mutex_.AssertReaderHeld();
      return calls_.empty();
    };
    mutex_.Await(absl::Condition(&is_idle));
    stopped_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void DirectServer::Post(Task task, bool is_short) {
  Turn* const turn = Turn::Current();
  if (is_short && turn != nullptr && turn->server() == this) return turn->Add(std::move(task));
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
}

void DirectServer::Run() {
  while (true) {
    Turn turn(this, ClientWork::kCopyMuch);
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &DirectServer::HasTask));
      if (tasks_.empty()) return;
      turn.Add(std::move(tasks_.front()));
      tasks_.pop_front();
    }
    turn.Run(std::numeric_limits<int>::max());
  }
}

void DirectServer::WatchDeadlines() {
  absl::MutexLock lock(&mutex_);
  while (!stopped_) {
    const absl::Time next = deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
    const auto changed = [this, next] {
      mutex_.AssertReaderHeld();
      return stopped_ || (!deadlines_.empty() && deadlines_.begin()->first < next);
    };
    if (clocks::AwaitUntil(mutex_, absl::Condition(&changed), next)) continue;
    std::vector<std::shared_ptr<DirectCall>> late;
    while (!deadlines_.empty() && deadlines_.begin()->first <= clocks::SteadyNow()) {
      late.push_back(calls_.at(deadlines_.begin()->second));
      deadlines_.erase(deadlines_.begin());
    }
    mutex_.Unlock();
    for (const auto& call : late) {
      call->End(grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "the call's deadline has passed"));
    }
    late.clear();
    mutex_.Lock();
  }
}

// ---- DirectCall ----

bool DirectCall::IsCancelled() const {
  absl::MutexLock lock(&mutex_);
  return is_cancelled_;
}

bool DirectCall::DeadlineHasPassed() const { return clocks::SteadyNow() >= options_.deadline; }

void DirectCall::Start() {
  std::optional<DirectServer::Turn> turn;
  if (DirectServer::Turn::Current() == nullptr) turn.emplace(server_.get(), ClientWork::kLittle);
  const std::shared_ptr<DirectCall> self = shared_from_this();  // reactions may drop all other references
  auto make_server_reactor = [self] {
    DirectServer::ServerReactor* const reactor = self->server_->start_(self.get(), self->options_.client);
    self->server_side_.Bind(reactor);  // starts operations that the reactor has already asked for
    absl::MutexLock lock(&self->mutex_);
    self->server_reactor_ = reactor;
    --self->server_reactions_;
    self->Advance();
  };
  {
    absl::MutexLock lock(&mutex_);
    started_ = true;
  }
  server_->Post(std::move(make_server_reactor), /*is_short=*/true);
  if (turn.has_value()) turn->Run(kReactionsOfCaller);
}

void DirectCall::RunHere(absl::FunctionRef<void()> operations) {
  if (DirectServer::Turn::Current() != nullptr) return operations();
  const std::shared_ptr<DirectCall> self = shared_from_this();  // reactions may drop all other references
  DirectServer::Turn turn(server_.get(), ClientWork::kWaitForDevice);
  operations();
  turn.Run(kReactionsOfCaller);
}

void DirectCall::ClientWrites(const grpc::ByteBuffer* message, bool is_last) {
  absl::MutexLock lock(&mutex_);
  client_write_ = message;
  is_last_write_ = is_last;
  if (message != nullptr && message->Length() > server_->max_message_bytes_)
    EndLocked(TooLarge("the server takes", message->Length(), server_->max_message_bytes_));
  if (message != nullptr && message->Length() > options_.max_message_bytes)
    EndLocked(TooLarge("the client sends", message->Length(), options_.max_message_bytes));
  Advance();
}

void DirectCall::ClientReads(grpc::ByteBuffer* message) {
  absl::MutexLock lock(&mutex_);
  client_read_ = message;
  Advance();
}

void DirectCall::AddHolds(int holds) {
  absl::MutexLock lock(&mutex_);
  holds_ += holds;
  Advance();
}

void DirectCall::ServerReads(grpc::ByteBuffer* message) {
  absl::MutexLock lock(&mutex_);
  server_read_ = message;
  Advance();
}

void DirectCall::ServerWrites(const grpc::ByteBuffer* message, const grpc::Status* status) {
  absl::MutexLock lock(&mutex_);
  server_write_ = message;
  if (message->Length() > options_.max_message_bytes)
    EndLocked(TooLarge("the client takes", message->Length(), options_.max_message_bytes));
  if (status != nullptr) {
    finish_ = *status;
    is_finished_ = true;
  }
  Advance();
}

void DirectCall::ServerFinishes(grpc::Status status) {
  absl::MutexLock lock(&mutex_);
  finish_ = std::move(status);
  is_finished_ = true;
  Advance();
}

void DirectCall::End(grpc::Status status) {
  absl::MutexLock lock(&mutex_);
  EndLocked(std::move(status));
  Advance();
}

void DirectCall::EndLocked(grpc::Status status) {
  if (status_.has_value()) return;
  status_ = std::move(status);
  is_cancelled_ = true;
}

void DirectCall::Advance() {
  if (!started_ || server_reactor_ == nullptr) return;
  if (!status_.has_value()) AdvanceMessages();
  if (finish_.has_value() && server_write_ == nullptr && !status_.has_value()) status_ = finish_;
  if (is_cancelled_ && !is_finished_ && !std::exchange(is_cancel_posted_, true)) {
    React(&server_reactions_, 0, [reactor = server_reactor_] { reactor->OnCancel(); });
  }
  if (status_.has_value()) FailOperations();
  const bool is_client_idle = client_write_ == nullptr && client_read_ == nullptr && client_reactions_ == 0;
  if (status_.has_value() && is_client_idle && holds_ == 0 && !std::exchange(is_client_done_, true)) {
    PostDone([reactor = client_side_.reactor(), status = *status_] { reactor->OnDone(status); });
  }
  const bool is_server_idle = server_write_ == nullptr && server_read_ == nullptr && server_reactions_ == 0;
  if (is_finished_ && status_.has_value() && is_server_idle && !std::exchange(is_server_done_, true)) {
    PostDone([reactor = server_reactor_] { reactor->OnDone(); });
  }
}

void DirectCall::AdvanceMessages() {
  DirectServer::ClientReactor* const client = client_side_.reactor();
  if (server_read_ != nullptr && client_write_ != nullptr) {
    const grpc::ByteBuffer* const from = std::exchange(client_write_, nullptr);
    grpc::ByteBuffer* const to = std::exchange(server_read_, nullptr);
    ++client_reactions_;  // keeps the client's side open until its reaction is posted, after the copy
    React(&server_reactions_, from->Length(), [this, from, to, client, server = server_reactor_] {
      *to = CopyOf(*from);
      {
        absl::MutexLock lock(&mutex_);
        --client_reactions_;
        React(&client_reactions_, 0, options_.sending, [client] { client->OnWriteDone(true); });
      }
      server->OnReadDone(true);
    });
  }
  if (server_read_ != nullptr && is_last_write_) {
    server_read_ = nullptr;
    React(&server_reactions_, 0, [server = server_reactor_] { server->OnReadDone(false); });
  }
  if (client_read_ != nullptr && server_write_ != nullptr) {
    *std::exchange(client_read_, nullptr) = *server_write_;
    const size_t bytes = std::exchange(server_write_, nullptr)->Length();
    React(&client_reactions_, bytes, options_.receiving, [client] { client->OnReadDone(true); });
    if (!is_finished_)
      React(&server_reactions_, 0, [server = server_reactor_] { server->OnWriteDone(true); });
  }
}

void DirectCall::FailOperations() {
  DirectServer::ClientReactor* const client = client_side_.reactor();
  if (std::exchange(client_write_, nullptr) != nullptr) {
    React(&client_reactions_, 0, [client] { client->OnWriteDone(false); });
  }
  if (std::exchange(client_read_, nullptr) != nullptr) {
    React(&client_reactions_, 0, [client] { client->OnReadDone(false); });
  }
  if (std::exchange(server_read_, nullptr) != nullptr) {
    React(&server_reactions_, 0, [server = server_reactor_] { server->OnReadDone(false); });
  }
  if (std::exchange(server_write_, nullptr) != nullptr && !is_finished_) {
    React(&server_reactions_, 0, [server = server_reactor_] { server->OnWriteDone(false); });
  }
}

void DirectCall::React(int* reactions, size_t bytes, ClientWork work, absl::AnyInvocable<void()> reaction) {
  ++*reactions;
  const DirectServer::Turn* const turn = DirectServer::Turn::Current();
  server_->Post(
      [self = shared_from_this(), reactions, reaction = std::move(reaction)]() mutable {
        reaction();
        absl::MutexLock lock(&self->mutex_);
        --*reactions;
        self->Advance();
      },
      /*is_short=*/bytes <= kShortBytes && (turn == nullptr || turn->Takes(work)));
}

void DirectCall::PostDone(absl::AnyInvocable<void()> reaction) {
  server_->Post(
      [self = shared_from_this(), reaction = std::move(reaction)]() mutable {
        reaction();
        bool is_over = false;
        {
          absl::MutexLock lock(&self->mutex_);
          is_over = --self->open_sides_ == 0;
        }
        if (is_over) self->server_->Remove(self.get(), self->options_.deadline);
      },
      /*is_short=*/true);
}

}  // namespace lossd::wire
