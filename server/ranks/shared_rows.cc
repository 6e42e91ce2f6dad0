// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/shared_rows.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "server/connections/closer.h"
#include "server/log/log.h"
#include "server/memory/shared_memory.h"

namespace lossd::ranks {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr size_t kNameBytes = 16;
// Connections beyond the workers', that have not said a token yet.
constexpr int64_t kStrangers = 8;
constexpr absl::Duration kBeat = absl::Seconds(1);

absl::StatusOr<std::string> Random(size_t bytes) {
  std::string random(bytes, '\0');
  if (getrandom(random.data(), bytes, 0) != static_cast<ssize_t>(bytes)) {
    return absl::UnavailableError("the system has no random numbers");
  }
  return random;
}

// Staging memory that is in the table of regions.
class SharedStaging final : public kernels::StagingMemory {
 public:
  // `memory`: of what this owns; null where it is the caller's. The first `bytes` bytes are used.
  SharedStaging(RowRegions* regions, uint64_t region, std::unique_ptr<memory::SharedMemory> memory,
                std::unique_ptr<kernels::StagingMemory> staging, size_t bytes)
      : regions_(regions),
        region_(region),
        memory_(std::move(memory)),
        staging_(std::move(staging)),
        bytes_(bytes) {}
  ~SharedStaging() override { regions_->Remove(region_); }
  SharedStaging(const SharedStaging&) = delete;
  SharedStaging& operator=(const SharedStaging&) = delete;

  absl::Span<uint8_t> bytes() override { return staging_->bytes().first(bytes_); }
  uint64_t region() const { return region_; }

 private:
  RowRegions* const regions_;
  const uint64_t region_;
  const std::unique_ptr<memory::SharedMemory> memory_;
  const std::unique_ptr<kernels::StagingMemory> staging_;  // the same memory, as the backend knows it
  const size_t bytes_;
};

wire::OwnedDescriptor CopyOf(int descriptor) {
  return wire::OwnedDescriptor(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedRows>> SharedRows::Listen(int ranks) {
  const absl::StatusOr<std::string> random = Random(kNameBytes);
  if (!random.ok()) return random.status();
  std::vector<std::string> tokens;
  for (int rank = 0; rank < ranks; ++rank) {
    absl::StatusOr<std::string> token = Random(kTokenBytes);
    if (!token.ok()) return token.status();
    tokens.push_back(*std::move(token));
  }
  std::string name = absl::StrCat("@lossd-rows-", absl::BytesToHexString(*random));
  auto listener = connections::ListeningSocket::OpenAbstract(name.substr(1), SOCK_SEQPACKET);
  if (!listener.ok()) return listener.status();
  std::vector<connections::ListeningSocket> listeners;
  listeners.push_back(*std::move(listener));
  return std::unique_ptr<SharedRows>(
      new SharedRows(ranks, std::move(name), std::move(tokens), std::move(listeners)));
}

SharedRows::SharedRows(int ranks, std::string name, std::vector<std::string> tokens,
                       std::vector<connections::ListeningSocket> listeners)
    : name_(std::move(name)),
      tokens_(std::move(tokens)),
      entrance_(std::move(listeners), {.in_all = ranks + kStrangers, .per_peer = ranks + kStrangers}),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      regions_(ranks, [this] { eventfd_write(wake_.get(), 1); }),
      thread_([this] { Run(); }) {}

SharedRows::~SharedRows() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

// ---- Memory ----

absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> SharedRows::Allocate(kernels::Backend* first,
                                                                             int64_t bytes) {
  if (bytes <= 0 || !regions_.AnyHere()) return first->AllocateStaging(bytes);
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> shared = AllocateShared(first, bytes);
  if (shared.ok()) return shared;
  // What has no room in shared memory mostly has none elsewhere, and then that error is the one to hear.
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> own = first->AllocateStaging(bytes);
  if (own.ok()) {
    log::Log(log::LogLevel::kWarning, "staging memory is not shared, its rows travel in messages",
             {{"bytes", bytes}, {"error", shared.status().message()}});
  }
  return own;
}

// Counted before its pages are taken, so that a limit refuses what has no room.
absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> SharedRows::AllocateShared(kernels::Backend* first,
                                                                                   int64_t bytes) {
  absl::StatusOr<std::unique_ptr<memory::SharedMemory>> memory = memory::SharedMemory::Reserve(bytes);
  if (!memory.ok()) return memory.status();
  const absl::Span<uint8_t> pages = (*memory)->bytes();
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> staging = kernels::AdoptStaging(first, pages);
  if (!staging.ok()) return staging.status();
  if (absl::Status status = (*memory)->Fill(); !status.ok()) {
    staging->reset();
    return status;
  }
  wire::OwnedDescriptor descriptor = CopyOf((*memory)->descriptor());
  const uint64_t region = descriptor ? regions_.Add(pages, std::move(descriptor)) : 0;
  if (region != 0) regions_.AwaitAnswers(region, kMapTimeout);
  return std::make_unique<SharedStaging>(&regions_, region, *std::move(memory), *std::move(staging),
                                         static_cast<size_t>(bytes));
}

absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> SharedRows::Adopt(
    kernels::Backend* first, absl::Span<uint8_t> memory, const kernels::AdoptOptions& options) {
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> staging =
      kernels::AdoptStaging(first, memory, options);
  if (!staging.ok() || options.descriptor < 0 || !regions_.AnyHere()) return staging;
  wire::OwnedDescriptor descriptor = CopyOf(options.descriptor);
  const uint64_t region = descriptor ? regions_.Add(memory, std::move(descriptor)) : 0;
  if (region == 0) return staging;
  return std::make_unique<SharedStaging>(&regions_, region, nullptr, *std::move(staging), memory.size());
}

// ---- Connections ----

void SharedRows::Run() {
  while (true) {
    std::vector<pollfd> ready = {{.fd = stop_.get(), .events = POLLIN},
                                 {.fd = wake_.get(), .events = POLLIN}};
    entrance_.AddTo(&ready);
    const size_t first = ready.size();
    for (const Session& session : sessions_) {
      const bool has_news = session.rank > 0 && regions_.NextNews(session.rank).has_value();
      const int events = has_news ? POLLIN | POLLOUT : POLLIN;
      ready.push_back({.fd = session.socket.get(), .events = static_cast<int16_t>(events)});
    }
    if (poll(ready.data(), ready.size(), Patience()) < 0) {
      if (errno != EINTR) return;
      continue;
    }
    beat_.Beat();
    if (ready[0].revents != 0) return;
    eventfd_t ignored = 0;
    if (ready[1].revents != 0) eventfd_read(wake_.get(), &ignored);
    const absl::Time now = clocks::SteadyNow();
    size_t index = first;
    for (auto session = sessions_.begin(); session != sessions_.end(); ++index) {
      const auto current = session++;
      const int events = ready[index].revents;
      bool goes_on = current->rank > 0 || now < current->deadline;
      if (goes_on && (events & ~POLLOUT) != 0) goes_on = Read(&*current);
      if (goes_on && (events & POLLOUT) != 0) goes_on = Write(*current);
      if (goes_on) continue;
      if (current->rank > 0) {
        regions_.Leave(current->rank);
        log::Log(log::LogLevel::kDebug, "rank shares no memory any more", {{"rank", current->rank}});
      }
      connections::CloseElsewhere(std::move(current->socket));
      sessions_.erase(current);
    }
    for (size_t i = 2; i < first; ++i) {
      if (ready[i].revents != 0) Accept(ready[i].fd);
    }
  }
}

// It also looks now and then, as a sign of life.
int SharedRows::Patience() const {
  absl::Time next = clocks::SteadyNow() + kBeat;
  for (const Session& session : sessions_) {
    if (session.rank == 0) next = std::min(next, session.deadline);
  }
  return wire::PollMilliseconds(next);
}

void SharedRows::Accept(int listener) {
  std::optional<connections::Connection> accepted = entrance_.Accept(listener);
  if (!accepted.has_value()) return;
  Session session;
  session.socket = std::move(accepted->socket);
  session.deadline = clocks::SteadyNow() + kTokenTimeout;
  sessions_.push_back(std::move(session));
}

bool SharedRows::Read(Session* session) {
  std::vector<wire::OwnedDescriptor> unasked;
  absl::StatusOr<wire::RegionPacket> packet = wire::ReceiveRegionPacket(session->socket.get(), &unasked);
  connections::CloseElsewhere(std::move(unasked));
  if (packet.ok()) connections::CloseElsewhere(std::move(packet->descriptor));
  v1::RowsFromWorker message;
  if (!packet.ok() || packet->closed || !message.ParseFromString(packet->bytes)) return false;
  if (session->rank == 0) return Enter(session, message);
  if (!message.refused().empty()) {
    log::Log(log::LogLevel::kWarning, "rank cannot map memory, rows in it travel in messages",
             {{"rank", session->rank}, {"error", message.refused()}});
  }
  return regions_.OnAnswer(session->rank, message.region(), message.refused().empty());
}

bool SharedRows::Enter(Session* session, const v1::RowsFromWorker& message) {
  for (size_t rank = 1; rank < tokens_.size(); ++rank) {
    const std::string& token = tokens_[rank];
    if (message.token().size() != token.size() ||
        CRYPTO_memcmp(message.token().data(), token.data(), token.size()) != 0) {
      continue;
    }
    if (!regions_.Enter(static_cast<int>(rank))) return false;
    session->rank = static_cast<int>(rank);
    v1::RowsFromLeader welcome;
    welcome.set_welcome(true);
    return wire::SendRegionPacket(session->socket.get(), welcome.SerializeAsString(), -1).ok();
  }
  return false;
}

// One packet: there is room for that, as poll has said.
bool SharedRows::Write(const Session& session) {
  const std::optional<RowRegions::News> news = regions_.NextNews(session.rank);
  if (!news.has_value()) return true;
  const int descriptor = news->descriptor == nullptr ? -1 : news->descriptor->get();
  const absl::Status sent =
      wire::SendRegionPacket(session.socket.get(), news->message.SerializeAsString(), descriptor);
  if (sent.ok()) regions_.Told(session.rank, *news);
  return sent.ok();
}

}  // namespace lossd::ranks
