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
#include "server/connections/closer.h"
#include "server/log/log.h"

namespace lossd::regions {
namespace {

constexpr absl::Duration kBeat = absl::Seconds(1);
constexpr int kBehindMilliseconds = 20;

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

void SayWhy(int connection, absl::string_view reason, const connections::Peer&) {
  wire::SendRegionPacket(
      connection,
      Refusal(reason == connections::kStranger ? "the server shares memory with programs of its own user "
                                                 "only, unless its region socket is a file "
                                                 "(--region_socket, --unix_socket_mode)"
                                               : "too many programs share memory with the server"),
      -1)
      .IgnoreError();
}

std::vector<connections::ListeningSocket> One(connections::ListeningSocket socket) {
  std::vector<connections::ListeningSocket> sockets;
  sockets.push_back(std::move(socket));
  return sockets;
}

}  // namespace

SessionServer::SessionServer(connections::ListeningSocket listener, Regions* regions,
                             const SessionLimits& limits)
    : entrance_(One(std::move(listener)),
                {.in_all = limits.in_all, .per_peer = limits.per_user, .on_refused = &SayWhy}),
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
    std::vector<pollfd> ready = {{.fd = wake_.get(), .events = POLLIN}};
    const bool behind = !entrance_.AddTo(&ready);
    const size_t first = ready.size();
    for (const Session& session : sessions_) {
      // Those that have their region are held by their sockets' ends, and the others may send descriptors.
      const bool waits = behind && session.region.empty();
      ready.push_back({.fd = waits ? -1 : session.socket.get(), .events = POLLIN});
      ready.push_back({.fd = session.process.get(), .events = POLLIN});  // poll leaves -1 out
    }
    if (poll(ready.data(), ready.size(), behind ? kBehindMilliseconds : Patience()) < 0) {
      if (errno != EINTR) return;
      continue;
    }
    beat_.Beat();
    if (ready[0].revents != 0) return;
    const absl::Time now = clocks::SteadyNow();
    size_t index = first;
    for (auto session = sessions_.begin(); session != sessions_.end(); index += 2) {
      const auto current = session++;
      bool goes_on = ready[index + 1].revents == 0 && (!current->region.empty() || now < current->deadline);
      if (goes_on && ready[index].revents != 0) goes_on = Serve(&*current);
      if (!goes_on) Close(current);
    }
    for (size_t i = 1; i < first; ++i) {
      if (ready[i].revents != 0) Accept(ready[i].fd);
    }
  }
}

// It also looks now and then, as a sign of life.
int SessionServer::Patience() const {
  absl::Time next = clocks::SteadyNow() + kBeat;
  for (const Session& session : sessions_) {
    if (session.region.empty()) next = std::min(next, session.deadline);
  }
  return wire::PollMilliseconds(next);
}

void SessionServer::Accept(int listener) {
  std::optional<connections::Connection> accepted = entrance_.Accept(listener);
  if (!accepted.has_value()) return;
  const connections::Peer& who = accepted->peer;
  Session session;
  session.socket = std::move(accepted->socket);
  session.process = wire::OwnedDescriptor(OpenProcess(who.process));
  session.holder = absl::StrCat(who.name, " pid ", who.process);
  session.deadline = clocks::SteadyNow() + limits_.request_timeout;
  sessions_.push_back(std::move(session));
  ++sessions_open_;
}

bool SessionServer::Serve(Session* session) {
  std::vector<wire::OwnedDescriptor> unasked;
  absl::StatusOr<wire::RegionPacket> packet = wire::ReceiveRegionPacket(session->socket.get(), &unasked);
  const bool brings = !unasked.empty() || (packet.ok() && packet->descriptor);
  connections::CloseElsewhere(std::move(unasked));
  if (packet.ok()) connections::CloseElsewhere(std::move(packet->descriptor));
  if (!packet.ok() || packet->closed || brings) return false;
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
  connections::CloseElsewhere(std::move(session->socket));
  sessions_.erase(session);
  --sessions_open_;
}

}  // namespace lossd::regions
