// SPDX-License-Identifier: Apache-2.0
// The memory, the table and the sessions of regions (regions.h).
#include "server/regions/regions.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "proto/wire/shared_memory.h"
#include "server/access/closer.h"
#include "server/log/log.h"

namespace lossd::regions {
namespace {

class OfHost final : public RegionMemory {
 public:
  OfHost(std::unique_ptr<wire::SharedMemory> memory, std::unique_ptr<kernels::StagingMemory> staging)
      : memory_(std::move(memory)), staging_(std::move(staging)) {}

  absl::Span<uint8_t> bytes() const override { return memory_->bytes(); }
  int descriptor() const override { return memory_->descriptor(); }
  const std::string& device() const override { return none_; }
  absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const override {
    if (to != from.data()) std::memcpy(to, from.data(), from.size());
    return absl::OkStatus();
  }
  absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const override {
    if (to.data() != from) std::memcpy(to.data(), from, to.size());
    return absl::OkStatus();
  }

 private:
  const std::string none_;
  const std::unique_ptr<wire::SharedMemory> memory_;
  const std::unique_ptr<kernels::StagingMemory> staging_;  // the same memory, registered with the backend
};

class OfDevice final : public RegionMemory {
 public:
  OfDevice(std::unique_ptr<kernels::SharedDeviceMemory> memory, std::string device)
      : memory_(std::move(memory)), device_(std::move(device)) {}

  absl::Span<uint8_t> bytes() const override { return memory_->bytes(); }
  int descriptor() const override { return memory_->descriptor(); }
  const std::string& device() const override { return device_; }
  absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const override {
    return memory_->CopyToHost(from, to);
  }
  absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const override {
    return memory_->CopyFromHost(from, to);
  }

 private:
  const std::unique_ptr<kernels::SharedDeviceMemory> memory_;
  const std::string device_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RegionMemory>> HostRegionMemory(kernels::Backend* backend, int64_t bytes) {
  LOSSD_TRY(std::unique_ptr<wire::SharedMemory> memory, wire::SharedMemory::Create(bytes));
  LOSSD_TRY(auto staging, backend->AdoptStaging(memory->bytes(), {.descriptor = memory->descriptor()}));
  return std::make_unique<OfHost>(std::move(memory), std::move(staging));
}

absl::StatusOr<std::unique_ptr<RegionMemory>> DeviceRegionMemory(kernels::Backend* backend,
                                                                 const std::string& device, int64_t bytes) {
  LOSSD_TRY(auto memory, backend->ShareDeviceMemory(device, bytes));
  return std::make_unique<OfDevice>(std::move(memory), device);
}

namespace {

absl::StatusOr<std::string> DrawId() {
  std::string id(wire::kRegionIdBytes, '\0');
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size()))
    return absl::ResourceExhaustedError("the system has no random numbers");
  return id;
}

// Bytes taken of a budget; the destructor gives them back.
class Taken {
 public:
  Taken(std::shared_ptr<RegionBudget> budget, std::string holder, int64_t bytes)
      : budget_(std::move(budget)), holder_(std::move(holder)), bytes_(bytes) {}
  ~Taken() { budget_->Give(holder_, bytes_); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  int64_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<RegionBudget> budget_;
  const std::string holder_;
  const int64_t bytes_;
};

}  // namespace

int64_t RegionBudget::Take(absl::string_view holder, int64_t bytes, int64_t least) {
  absl::MutexLock lock(&mutex_);
  for (int64_t amount = std::min(bytes, most_); amount >= least && amount > 0; amount /= 2) {
    if (shares_.Take(holder, amount) == engine::FairShare::Answer::kYes) return amount;
  }
  return 0;
}

void RegionBudget::Give(absl::string_view holder, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  shares_.Give(holder, bytes);
}

int64_t RegionBudget::used() const {
  absl::MutexLock lock(&mutex_);
  return shares_.used();
}

Regions::Regions(kernels::Backend* backend, const RegionLimits& limits, double peer_share)
    : backend_(backend), devices_(backend->SharingDevices()) {
  budgets_[""] = std::make_shared<RegionBudget>(limits.host_bytes, peer_share);
  for (const std::string& device : devices_) {
    budgets_[device] = std::make_shared<RegionBudget>(limits.device_bytes, peer_share);
  }
}

absl::StatusOr<std::shared_ptr<Region>> Regions::Create(const std::string& holder, const std::string& device,
                                                        int64_t bytes) {
  const auto found = budgets_.find(device);
  if (found == budgets_.end()) {
    return errors::FieldError(
        "device", absl::StrCat("be one of the server's GPUs, ", absl::StrJoin(devices_, ", ")), device);
  }
  const std::shared_ptr<RegionBudget>& budget = found->second;
  const auto taken = std::make_shared<const Taken>(budget, holder,
                                                   budget->Take(holder, bytes, std::min(bytes, kLeastBytes)));
  if (taken->bytes() == 0) {
    return absl::ResourceExhaustedError(
        device.empty()
            ? std::string("--shared_memory_bytes has nothing left for this process")
            : absl::StrCat("--shared_device_memory_bytes has nothing left for this process on ", device));
  }
  LOSSD_TRY(std::string id, DrawId());
  LOSSD_TRY(std::unique_ptr<RegionMemory> memory, Allocate(device, taken->bytes()));
  auto region = std::make_unique<Region>(id, std::move(memory));
  // The deleter holds `taken`, so the bytes are given back after the memory.
  std::shared_ptr<Region> shared(region.release(), [taken](const Region* gone) { delete gone; });
  absl::MutexLock lock(&mutex_);
  entries_[std::move(id)] = {.region = shared};
  return shared;
}

absl::StatusOr<std::unique_ptr<RegionMemory>> Regions::Allocate(const std::string& device, int64_t bytes) {
  if (device.empty()) return HostRegionMemory(backend_, bytes);
  absl::StatusOr<std::unique_ptr<RegionMemory>> memory = DeviceRegionMemory(backend_, device, bytes);
  if (!absl::IsUnimplemented(memory.status())) return memory;
  absl::MutexLock lock(&mutex_);
  if (refusals_logged_.insert(device).second) {
    log::Log(log::LogLevel::kWarning, "no memory of a GPU for clients",
             {{"device", device}, {"error", memory.status().message()}});
  }
  return memory;
}

std::vector<RegionUse> Regions::Uses() const {
  std::vector<RegionUse> uses;
  const auto add = [&](const std::string& device) {
    const RegionBudget& budget = *budgets_.at(device);
    uses.push_back({device, budget.used(), budget.limit()});
  };
  add("");
  for (const std::string& device : devices_) add(device);
  return uses;
}

int64_t Regions::used_bytes() const {
  int64_t bytes = 0;
  for (const auto& [device, budget] : budgets_) bytes += budget->used();
  return bytes;
}

void Regions::Forget(const std::string& id) {
  std::shared_ptr<Region> forgotten;  // destroyed, with its memory, after the lock is released
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(id);
  if (entry == entries_.end()) return;
  forgotten = std::move(entry->second.region);
  entries_.erase(entry);
}

std::shared_ptr<Region> Regions::Claim(absl::string_view id, absl::string_view identity) {
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(id);
  if (entry == entries_.end()) return nullptr;
  std::optional<std::string>& owner = entry->second.owner;
  if (!owner.has_value()) owner = std::string(identity);
  return *owner == identity ? entry->second.region : nullptr;
}

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

void SayWhy(int connection, absl::string_view reason, const access::Peer&) {
  wire::SendRegionPacket(
      connection,
      Refusal(reason == access::kStranger ? "the server shares memory with programs of its own user "
                                            "only, unless its region socket is a file "
                                            "(--region_socket, --unix_socket_mode)"
                                          : "too many programs share memory with the server"),
      -1)
      .IgnoreError();
}

std::vector<access::ListeningSocket> One(access::ListeningSocket socket) {
  std::vector<access::ListeningSocket> sockets;
  sockets.push_back(std::move(socket));
  return sockets;
}

}  // namespace

SessionServer::SessionServer(access::ListeningSocket listener, Regions* regions, const SessionLimits& limits)
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
      // While the closer is behind, sessions without a region are not read, because they may send
      // descriptors.
      const bool waits = behind && session.region.empty();
      ready.push_back({.fd = waits ? -1 : session.socket.get(), .events = POLLIN});
      ready.push_back({.fd = session.process.get(), .events = POLLIN});  // poll ignores -1
    }
    if (poll(ready.data(), ready.size(), behind ? kBehindMilliseconds : PollTimeoutMilliseconds()) < 0) {
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

// The time until the next deadline of a session without a region, but at most kBeat, so that the thread shows
// that it is alive.
int SessionServer::PollTimeoutMilliseconds() const {
  absl::Time next = clocks::SteadyNow() + kBeat;
  for (const Session& session : sessions_) {
    if (session.region.empty()) next = std::min(next, session.deadline);
  }
  return wire::PollMilliseconds(next);
}

void SessionServer::Accept(int listener) {
  std::optional<access::Connection> accepted = entrance_.Accept(listener);
  if (!accepted.has_value()) return;
  const access::Peer& who = accepted->peer;
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
  access::CloseElsewhere(std::move(unasked));
  if (packet.ok()) access::CloseElsewhere(std::move(packet->descriptor));
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
  entrance_.Closing(session->socket.get());
  access::CloseElsewhere(std::move(session->socket));
  sessions_.erase(session);
  --sessions_open_;
}

}  // namespace lossd::regions
