// SPDX-License-Identifier: Apache-2.0
#include "server/regions/session_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "server/log/log.h"

namespace lossd::regions {
namespace {

int OpenProcess(pid_t process) { return static_cast<int>(syscall(SYS_pidfd_open, process, 0)); }

std::string Refusal(absl::string_view reason) {
  v1::RegionAnswer answer;
  answer.mutable_refused()->set_reason(std::string(reason));
  return answer.SerializeAsString();
}

std::string Opened(const Region& region) {
  v1::RegionAnswer answer;
  answer.mutable_opened()->set_id(region.id());
  answer.mutable_opened()->set_bytes(region.bytes().size());
  answer.mutable_opened()->set_device(region.memory().device());
  return answer.SerializeAsString();
}

}  // namespace

SessionServer::SessionServer(int listener, Regions* regions, const SessionLimits& limits)
    : listener_(listener),
      regions_(regions),
      limits_(limits),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { Run(); }) {}

SessionServer::~SessionServer() {
  eventfd_write(wake_.get(), 1);
  thread_.join();
  while (!sessions_.empty()) Close(sessions_.begin());
}

void SessionServer::Run() {
  while (true) {
    std::vector<pollfd> ready = {{.fd = wake_.get(), .events = POLLIN}, {.fd = listener_, .events = POLLIN}};
    for (const Session& session : sessions_) {
      ready.push_back({.fd = session.socket.get(), .events = POLLIN});
      ready.push_back({.fd = session.process.get(), .events = POLLIN});  // poll leaves -1 out
    }
    if (poll(ready.data(), ready.size(), Patience()) < 0 && errno != EINTR) return;
    if (ready[0].revents != 0) return;
    const absl::Time now = clocks::SteadyNow();
    size_t index = 2;
    for (auto session = sessions_.begin(); session != sessions_.end(); index += 2) {
      const auto current = session++;
      bool goes_on = ready[index + 1].revents == 0 && (!current->region.empty() || now < current->deadline);
      if (goes_on && ready[index].revents != 0) goes_on = Serve(&*current);
      if (!goes_on) Close(current);
    }
    if (ready[1].revents != 0) Accept();
  }
}

int SessionServer::Patience() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Session& session : sessions_) {
    if (session.region.empty()) next = std::min(next, session.deadline);
  }
  return wire::PollMilliseconds(next);
}

void SessionServer::Accept() {
  absl::StatusOr<wire::AcceptedRegionSocket> accepted = wire::AcceptRegionSocket(listener_);
  if (!accepted.ok()) return;
  const wire::RegionPeer& who = accepted->peer;
  const auto refuse = [&](absl::string_view reason) {
    wire::SendRegionPacket(accepted->socket.get(), Refusal(reason), -1).IgnoreError();
  };
  if (limits_.own_user_only && who.user != geteuid() && who.user != 0)
    return refuse(
        "the server shares memory with programs of its own user only, unless its region socket is a file "
        "(--region_socket, --unix_socket_mode)");
  const int64_t of_user = std::count_if(sessions_.begin(), sessions_.end(),
                                        [&](const Session& other) { return other.user == who.user; });
  if (static_cast<int64_t>(sessions_.size()) >= limits_.in_all || of_user >= limits_.per_user)
    return refuse("too many programs share memory with the server");
  Session session;
  session.socket = std::move(accepted->socket);
  session.user = who.user;
  session.process = wire::OwnedDescriptor(OpenProcess(who.process));
  session.holder = absl::StrCat("uid ", who.user, " pid ", who.process);
  session.deadline = clocks::SteadyNow() + limits_.request_timeout;
  sessions_.push_back(std::move(session));
  ++sessions_open_;
}

bool SessionServer::Serve(Session* session) {
  const absl::StatusOr<wire::RegionPacket> packet = wire::ReceiveRegionPacket(session->socket.get());
  if (!packet.ok() || packet->closed) return false;
  const auto refuse = [&](absl::string_view reason) {
    wire::SendRegionPacket(session->socket.get(), Refusal(reason), -1).IgnoreError();
    return false;
  };
  if (!session->region.empty()) return refuse("a connection has one region");
  const absl::StatusOr<v1::RegionRequest> request = wire::ParseRegionRequest(packet->bytes);
  if (!request.ok()) return refuse(request.status().message());
  const std::vector<std::string>& devices = regions_->devices();
  if (request->of_device() && devices.empty()) return refuse("the server shares no memory of a GPU");
  const bool of_first = request->of_device() && request->device().empty();
  const absl::StatusOr<std::shared_ptr<Region>> region =
      regions_->Create(session->holder, of_first ? devices.front() : request->device(),
                       static_cast<int64_t>(request->bytes()));
  if (!region.ok()) return refuse(region.status().message());
  session->region = (*region)->id();
  log::Log(log::LogLevel::kDebug, "region opened",
           {{"holder", session->holder},
            {"bytes", static_cast<int64_t>((*region)->bytes().size())},
            {"device", (*region)->memory().device()}});
  return wire::SendRegionPacket(session->socket.get(), Opened(**region), (*region)->memory().descriptor())
      .ok();
}

void SessionServer::Close(std::list<Session>::iterator session) {
  if (!session->region.empty()) regions_->Forget(session->region);
  sessions_.erase(session);
  --sessions_open_;
}

}  // namespace lossd::regions
