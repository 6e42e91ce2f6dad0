// SPDX-License-Identifier: Apache-2.0
// Memory for rows that the leader shares with workers of its host (rows.h).
//
// The life of a region, which is one piece of such memory:
// 1. The leader calls RowRegions::Add. It queues a piece of news for each connected worker: id and size of
//    the region.
// 2. The leader's thread (SharedRows::Run) sends the news with a descriptor of the memory, and calls Told.
//    The worker's state of the region is then kTold.
// 3. The worker's thread (MappedRows::Read) maps the memory and answers. OnAnswer sets the state to kMapped
//    or kRefused.
// 4. From then on RowRegions::Find names places in the region, if the worker has mapped it.
// 5. The destructor of the memory calls Remove. It queues the news that the region is gone, which has no size
//    (bytes is 0), and the worker unmaps the region.
#include "server/ranks/rows.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "proto/wire/shared_memory.h"
#include "server/access/closer.h"
#include "server/log/log.h"

namespace lossd::ranks {

// ---- RowRegions ----

RowRegions::RowRegions(int ranks, std::function<void()> on_news)
    : on_news_(std::move(on_news)), workers_(static_cast<size_t>(ranks)) {}

// ---- RowRegions: memory ----

uint64_t RowRegions::Add(absl::Span<uint8_t> memory, wire::OwnedDescriptor descriptor) {
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  uint64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (regions_.size() >= kMost || memory.empty() || by_begin_.count(begin) > 0) return 0;
    id = next_++;
    regions_[id] = {.id = id,
                    .begin = begin,
                    .bytes = memory.size(),
                    .descriptor = std::make_shared<const wire::OwnedDescriptor>(std::move(descriptor))};
    by_begin_[begin] = id;
    v1::RowsFromLeader news;
    news.set_region(id);
    news.set_bytes(memory.size());
    for (Worker& worker : workers_) {
      if (worker.here) worker.news.push_back(news);
    }
  }
  on_news_();
  return id;
}

void RowRegions::Remove(uint64_t region) {
  Region removed;  // its descriptor is closed without the lock
  {
    absl::MutexLock lock(&mutex_);
    const auto found = regions_.find(region);
    if (found == regions_.end()) return;
    removed = std::move(found->second);
    regions_.erase(found);
    by_begin_.erase(removed.begin);
    v1::RowsFromLeader news;
    news.set_region(region);
    for (Worker& worker : workers_) {
      const auto same = [&](const v1::RowsFromLeader& other) { return other.region() == region; };
      // If the news of the new region is still queued, the worker has never heard of the region: the news is
      // dropped.
      const auto unheard = std::find_if(worker.news.begin(), worker.news.end(), same);
      if (unheard != worker.news.end()) {
        worker.news.erase(unheard);
      } else if (worker.regions.erase(region) > 0) {
        worker.news.push_back(news);
      }
    }
  }
  on_news_();
}

bool RowRegions::Answered(uint64_t region) const {
  return std::all_of(workers_.begin(), workers_.end(), [&](const Worker& worker) {
    const auto found = worker.regions.find(region);
    return !worker.here || (found != worker.regions.end() && found->second != State::kTold);
  });
}

void RowRegions::AwaitAnswers(uint64_t region, absl::Duration limit) const {
  absl::MutexLock lock(&mutex_);
  const auto answered = [&] {
    mutex_.AssertReaderHeld();
    return Answered(region);
  };
  clocks::AwaitFor(mutex_, absl::Condition(&answered), limit);
}

std::optional<v1::RowsPlace> RowRegions::Find(int rank, const void* begin, size_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  absl::MutexLock lock(&mutex_);
  const auto after = by_begin_.upper_bound(address);
  if (after == by_begin_.begin()) return std::nullopt;
  const Region& region = regions_.at(std::prev(after)->second);
  const size_t offset = address - region.begin;
  if (offset > region.bytes || bytes > region.bytes - offset) return std::nullopt;
  const Worker& worker = workers_[static_cast<size_t>(rank)];
  const auto known = worker.regions.find(region.id);
  if (!worker.here || known == worker.regions.end() || known->second != State::kMapped) return std::nullopt;
  v1::RowsPlace place;
  place.set_region(region.id);
  place.set_offset(offset);
  return place;
}

// ---- RowRegions: workers ----

bool RowRegions::Enter(int rank) {
  absl::MutexLock lock(&mutex_);
  Worker& entering = worker(rank);
  if (std::exchange(entering.was_here, true)) return false;
  entering.here = true;
  for (const auto& [id, region] : regions_) {
    v1::RowsFromLeader news;
    news.set_region(id);
    news.set_bytes(region.bytes);
    entering.news.push_back(std::move(news));
  }
  return true;
}

void RowRegions::Leave(int rank) {
  absl::MutexLock lock(&mutex_);
  Worker& leaving = worker(rank);
  leaving.here = false;
  leaving.news.clear();
  leaving.regions.clear();
}

bool RowRegions::AnyHere() const {
  absl::MutexLock lock(&mutex_);
  return std::any_of(workers_.begin(), workers_.end(), [](const Worker& worker) { return worker.here; });
}

std::optional<RowRegions::News> RowRegions::NextNews(int rank) const {
  absl::MutexLock lock(&mutex_);
  const Worker& worker = workers_[static_cast<size_t>(rank)];
  if (worker.news.empty()) return std::nullopt;
  News news{.message = worker.news.front(), .descriptor = nullptr};
  if (news.message.bytes() > 0) news.descriptor = regions_.at(news.message.region()).descriptor;
  return news;
}

// The region may have been removed while the news was sent. Then the worker must also be told that the region
// is gone.
void RowRegions::Told(int rank, const News& news) {
  absl::MutexLock lock(&mutex_);
  Worker& told = worker(rank);
  const uint64_t region = news.message.region();
  if (!told.here) return;
  // False if Remove has dropped the news from the queue in the meantime.
  const bool is_first = !told.news.empty() && told.news.front().region() == region &&
                        told.news.front().bytes() == news.message.bytes();
  if (is_first) told.news.pop_front();
  if (news.message.bytes() == 0) return;  // the region is gone, and the worker knows it
  if (is_first) {
    told.regions[region] = State::kTold;
    return;
  }
  v1::RowsFromLeader gone;
  gone.set_region(region);
  told.news.push_back(std::move(gone));
}

bool RowRegions::OnAnswer(int rank, uint64_t region, bool mapped) {
  absl::MutexLock lock(&mutex_);
  Worker& answering = worker(rank);
  const auto found = answering.regions.find(region);
  if (found != answering.regions.end()) {
    if (found->second != State::kTold) return false;
    found->second = mapped ? State::kMapped : State::kRefused;
    return true;
  }
  // The worker may answer for a region that Remove has taken away in the meantime. An id that was never given
  // is an error of the worker.
  return region > 0 && region < next_ && regions_.count(region) == 0;
}

// ---- MappedRows ----

namespace {

absl::Status Failed(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

absl::Status CheckListener(int socket) {
  LOSSD_TRY(const wire::RegionPeer leader, wire::PeerOf(socket));
  if (leader.user == geteuid()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the leader shares memory as user ", leader.user));
}

absl::Status AwaitWelcome(int socket) {
  pollfd ready = {.fd = socket, .events = POLLIN};
  if (poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(MappedRows::kWelcomeTimeout))) <= 0) {
    return absl::UnavailableError("the leader does not answer on its socket");
  }
  LOSSD_TRY(const wire::RegionPacket packet, wire::ReceiveRegionPacket(socket));
  v1::RowsFromLeader message;
  if (packet.closed || !message.ParseFromString(packet.bytes) || !message.welcome()) {
    return absl::UnavailableError("the leader shares no memory with this process");
  }
  return absl::OkStatus();
}

// Checks that the memory cannot become shorter. If it did, an access would kill this process with SIGBUS.
absl::Status CheckSealed(int descriptor, uint64_t bytes) {
  struct stat status = {};
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || fstat(descriptor, &status) != 0) return Failed("the leader's memory");
  if ((seals & F_SEAL_SHRINK) == 0 || static_cast<uint64_t>(status.st_size) != bytes) {
    return absl::UnavailableError(absl::StrCat("the leader's memory has ", status.st_size,
                                               " bytes instead of ", bytes, ", or may become shorter"));
  }
  return absl::OkStatus();
}

}  // namespace

struct MappedRows::Region {
  Region(uint8_t* data, size_t size) : bytes(data, size) {}
  ~Region() {
    staging.reset();
    munmap(bytes.data(), bytes.size());
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const absl::Span<uint8_t> bytes;
  std::unique_ptr<kernels::StagingMemory> staging;  // the same memory, as the backend knows it
};

absl::StatusOr<std::unique_ptr<MappedRows>> MappedRows::Connect(const std::string& socket,
                                                                const std::string& token,
                                                                kernels::Backend* backend) {
  LOSSD_TRY(wire::OwnedDescriptor connected, wire::ConnectRegionSocket(socket));
  if (absl::Status status = CheckListener(connected.get()); !status.ok()) {
    // The other process may have sent data, which nothing reads.
    access::CloseElsewhere(std::move(connected));
    return status;
  }
  v1::RowsFromWorker hello;
  hello.set_token(token);
  absl::Status status = wire::SendRegionPacket(connected.get(), hello.SerializeAsString(), -1);
  if (status.ok()) status = AwaitWelcome(connected.get());
  if (!status.ok()) return status;
  return std::unique_ptr<MappedRows>(new MappedRows(std::move(connected), backend));
}

MappedRows::MappedRows(wire::OwnedDescriptor socket, kernels::Backend* backend)
    : socket_(std::move(socket)),
      backend_(backend),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { Run(); }) {}

MappedRows::~MappedRows() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

absl::StatusOr<MappedRows::Rows> MappedRows::Find(const v1::RowsPlace& place, uint64_t bytes) const {
  std::shared_ptr<Region> region;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = regions_.find(place.region());
    if (found != regions_.end()) region = found->second;
  }
  if (region == nullptr) {
    return absl::InternalError(
        absl::StrCat("the leader named memory ", place.region(), ", which there is not"));
  }
  const uint64_t size = region->bytes.size();
  if (place.offset() > size || bytes > size - place.offset()) {
    return absl::InternalError(
        absl::StrCat("the leader named ", bytes, " bytes at ", place.offset(), " of memory that has ", size));
  }
  uint8_t* const data = region->bytes.data() + place.offset();
  return Rows{.region = std::move(region), .data = data};
}

// ---- MappedRows: the thread ----

// When the connection ends, regions stay mapped: slices that name places in them may be under way.
void MappedRows::Run() {
  while (true) {
    pollfd ready[] = {{.fd = stop_.get(), .events = POLLIN}, {.fd = socket_.get(), .events = POLLIN}};
    if (poll(ready, 2, -1) < 0 && errno != EINTR) return;
    if (ready[0].revents != 0) return;
    if (ready[1].revents != 0 && !Read()) return;
  }
}

bool MappedRows::Read() {
  absl::StatusOr<wire::RegionPacket> packet = wire::ReceiveRegionPacket(socket_.get());
  v1::RowsFromLeader message;
  if (!packet.ok() || packet->closed || !message.ParseFromString(packet->bytes)) return false;
  // A message without a size says that the region is gone.
  if (message.bytes() == 0) {
    std::shared_ptr<Region> gone;  // unmapped without the lock
    absl::MutexLock lock(&mutex_);
    const auto found = regions_.find(message.region());
    if (found == regions_.end()) return true;
    gone = std::move(found->second);
    regions_.erase(found);
    return true;
  }
  const absl::Status mapped = Map(message.region(), message.bytes(), std::move(packet->descriptor));
  v1::RowsFromWorker answer;
  answer.set_region(message.region());
  if (!mapped.ok()) answer.set_refused(mapped.ToString().substr(0, wire::kMaxRegionPacket / 2));
  return wire::SendRegionPacket(socket_.get(), answer.SerializeAsString(), -1).ok();
}

// Closes the descriptor before it returns, so that the worker no longer holds it when the leader gets the
// answer.
absl::Status MappedRows::Map(uint64_t region, uint64_t bytes, wire::OwnedDescriptor descriptor) {
  if (!descriptor) return absl::UnavailableError("the leader's memory came without a descriptor");
  LOSSD_RETURN_IF_ERROR(CheckSealed(descriptor.get(), bytes));
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (data == MAP_FAILED) return Failed("mmap of the leader's memory");
  // A child process does not need the mapping.
  madvise(data, bytes, MADV_DONTFORK);
  const auto mapped = std::make_shared<Region>(static_cast<uint8_t*>(data), bytes);
  LOSSD_TRY(mapped->staging, backend_->AdoptStaging(mapped->bytes, {.counted = false}));
  absl::MutexLock lock(&mutex_);
  // The news that a region is gone may come after newer regions, so the worker may have more of them mapped
  // than the leader has in its table.
  if (regions_.size() >= 2 * RowRegions::kMost) return absl::ResourceExhaustedError("too many regions");
  regions_[region] = mapped;
  return absl::OkStatus();
}

// ---- SharedRows ----

namespace {

constexpr size_t kTokenBytes = 32;
constexpr size_t kNameBytes = 16;
// Connections in addition to those of the workers, for processes that have not sent a token yet.
constexpr int64_t kStrangers = 8;
constexpr absl::Duration kBeat = absl::Seconds(1);

absl::StatusOr<std::string> Random(size_t bytes) {
  std::string random(bytes, '\0');
  if (getrandom(random.data(), bytes, 0) != static_cast<ssize_t>(bytes)) {
    return absl::UnavailableError("the system has no random numbers");
  }
  return random;
}

// Staging memory that is in the table of regions. Its destructor removes it there.
class SharedStaging final : public kernels::StagingMemory {
 public:
  // `memory`: the memory, which this object owns; null if the caller owns it. Only the first `bytes` bytes
  // are used.
  SharedStaging(RowRegions* regions, uint64_t region, std::unique_ptr<wire::SharedMemory> memory,
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
  const std::unique_ptr<wire::SharedMemory> memory_;
  const std::unique_ptr<kernels::StagingMemory> staging_;  // the same memory, as the backend knows it
  const size_t bytes_;
};

wire::OwnedDescriptor CopyOf(int descriptor) {
  return wire::OwnedDescriptor(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedRows>> SharedRows::Listen(int ranks) {
  LOSSD_TRY(const std::string random, Random(kNameBytes));
  std::vector<std::string> tokens;
  for (int rank = 0; rank < ranks; ++rank) {
    LOSSD_TRY(std::string token, Random(kTokenBytes));
    tokens.push_back(std::move(token));
  }
  std::string name = absl::StrCat("@lossd-rows-", absl::BytesToHexString(random));
  LOSSD_TRY(auto listener, access::ListeningSocket::OpenAbstract(name.substr(1), SOCK_SEQPACKET));
  std::vector<access::ListeningSocket> listeners;
  listeners.push_back(std::move(listener));
  return std::unique_ptr<SharedRows>(
      new SharedRows(ranks, std::move(name), std::move(tokens), std::move(listeners)));
}

SharedRows::SharedRows(int ranks, std::string name, std::vector<std::string> tokens,
                       std::vector<access::ListeningSocket> listeners)
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

// ---- SharedRows: memory ----

absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> SharedRows::Allocate(kernels::Backend* first,
                                                                             int64_t bytes) {
  if (bytes <= 0 || !regions_.AnyHere()) return first->AllocateStaging(bytes);
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> shared = AllocateShared(first, bytes);
  if (shared.ok()) return shared;
  // If there is no room for shared memory, there is mostly no room for other memory either. The error for the
  // other memory is then returned.
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> own = first->AllocateStaging(bytes);
  if (own.ok()) {
    log::Log(log::LogLevel::kWarning, "staging memory is not shared, its rows travel in messages",
             {{"bytes", bytes}, {"error", shared.status().message()}});
  }
  return own;
}

// Adopts the memory, which counts its bytes, before the pages are allocated. So if the bytes exceed a limit,
// no pages are allocated.
absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> SharedRows::AllocateShared(kernels::Backend* first,
                                                                                   int64_t bytes) {
  LOSSD_TRY(std::unique_ptr<wire::SharedMemory> memory, wire::SharedMemory::Reserve(bytes));
  const absl::Span<uint8_t> pages = memory->bytes();
  LOSSD_TRY(std::unique_ptr<kernels::StagingMemory> staging, first->AdoptStaging(pages, {}));
  if (absl::Status status = memory->Fill(); !status.ok()) {
    staging.reset();
    return status;
  }
  wire::OwnedDescriptor descriptor = CopyOf(memory->descriptor());
  // Region 0: the memory is in no table, so its rows travel in messages. It is used all the same.
  const uint64_t region = descriptor ? regions_.Add(pages, std::move(descriptor)) : 0;
  if (region != 0) regions_.AwaitAnswers(region, kMapTimeout);
  return std::make_unique<SharedStaging>(&regions_, region, std::move(memory), std::move(staging),
                                         static_cast<size_t>(bytes));
}

absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> SharedRows::Adopt(
    kernels::Backend* first, absl::Span<uint8_t> memory, const kernels::AdoptOptions& options) {
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> staging = first->AdoptStaging(memory, options);
  if (!staging.ok() || options.descriptor < 0 || !regions_.AnyHere()) return staging;
  wire::OwnedDescriptor descriptor = CopyOf(options.descriptor);
  const uint64_t region = descriptor ? regions_.Add(memory, std::move(descriptor)) : 0;
  if (region == 0) return staging;
  return std::make_unique<SharedStaging>(&regions_, region, nullptr, *std::move(staging), memory.size());
}

// ---- SharedRows: connections ----

void SharedRows::Run() {
  while (true) {
    // The entries of `ready`: stop_, wake_, the listening sockets from 2 on, and from `first` on the
    // sessions, in the order of sessions_.
    std::vector<pollfd> ready = {{.fd = stop_.get(), .events = POLLIN},
                                 {.fd = wake_.get(), .events = POLLIN}};
    entrance_.AddTo(&ready);
    const size_t first = ready.size();
    for (const Session& session : sessions_) {
      const bool has_news = session.rank > 0 && regions_.NextNews(session.rank).has_value();
      const int events = has_news ? POLLIN | POLLOUT : POLLIN;
      ready.push_back({.fd = session.socket.get(), .events = static_cast<int16_t>(events)});
    }
    if (poll(ready.data(), ready.size(), PollTimeoutMilliseconds()) < 0) {
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
      // A session without a rank has not sent its token, and ends at its deadline.
      bool goes_on = current->rank > 0 || now < current->deadline;
      if (goes_on && (events & ~POLLOUT) != 0) goes_on = Read(&*current);
      if (goes_on && (events & POLLOUT) != 0) goes_on = Write(*current);
      if (goes_on) continue;
      if (current->rank > 0) {
        regions_.Leave(current->rank);
        log::Log(log::LogLevel::kDebug, "rank shares no memory any more", {{"rank", current->rank}});
      }
      entrance_.Closing(current->socket.get());
      access::CloseElsewhere(std::move(current->socket));
      sessions_.erase(current);
    }
    // Last, because Accept adds sessions, which have no entry in `ready`.
    for (size_t i = 2; i < first; ++i) {
      if (ready[i].revents != 0) Accept(ready[i].fd);
    }
  }
}

// The time until the next deadline of a session without a token, but at most kBeat, so that the thread gives
// a sign of life.
int SharedRows::PollTimeoutMilliseconds() const {
  absl::Time next = clocks::SteadyNow() + kBeat;
  for (const Session& session : sessions_) {
    if (session.rank == 0) next = std::min(next, session.deadline);
  }
  return wire::PollMilliseconds(next);
}

void SharedRows::Accept(int listener) {
  std::optional<access::Connection> accepted = entrance_.Accept(listener);
  if (!accepted.has_value()) return;
  Session session;
  session.socket = std::move(accepted->socket);
  session.deadline = clocks::SteadyNow() + kTokenTimeout;
  sessions_.push_back(std::move(session));
}

bool SharedRows::Read(Session* session) {
  // Workers send no descriptors. Descriptors that come all the same are closed on another thread, because
  // closing them may block (closer.h).
  std::vector<wire::OwnedDescriptor> unasked;
  absl::StatusOr<wire::RegionPacket> packet = wire::ReceiveRegionPacket(session->socket.get(), &unasked);
  access::CloseElsewhere(std::move(unasked));
  if (packet.ok()) access::CloseElsewhere(std::move(packet->descriptor));
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

// Sends one packet. poll has reported that there is room for it.
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
