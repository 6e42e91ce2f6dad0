// SPDX-License-Identifier: Apache-2.0
// Threads of the service (workers.h): WorkerPool, AdminWorkers with its rules of fairness, and Pulse.
#include "server/rpc/workers.h"

#include <sys/socket.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace lossd::rpc {

WorkerPool::WorkerPool(int threads, size_t max_queued_tasks) : max_queued_tasks_(max_queued_tasks) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

bool WorkerPool::Schedule(Task task) {
  absl::MutexLock lock(&mutex_);
  if (stopped_ || tasks_.size() >= max_queued_tasks_) return false;
  tasks_.push_back(std::move(task));
  return true;
}

void WorkerPool::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void WorkerPool::Run() {
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &WorkerPool::HasWork));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

namespace {

using engine::FairShare;

constexpr int kLookThreads = 2;
constexpr absl::string_view kLongTasks = "long";
constexpr absl::string_view kLists = "lists";

bool IsLook(AdminKind kind) { return kind == AdminKind::kLook || kind == AdminKind::kList; }

std::string KeyOfPeer(const AdminTask& task) { return absl::StrCat("peer ", task.peer); }

// The key of the tasks that share one limit on a head.
std::string KeyOfHead(const AdminTask& task) {
  switch (task.kind) {
    case AdminKind::kRead:
      return absl::StrCat("read ", task.head);
    case AdminKind::kRows:
      return absl::StrCat("rows ", task.head);
    default:
      return absl::StrCat("change ", task.head);
  }
}

int64_t MostOfHead(AdminKind kind) {
  switch (kind) {
    case AdminKind::kRead:
      return 2;
    case AdminKind::kRows:
      return AdminWorkers::kRowsOfHead;
    default:
      return 1;
  }
}

}  // namespace

AdminWorkers::AdminWorkers(const AdminWorkersOptions& options)
    : options_(options), waiting_(options.max_waiting, options.peer_share) {
  for (int i = 0; i < options.threads + kLookThreads; ++i) {
    threads_.emplace_back([this, looks = i < kLookThreads] { Run(looks); });
  }
}

AdminWorkers::~AdminWorkers() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status AdminWorkers::Schedule(const AdminTask& task, Work work) {
  absl::MutexLock lock(&mutex_);
  if (stopped_) return absl::UnavailableError("the server is shutting down");
  switch (waiting_.Take(task.peer, 1)) {
    case FairShare::Answer::kYes:
      queue_.push_back({task, std::move(work)});
      return absl::OkStatus();
    case FairShare::Answer::kFull:
      options_.on_limit("max_waiting_calls");
      return absl::ResourceExhaustedError(absl::StrCat("too many operations are waiting: ", waiting_.used(),
                                                       ", the most allowed (--max_waiting_calls)"));
    case FairShare::Answer::kOverShare:
      break;
  }
  options_.on_limit("peer_share");
  return absl::ResourceExhaustedError(
      absl::StrCat("too many operations are waiting: ", waiting_.held(task.peer), " of ", task.peer,
                   ", which is its share (--max_waiting_calls, --peer_share)"));
}

int64_t AdminWorkers::Running(const std::string& key) const {
  const auto it = running_.find(key);
  return it == running_.end() ? 0 : it->second;
}

void AdminWorkers::Count(const AdminTask& task, int change) {
  const auto add = [&](const std::string& key) {
    mutex_.AssertHeld();
    const auto it = running_.emplace(key, 0).first;
    it->second += change;
    if (it->second == 0) running_.erase(it);
  };
  if (task.kind == AdminKind::kList) add(std::string(kLists));
  if (IsLook(task.kind)) return;
  if (!task.peer.empty()) add(KeyOfPeer(task));
  if (!task.head.empty()) add(KeyOfHead(task));
  if (task.kind == AdminKind::kLong) add(std::string(kLongTasks));
}

bool AdminWorkers::MayRun(const AdminTask& task) const {
  const int64_t half = std::max(1, options_.threads / 2);
  if (task.kind == AdminKind::kLong && Running(std::string(kLongTasks)) >= half) return false;
  if (options_.peer_share < 1.0 && !task.peer.empty() && Running(KeyOfPeer(task)) >= half) return false;
  return task.head.empty() || Running(KeyOfHead(task)) < MostOfHead(task.kind);
}

AdminWorkers::Queue::iterator AdminWorkers::NextLook() {
  const bool is_listing = Running(std::string(kLists)) > 0;
  auto best = queue_.end();
  uint64_t earliest = std::numeric_limits<uint64_t>::max();
  for (auto it = queue_.begin(); it != queue_.end(); ++it) {
    if (!IsLook(it->task.kind) || (it->task.kind == AdminKind::kList && is_listing)) continue;
    const auto turn = turns_.find(it->task.peer);
    const uint64_t last = turn == turns_.end() ? 0 : turn->second;
    if (last >= earliest) continue;
    best = it;
    earliest = last;
    if (last == 0) break;
  }
  return best;
}

void AdminWorkers::TookTurn(const std::string& peer) {
  const bool has_more = std::any_of(queue_.begin(), queue_.end(), [&peer](const Queued& queued) {
    return IsLook(queued.task.kind) && queued.task.peer == peer;
  });
  if (has_more) {
    turns_[peer] = ++last_turn_;
  } else {
    turns_.erase(peer);
  }
}

AdminWorkers::Queue::iterator AdminWorkers::Next(bool looks) {
  if (looks) return NextLook();
  auto best = queue_.end();
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (auto it = queue_.begin(); it != queue_.end(); ++it) {
    if (IsLook(it->task.kind)) continue;
    const int64_t running = it->task.peer.empty() ? 0 : Running(KeyOfPeer(it->task));
    if (running < fewest && MayRun(it->task)) {
      best = it;
      fewest = running;
    }
  }
  return best;
}

bool AdminWorkers::HasWork(bool looks) {
  if (Next(looks) != queue_.end()) return true;
  return stopped_ && std::none_of(queue_.begin(), queue_.end(), [looks](const Queued& queued) {
           return IsLook(queued.task.kind) == looks;
         });
}

void AdminWorkers::Run(bool looks) {
  while (true) {
    AdminTask task;
    Work work;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, looks ? &AdminWorkers::HasLook : &AdminWorkers::HasOther));
      const auto next = Next(looks);
      if (next == queue_.end()) return;
      task = std::move(next->task);
      work = std::move(next->work);
      queue_.erase(next);
      if (looks) TookTurn(task.peer);
      waiting_.Give(task.peer, 1);
      Count(task, 1);
    }
    work();
    work = nullptr;
    absl::MutexLock lock(&mutex_);
    Count(task, -1);
  }
}

namespace {

constexpr absl::Duration kAsk = absl::Seconds(1);

// HTTP/2: a frame begins with its length (3 bytes), type, flags and stream. An empty SETTINGS frame is a
// question that the other side has to acknowledge. Unlike PING, it may be sent any number of times.
constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr absl::string_view kSettings("\0\0\0\4\0\0\0\0\0", 9);
constexpr absl::string_view kAcknowledge("\0\0\0\4\1\0\0\0\0", 9);
constexpr size_t kFrameHeader = 9;
constexpr size_t kMostUnread = size_t{64} << 10;
constexpr uint8_t kSettingsType = 4;
constexpr uint8_t kPingType = 6;
constexpr uint8_t kAckFlag = 1;

bool Send(int socket, absl::string_view bytes) {
  return send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace

Pulse::Pulse(grpc::ServerBuilder* builder)
    : taker_(builder->experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
          grpc::InsecureServerCredentials())) {}

void Pulse::Start() {
  beat_.Beat();
  watched_ = true;
  Ask();  // opens the connection at once
  thread_.emplace(kAsk, [this] { Ask(); });
}

void Pulse::Stop() {
  watched_ = false;
  thread_.reset();
  socket_ = wire::OwnedDescriptor();
}

bool Pulse::Connect() {
  int ends[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) return false;
  socket_ = wire::OwnedDescriptor(ends[0]);
  unread_.clear();
  unanswered_ = 0;
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters mine;
  mine.listener_fd = -1;
  mine.fd = ends[1];
  taker_->HandleNewConnection(&mine);
  return Send(socket_.get(), kPreface) && Send(socket_.get(), kSettings);
}

// gRPC closes the connection when it is short of memory, or when the connection has been idle for long. Then
// Pulse opens another one. If this fails because no file descriptor is left, gRPC does not count as silent.
void Pulse::Ask() {
  if (socket_) ReadAnswers();
  if (!socket_) {
    if (!Connect()) beat_.Beat();
    unanswered_ = 1;
    return;
  }
  if (unanswered_ == 0 && Send(socket_.get(), kSettings)) unanswered_ = 1;
}

void Pulse::ReadAnswers() {
  char bytes[4096];
  while (true) {
    const ssize_t received = recv(socket_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (received < 0) break;
    if (received == 0) {
      beat_.Beat();  // gRPC has closed the connection, so its threads work
      socket_ = wire::OwnedDescriptor();
      return;
    }
    unread_.append(bytes, static_cast<size_t>(received));
  }
  size_t at = 0;
  while (unread_.size() - at >= kFrameHeader) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(unread_[at + i]); };
    const size_t length = size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2);
    if (unread_.size() - at < kFrameHeader + length) break;
    const bool acknowledges = (byte(4) & kAckFlag) != 0;
    if (byte(3) == kSettingsType && !acknowledges) Send(socket_.get(), kAcknowledge);
    if (byte(3) == kPingType && !acknowledges) {
      std::string answer = unread_.substr(at, kFrameHeader + length);
      answer[4] = static_cast<char>(kAckFlag);
      Send(socket_.get(), answer);
    }
    if (byte(3) == kSettingsType && acknowledges) {
      unanswered_ = 0;
      beat_.Beat();
    }
    at += kFrameHeader + length;
  }
  unread_.erase(0, at);
  if (unread_.size() > kMostUnread) socket_ = wire::OwnedDescriptor();
}

}  // namespace lossd::rpc
